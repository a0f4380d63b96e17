"""Split the rows over 8 devices, and reduce the gradients over the devices once per step.

This is a smaller train_lm.py: 64 rows per step, 8 on each device, in 4 microbatches of 2 rows. The
devices wait for one another only once per step, for any number of microbatches.

Run:      python examples/data_parallel.py
          It uses the accelerators if there are several, and otherwise 8 simulated CPU devices.
Expected: each device reduces the gradients (0.51 MiB) once per step, outside every loop. Without
          `mesh=` the compiler reduces them in every microbatch, and it sends 4 times as much. After 5 steps, the relative error
          of the updates is 1e-6, compared with one device that takes the whole batch. 15 seconds on
          2 CPU cores.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
from train_lm import (
  batches,
  load_data,
  make_loss_fn,
  make_optimizer,
  Transformer,
)

import optax_accum

MICROBATCHES = 4
ROWS = 8  # of a step, on each device
LENGTH = 32
STEPS = 5

jax.config.update("jax_num_cpu_devices", 8)
# Accelerators may multiply float32 in lower precision, with larger errors than allowed here.
jax.config.update("jax_default_matmul_precision", "highest")


def mib(size: int) -> str:
  return f"{size / 2**20:.2f} MiB"


def sent(report: optax_accum.CollectiveReport) -> int:
  """Bytes that one device sends in the collectives of one step."""
  return sum(c.executions * c.bytes for c in report.operations)


def main() -> None:
  devices = jax.devices() if jax.device_count() > 1 else jax.devices("cpu")
  jax.config.update("jax_default_device", devices[0])
  mesh = jax.sharding.Mesh(devices, ("data",))
  print(f"{len(devices)} devices: {devices[0].device_kind}")

  model = Transformer(layers=2, width=64)
  loss_fn, tx = make_loss_fn(model), make_optimizer(steps=100)
  tokens = jnp.zeros((1, LENGTH), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
  data = list(batches(load_data()[0], ROWS * len(devices), LENGTH, STEPS))

  by_rows = NamedSharding(mesh, P("data"))
  everywhere = jax.device_put(params, NamedSharding(mesh, P()))
  args = everywhere, tx.init(everywhere), jax.device_put(data[0], by_rows)
  steps, reports = {}, {}
  for name, options in {"mesh=": {"mesh": mesh}, "no mesh=": {}}.items():
    steps[name] = optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=MICROBATCHES, **options
    )
    compiled = steps[name].lower(*args).compile()
    reports[name] = optax_accum.count_collectives(compiled)
    print(f"\n{name}\n{reports[name]}")
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  once, every = sent(reports["mesh="]), sent(reports["no mesh="])
  print(
    f"\ngradients: {mib(size)}. A step reduces {mib(once)} instead of {mib(every)}:"
  )
  print(f"mesh= saves {mib(every - once)} a step and device\n")

  def train(step):
    state, metrics = (jax.tree.map(jnp.copy, params), tx.init(params)), []
    for batch in data:
      # the first step moves the arrays to the mesh
      *state, new = step(*state, batch)
      metrics.append((float(new["loss"]), float(new["grad_norm"])))
    return jax.device_get(state[0]), metrics

  sharded, sharded_metrics = train(steps["mesh="])
  whole, whole_metrics = train(
    optax_accum.make_train_step(loss_fn, tx, num_microbatches=1)
  )
  print(
    f"{'':6}{f'{len(devices)} devices, 4 microbatches':>28}{'one device, whole batch':>28}"
  )
  print(f"step  {'loss    gradient norm':>28}{'loss    gradient norm':>28}")
  for i, metrics in enumerate(zip(sharded_metrics, whole_metrics, strict=True)):
    print(
      f"{i:4d}  "
      + "".join(f"{loss:13.5f}{norm:15.5f}" for loss, norm in metrics)
    )
  way = optax.tree.norm(optax.tree.sub(whole, jax.device_get(params)))
  relative = optax.tree.norm(optax.tree.sub(sharded, whole)) / way
  print(f"\nrelative error of the updates: {relative:.1e}")

  # In addition to the gradients, the reduction carries only the loss.
  reports["mesh="].assert_once_per_cycle(nbytes=1)
  assert size <= once < size + 1024, f"{once} bytes for gradients of {size}"
  assert every >= MICROBATCHES * size, (
    f"{every} bytes for {MICROBATCHES} reductions of {size}"
  )
  # The norms of the gradients are compared too, because AdamW and clipping hide a wrong scale.
  for a, b in zip(sharded_metrics, whole_metrics, strict=True):
    assert all(abs(x - y) < 1e-5 * y for x, y in zip(a, b, strict=True)), (a, b)
  # The first steps of AdamW have full size even where a gradient is only rounding noise.
  assert relative < 1000 * jnp.finfo(jnp.float32).eps, relative


if __name__ == "__main__":
  main()
