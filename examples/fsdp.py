"""Shard a model over 2 replicas of 4 devices, which reduce gradients once per step (FSDP, HSDP).

The language model of train_lm.py, on 8 CPU devices: each holds a quarter of every matrix. Within a
replica, each layer is gathered where it is used, in every microbatch. Between the replicas, the
gradients are summed once. If the replicas are hosts, only this sum crosses the slow network.

Run:      python examples/fsdp.py
          python examples/fsdp.py --compare      (also with three other ways to shard)
Expected: one all-reduce of 1.6 MiB between the replicas per step, outside every loop. A device
          holds 4.8 of the 18.8 MiB of parameters and state. After 3 steps, the relative error of
          the updates is 4e-6, compared with one device that takes the whole batch. 20 seconds on 2
          CPU cores. With --compare, which takes a minute: a step needs 5 MiB of temp memory instead
          of 14 to 21, and devices exchange 1.6 MiB between the replicas instead of 6 to 13, but 73
          within them.
"""

import argparse
import time

import flax.linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import optax
from train_lm import batches, HEADS, load_data, make_optimizer

from optax_accum import CollectiveReport, count_collectives
from optax_accum.flax import linen_train_step

AXES, REPLICAS, SHARDS = ("replica", "fsdp"), 2, 4
# How XLA writes the devices that exchange: those of a replica, in two forms, and those with the
# same shard, one of each replica.
WITHIN = "replica_groups=[2,4]<=[8],", "replica_groups={{0,1,2,3},{4,5,6,7}},"
PAIRS = "replica_groups={{0,4},{1,5},{2,6},{3,7}},"
ROWS, MICROBATCHES, STEPS = 64, 4, 3
LENGTH, LAYERS, WIDTH = 32, 8, 128

# The axes that shard the "embed" dimension of parameters, and of the optimizer's state; data_axis=.
WAYS = {
  "replicated": (None, None, AXES),
  "state sharded (ZeRO-1)": (None, AXES, AXES),
  "gathered once a step": (AXES, AXES, AXES),
  "layer by layer": ("fsdp", "fsdp", "replica"),
}

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", REPLICAS * SHARDS)


def named(init, *names):
  """An initializer of parameters whose dimensions have these logical names."""
  return nn.with_logical_partitioning(init, names)


def dense(features, *names):
  init = named(nn.initializers.lecun_normal(), *names)
  return nn.Dense(features, use_bias=False, kernel_init=init)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    # Keep each row on one device. Otherwise XLA may shard the features of x, as in the embedding,
    # and send activations instead of parameters: 1.6 times as many bytes here.
    x = nn.with_logical_constraint(x, ("rows", None, None))
    rows, length, width = x.shape
    qkv = dense(3 * width, "embed", "heads")(nn.RMSNorm()(x))
    qkv = qkv.reshape(rows, length, 3, HEADS, width // HEADS)
    attended = jax.nn.dot_product_attention(
      *jnp.moveaxis(qkv, 2, 0), is_causal=True
    )
    x = x + dense(width, "heads", "embed")(attended.reshape(x.shape))
    hidden = nn.gelu(dense(4 * width, "embed", "mlp")(nn.RMSNorm()(x)))
    return x + dense(width, "mlp", "embed")(hidden), None


class Transformer(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    init = nn.initializers.normal(0.02)
    # small, so kept whole
    positions = self.param("positions", init, (tokens.shape[1], WIDTH))
    x = (
      nn.Embed(256, WIDTH, embedding_init=named(init, "bytes", "embed"))(tokens)
      + positions
    )
    blocks = (
      nn.scan(  # over layers, so that only one of them is gathered at a time
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: "layers"},
      )
    )
    x, _ = blocks(name="blocks")(x, None)
    return dense(256, "embed", "bytes")(nn.RMSNorm()(x))


model = Transformer()


def loss_fn(variables, windows, rngs):
  logits = model.apply(variables, windows[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, windows[:, 1:]
  ).mean()


def create():
  params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))[
    "params"
  ]
  return TrainState.create(
    apply_fn=model.apply, params=params, tx=make_optimizer(steps=100)
  )


def shardings(mesh, axes):
  """Those of a state whose "embed" dimensions are sharded over these axes."""
  specs = nn.get_partition_spec(jax.eval_shape(create))
  return nn.logical_to_mesh_sharding(specs, mesh, [("embed", axes)])


def train(step, state, data):
  """Takes a step on each batch: parameters, losses and gradient norms, and seconds of a step."""
  metrics, times = [], []
  for batch in data:
    began = time.perf_counter()
    state, new = step(state, batch)
    metrics.append((float(new["loss"]), float(new["grad_norm"])))
    times.append(time.perf_counter() - began)
  return jax.device_get(state.params), metrics, min(times)


