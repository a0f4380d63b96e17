"""What a cycle of 8 microbatches communicates and computes, by approach, on several devices.

    python benchmarks/collectives.py [--microbatches 8] [--tpu 8|64] [--two-processes] [--save]

A small Transformer (that of examples/train_lm.py), 512 rows over a mesh of 8 CPU devices, one
clip + AdamW step. Counted from the compiled program, per device and cycle: reductions of at
least 1 KiB, inside loops times the trip count; the work in matrix products over an even share
of the whole batch's; temporary memory. Nothing runs. With --tpu the programs are compiled for
8 or 64 chips of a TPU v5e without them (needs libtpu). With --two-processes the step is timed
instead, on two processes of two CPU devices, per cycle against per microbatch, and nothing saved.
"""

import argparse
import os
import pathlib
import subprocess
import sys

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import measure
import optax
import paths  # noqa: F401
import results
from support import devices, trees
from support.compiled import executions
from support.matrix_flops import matrix_flops
from support.optimizers import mini_step
import train_lm

import optax_accum

LAYERS = 4


def approaches(loss_fn, tx, mesh, n):
  """Name -> the step, and its optimizer."""
  grad = jax.grad(loss_fn)
  multi = optax.MultiSteps(tx, n)

  def parts(batch):  # strided, so that every device keeps its rows
    return batch.reshape(-1, n, *batch.shape[1:]).swapaxes(0, 1)

  def scan_of(split, gradient):
    def step(params, opt_state, batch):
      def body(total, part):
        return jax.tree.map(jnp.add, total, gradient(params, part)), None

      total, _ = lax.scan(
        body, jax.tree.map(jnp.zeros_like, params), split(batch)
      )
      return mini_step(tx)(
        params, opt_state, jax.tree.map(lambda g: g / n, total)
      )

    return step

  def pmean_each(params, part):
    def local(p, x):
      return lax.pmean(grad(lax.pcast(p, "data", to="varying"), x), "data")

    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P(), P("data")),
      out_specs=P(),
    )(params, part)

  def multi_steps(params, opt_state, batch):
    def body(held, part):
      params, opt_state = held
      return mini_step(multi)(params, opt_state, grad(params, part)), None

    return lax.scan(body, (params, opt_state), parts(batch))[0]

  def optax_microbatch(params, opt_state, batch):
    mean = optax.microbatching.AccumulationType.MEAN
    size = batch.shape[0] // n
    grads = optax.microbatching.microbatch(grad, 1, size, mean)(params, batch)
    return mini_step(tx)(params, opt_state, grads)

  make = optax_accum.make_train_step
  found = {
    "optax_accum": (make(loss_fn, tx, num_microbatches=n, mesh=mesh), tx),
    "pmean of each microbatch": (scan_of(parts, pmean_each), tx),
    "optax.MultiSteps, scanned": (multi_steps, multi),
    "strided scan, plain jit": (scan_of(parts, grad), tx),
    "reshape(N, B // N), plain jit": (
      scan_of(lambda batch: trees.blocks(batch, n), grad),
      tx,
    ),
  }
  if hasattr(optax, "microbatching"):
    found["optax.microbatching"] = (optax_microbatch, tx)
  return found


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--microbatches", type=int, default=8)
  parser.add_argument(
    "--tpu", type=int, choices=(8, 64), help="compile for so many TPU chips"
  )
  parser.add_argument(
    "--two-processes", action="store_true", help="time it on two processes"
  )
  results.add_option(parser)
  args = parser.parse_args()
  if args.two_processes:
    example = pathlib.Path(train_lm.__file__).with_name("multi_process.py")
    raise SystemExit(subprocess.call([sys.executable, example]))

  mesh = (
    devices.make_mesh(args.tpu, platform="tpu")
    if args.tpu
    else devices.make_mesh(8)
  )
  loss_fn = train_lm.make_loss_fn(
    model := train_lm.Transformer(layers=LAYERS, width=128)
  )
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

  def placed(make, *spec):
    return devices.abstract(jax.eval_shape(make), mesh, P(*spec))

  batch = placed(lambda: jnp.zeros((512, 65), jnp.int32), "data")
  params = placed(
    lambda: model.init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))[
      "params"
    ]
  )
  size = sum(4 * x.size for x in jax.tree.leaves(params))
  # the partitioner gives each its share
  whole = jax.jit(jax.grad(loss_fn)).lower(params, batch)
  share = matrix_flops(whole.compile().as_text(), LAYERS)
  kind = "TPU v5e" if args.tpu else "CPU"
  table = results.Table(
    f"{mesh.size} devices ({kind}), {args.microbatches} microbatches,"
    f" {size / 2**20:.1f} MiB of gradients",
    [
      "approach",
      "reductions in loops",
      "MiB in loops",
      "reductions outside",
      "MiB outside",
      "work / even share",
      "temp, MiB",
    ],
    text=(48,),
  )
  for name, (step, opt) in approaches(
    loss_fn, tx, mesh, args.microbatches
  ).items():
    state = placed(
      lambda opt=opt: opt.init(
        jax.tree.map(lambda x: jnp.zeros(x.shape), params)
      )
    )
    compiled = measure.compile_step(step, params, state, batch, donate=(0, 1))
    report = optax_accum.count_collectives(compiled.program).at_least(1024)
    counts = []
    for in_loops in (True, False):
      found = [
        c
        for c in report.operations
        if bool(c.loop) == in_loops and not c.at_cycle_end
      ]
      # In the loop over microbatches is that over layers.
      times = [executions(c, args.microbatches, LAYERS) for c in found]
      sent = sum(n * c.bytes for n, c in zip(times, found, strict=True))
      counts += sum(times), sent / 2**20
    work = matrix_flops(compiled.program, args.microbatches, LAYERS) / share
    table.add(name, *counts, work, compiled.temp_bytes / 2**20)
  default = {
    None: "collectives",
    8: "collectives_tpu",
    64: "collectives_tpu64",
  }[args.tpu]
  results.save(
    args.save,
    default,
    [table],
    "TPU v5e, compiled without one" if args.tpu else None,
  )


if __name__ == "__main__":
  main()
