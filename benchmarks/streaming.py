"""Streaming accumulation beside optax.MultiSteps: time, temporary memory, copies.

    python benchmarks/streaming.py [--rounds 5] [--optimizers adamw,muon] [--tpu] [--save]

A cycle is 8 mini steps and one optimizer step, on 40 M float32 parameters in 4 arrays (Muon: 6
matrices of 512 x 512), parameters and state donated. P is the parameters' size. "limit" adds
the gradients up and takes one inner step, and does nothing else. Every row of an optimizer is
of one run, in which the rows take turns; times are the best, ratios medians within a round.

With --tpu the same programs are compiled for a TPU v5e without one (needs libtpu), and
nothing runs.
"""

import argparse

import jax
from jax import lax
import jax.numpy as jnp
import measure
import optax
import paths  # noqa: F401
import results
from support import devices
from support.compiled import copies_of
from support.optimizers import mini_step

import optax_accum

K = 8
SHAPES = {"muon": [(512, 512)] * 6}
DEFAULT_SHAPES = [(4096, 2560), (2560, 4096), (4096, 2560), (2560, 4096)]
OPTIMIZERS = {
  "sgd": lambda: optax.sgd(1e-3),
  "adamw": lambda: optax.adamw(1e-3),
  "clip+adamw": lambda: optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
  ),
  "adafactor": lambda: optax.adafactor(1e-3),
  "lion": lambda: optax.lion(1e-3),
  "muon": lambda: optax.contrib.muon(1e-3),
}


def scanned(step):
  """A cycle in the user's own scan; the gradients of a mini step are made in the loop."""

  def cycle(params, state, grads):
    def body(carry, scale):
      return step(*carry, jax.tree.map(lambda g: g * scale, grads)), None

    return lax.scan(body, (params, state), jnp.linspace(0.5, 1.5, K))[0]

  return cycle


def ways(inner):
  """What is measured: a jittable function, its initial state, and its calls in a cycle."""
  multi = optax.MultiSteps(inner, K)
  ours = optax_accum.accumulate(inner, K)
  return {
    "MultiSteps": (mini_step(multi), multi.init, K),
    "update": (mini_step(ours), ours.init, K),
    "apply": (mini_step(ours, "apply"), ours.init, K),
    "MultiSteps, scanned": (scanned(mini_step(multi)), multi.init, 1),
    "update, scanned": (scanned(mini_step(ours)), ours.init, 1),
    "apply, scanned": (scanned(mini_step(ours, "apply")), ours.init, 1),
  }


def limit(inner, params, grads):
  """Adding K gradients into an accumulator, and one step of `inner`."""
  add = jax.jit(lambda acc, g: jax.tree.map(jnp.add, acc, g), donate_argnums=0)
  step = jax.jit(mini_step(inner), donate_argnums=(0, 1))
  held = [
    jax.tree.map(jnp.copy, params),
    inner.init(params),
    jax.tree.map(jnp.zeros_like, grads),
  ]

  def run():
    for _ in range(K):
      held[2] = add(held[2], grads)
    held[0], held[1] = step(held[0], held[1], held[2])
    return held

  return run


def run_all(inner, params, grads, rounds):
  """Times all ways and the limit, in turns; returns the compiled ways and the times."""
  compiled, calls = {}, {"limit": limit(inner, params, grads)}
  for name, (fun, init, count) in ways(inner).items():
    state = (jax.tree.map(jnp.copy, params), jax.jit(init)(params))
    compiled[name] = measure.compile_step(fun, *state, grads, donate=(0, 1))

    def run(name=name, held=[state], count=count):  # noqa: B006 (one list a call)
      for _ in range(count):
        held[0] = compiled[name].call(*held[0], grads)
      return held[0]

    calls[name] = run
  return compiled, measure.paired_ms(calls, rounds)


def compile_all_for_tpu(inner, params):
  """Compiles all ways for one chip of a TPU v5e that is not there."""
  sharding = jax.sharding.SingleDeviceSharding(
    devices.tpu_topology().devices[0]
  )

  def on_chip(tree):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  shapes = jax.eval_shape(lambda: params)
  return {
    name: measure.compile_step(
      fun,
      on_chip(shapes),
      on_chip(jax.eval_shape(init, shapes)),
      on_chip(shapes),
      donate=(0, 1),
    )
    for name, (fun, init, _) in ways(inner).items()
  }


def report(optimizer, compiled, times, params):
  """The table of an optimizer; without `times` of what is known from compiling."""
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  smallest = min(x.size for x in jax.tree.leaves(params))
  timed = ["ms a cycle", "MultiSteps / this", "this / limit"] if times else []
  table = results.Table(
    f"{optimizer}: P = {size / 2**20:.0f} MiB in {len(params)} arrays",
    ["step", *timed, "temp, P", "copies"],
  )
  for name in [*compiled, *(["limit"] if times else [])]:
    cells = []
    if times:
      multi = "MultiSteps, scanned" if "scanned" in name else "MultiSteps"
      ratios = (
        measure.ratio(times, multi, name),
        measure.ratio(times, name, "limit"),
      )
      cells += min(times[name]), *ratios
    if name in compiled:
      temp, program = compiled[name].temp_bytes / size, compiled[name].program
      cells += temp, copies_of(program, smallest)
    else:
      cells += None, None
    table.add(name, *cells)
  return table


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
  parser.add_argument(
    "--tpu", action="store_true", help="compile for a TPU, run nothing"
  )
  results.add_option(parser)
  args = parser.parse_args()
  if args.tpu:
    jax.config.update("jax_platforms", "cpu")
  device = (
    "TPU v5e, compiled without one"
    if args.tpu
    else jax.devices()[0].device_kind
  )
  print(device)
  tables = []
  for name in args.optimizers.split(","):
    inner = OPTIMIZERS[name]()
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = SHAPES.get(name, DEFAULT_SHAPES)
    params = [
      0.1 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False)
    ]
    if args.tpu:
      measured = compile_all_for_tpu(inner, params), None
    else:
      grads = [0.01 * x + 0.001 for x in params]
      measured = run_all(inner, params, grads, args.rounds)
    tables.append(report(name, *measured, params))
  results.save(
    args.save, "streaming_tpu" if args.tpu else "streaming", tables, device
  )


if __name__ == "__main__":
  main()