def run(mesh, data, of_params, of_state, data_axis):
  """The compiled step of one way to shard, and what `train` returns."""
  placed = shardings(mesh, of_state).replace(
    params=shardings(mesh, of_params).params
  )
  state = jax.jit(
    create, out_shardings=placed
  )()  # made in shards: no device ever holds it whole
  step = linen_train_step(
    loss_fn, num_microbatches=MICROBATCHES, mesh=mesh, data_axis=data_axis
  )
  # constraints leave out what is in data_axis
  with nn.logical_axis_rules([("rows", AXES)]):
    return step.lower(state, data[0]).compile(), *train(step, state, data)


def mib(size: int) -> float:
  return size / 2**20


def between_replicas(collective) -> bool:
  """Whether devices of both replicas exchange."""
  return not any(groups in collective.attributes for groups in WITHIN)


def exchanged(operations) -> int:
  """Bytes of the arrays that a device exchanges."""
  return sum(c.executions * c.bytes for c in operations)


def compare(runs) -> None:
  print(f"\n{'':28}memory, MiB    exchanged, MiB")
  print(
    f"{'':24}{'held':>7}{'temp':>8}  between replicas  in loops  seconds a step"
  )
  for name, (compiled, _, _, seconds) in runs.items():
    memory, found = (
      compiled.memory_analysis(),
      count_collectives(compiled).operations,
    )
    held, temp = (
      mib(memory.argument_size_in_bytes),
      mib(memory.temp_size_in_bytes),
    )
    replicas = mib(exchanged(c for c in found if between_replicas(c)))
    loops = mib(exchanged(c for c in found if c.loop))
    print(
      f"{name:<24}{held:7.1f}{temp:8.1f}{replicas:18.1f}{loops:10.1f}{seconds:16.2f}"
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--compare", action="store_true", help="also shard in three other ways"
  )
  args = parser.parse_args()

  mesh = jax.make_mesh(
    (REPLICAS, SHARDS), AXES, axis_types=(AxisType.Auto,) * 2
  )
  data = list(batches(load_data()[0], ROWS, LENGTH, STEPS))
  start = jax.jit(
    create
  )()  # on one device, which takes the same steps on the whole batch
  initial, total = (
    jax.device_get(start.params),
    sum(x.nbytes for x in jax.tree.leaves(start)),
  )
  whole, whole_metrics, _ = train(
    linen_train_step(loss_fn, num_microbatches=1), start, data
  )

  by_rows = jax.device_put(data, NamedSharding(mesh, PartitionSpec(AXES)))
  ways = WAYS if args.compare else {"layer by layer": WAYS["layer by layer"]}
  runs = {name: run(mesh, by_rows, *way) for name, way in ways.items()}
  compiled, sharded, sharded_metrics, _ = runs["layer by layer"]

  # without those of metrics
  found = count_collectives(compiled).at_least(1024).operations
  within = CollectiveReport(tuple(c for c in found if not between_replicas(c)))
  between = CollectiveReport(tuple(c for c in found if between_replicas(c)))
  print(
    f"between the shards of a replica\n{within}\n\nbetween the replicas\n{between}\n"
  )
  held = compiled.memory_analysis().argument_size_in_bytes
  print(
    f"parameters and state: {mib(total):.1f} MiB, of which a device holds {mib(held):.1f}\n"
  )

  print(
    f"{'':6}{'2 x 4 devices, 4 microbatches':>28}{'one device, whole batch':>28}"
  )
  print(f"step  {'loss    gradient norm':>28}{'loss    gradient norm':>28}")
  for i, metrics in enumerate(zip(sharded_metrics, whole_metrics, strict=True)):
    print(
      f"{i:4d}  "
      + "".join(f"{loss:13.5f}{norm:15.5f}" for loss, norm in metrics)
    )
  way = optax.tree.norm(optax.tree.sub(whole, initial))
  relative = optax.tree.norm(optax.tree.sub(sharded, whole)) / way
  print(f"\nrelative error of the updates: {relative:.1e}")
  if args.compare:
    compare(runs)

  (summed,) = between.operations
  assert (summed.kind, summed.executions, summed.loop) == (
    "all-reduce",
    1,
    None,
  )
  assert PAIRS in summed.attributes
  # Each layer is gathered in the forward and in the backward pass of each microbatch.
  assert within.inside["all-gather"].operations >= 2 * LAYERS * MICROBATCHES
  # norms and positions are whole
  assert held < 0.26 * total, f"{held} of {total} bytes"
  for _, _, run_metrics, _ in runs.values():
    for a, b in zip(run_metrics, whole_metrics, strict=True):
      assert all(abs(x - y) < 1e-5 * y for x, y in zip(a, b, strict=True)), (
        a,
        b,
      )
  # The first steps of AdamW have full size even where a gradient is only rounding noise.
  assert relative < 1000 * jnp.finfo(jnp.float32).eps, relative


if __name__ == "__main__":
  main()
