"""Which microbatch fits: plan train_lm.py for this machine, and a larger job for an absent TPU.

The planner compiles a few steps, with a line for each, and runs none. Of the choices, remat=False is
preferred: with remat=True only what does not fit otherwise is planned.

Run:      python examples/plan.py [--memory SIZE] [--tpu]
          On a TPU or GPU omit --memory: the device reports its memory. --tpu also plans a larger
          job for one chip of a v5e with 15 GiB. It needs pip install ".[bench]".
Expected: within 64 MiB, 8 microbatches of 8 rows. With remat, which recomputes activations in the
          backward pass, 32 rows would fit, and a step takes longer. Half a minute on 2 CPU cores. On
          the v5e, 4 microbatches of 128 rows, because 256 rows do not fit. This takes 2 minutes
          more, because XLA needs 20 seconds for each program.
"""

import argparse
import os
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from train_lm import make_loss_fn, make_optimizer, Transformer

import optax_accum

CHOICES = {"remat": [False, True]}


def planned(
  layers: int, width: int, rows: int, length: int, device: Any = None
) -> tuple[Any, ...]:
  """The step, its arguments as shapes, and the rows of the batch."""
  tx = make_optimizer(steps=250)

  def build_step(num_microbatches, remat=False):
    loss_fn = make_loss_fn(
      Transformer(layers, width, jnp.bfloat16 if device else jnp.float32, remat)
    )
    return optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=num_microbatches
    )

  model, tokens = (
    Transformer(layers, width),
    jax.ShapeDtypeStruct((1, length), jnp.int32),
  )
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  batch = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
  args = params, jax.eval_shape(tx.init, params), batch
  if device is not None:
    one = SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: x.update(sharding=one), args)
  return build_step, args, rows


def build() -> tuple[Any, ...]:
  """The model and batch of train_lm.py: 64 rows of 64 bytes."""
  return planned(layers=3, width=128, rows=64, length=64)


def build_for_tpu() -> tuple[Any, ...]:
  """A larger job, in bfloat16: 512 rows of 256 bytes, for one chip of a TPU v5e."""
  # Without a TPU, libtpu would ask the network for these.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  chip = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices[0]
  return planned(layers=6, width=512, rows=512, length=256, device=chip)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  on_cpu = jax.default_backend() == "cpu"
  flag = parser.add_argument
  flag(
    "--memory",
    default="64MiB" if on_cpu else None,
    metavar="SIZE",
    help="of this machine",
  )
  flag(
    "--tpu", action="store_true", help="plan for a TPU v5e too; needs libtpu"
  )
  args = parser.parse_args()
  jobs = {"this machine": (build, args.memory)}
  if args.tpu:
    jobs["one chip of a TPU v5e"] = build_for_tpu, "15GiB"
  for where, (job, memory) in jobs.items():
    build_step, step_args, rows = job()
    try:
      plan = optax_accum.plan_microbatches(
        build_step,
        step_args,
        batch_size=rows,
        memory_limit=memory,
        choices=CHOICES,
      )
    except ValueError as error:  # nothing fits, or --memory is not a size
      parser.error(f"{where}: {error}")
    print(f"{where}: {plan}\n", flush=True)


if __name__ == "__main__":
  main()
