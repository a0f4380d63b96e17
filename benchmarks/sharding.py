"""What a step needs and sends by the way in which parameters and state are sharded.

    python benchmarks/sharding.py [--platform tpu|gpu] [--target-config FILE] [--save]

A Transformer of 8 layers of width 1024, scanned and rematerialised, float32 parameters, computed in
bfloat16, AdamW, 8 microbatches, compiled for 8 chips of a TPU v5e (needs libtpu) or 8 H100s (see
memory.py) as 2 replicas of 4 shards. Nothing runs. P is the size of the parameters in bytes.
If each replica is a host, what is sent between replicas goes over the slow network: how often, and
how much per device, after the last microbatch and inside of loops.
"""

import argparse
import pathlib

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import layers
import memory
import numpy as np
import optax
import results

from optax_accum import count_collectives, make_train_step

AXES = ("replica", "fsdp")
REPLICAS = {(i, i + 4) for i in range(4)} | {tuple(range(8))}  # groups that hold both replicas
LAYERS, WIDTH, VOCABULARY, ROWS, LENGTH, MICROBATCHES = 8, 1024, 8192, 64, 129, 8


def over(*axes):
  """Shards the last dimension of an array over these axes."""
  return lambda x: P(*[None] * (x.ndim - 1), axes) if x.ndim else P()


def whole(x):
  return P()


# Name: how parameters and state are sharded, and the options of the step.
WAYS = {
  "replicated": (whole, whole, {"data_axis": AXES}),
  "state sharded (ZeRO-1)": (whole, over(*AXES), {"data_axis": AXES}),
  "gathered once a step": (over(*AXES), over(*AXES), {"data_axis": AXES}),
  "gathered in each microbatch": (
    over(*AXES),
    over(*AXES),
    {"data_axis": AXES, "reduce_gradients": "per_microbatch"},
  ),
  "layer by layer": (over("fsdp"), over("fsdp"), {"data_axis": "replica"}),
  "layer by layer, in_place": (
    over("fsdp"),
    over("fsdp"),
    {"data_axis": "replica", "in_place": True},
  ),
  "layer by layer, no replicas": (over(*AXES), over(*AXES), {"mesh": None}),
}


def compiled(mesh, of_params, of_state, options):
  """The compiled step of a way."""

  def placed(tree, spec):
    sharded = lambda x: x.update(sharding=NamedSharding(mesh, spec(x)))  # noqa: E731
    return jax.tree.map(sharded, tree)

  tx = optax.adamw(1e-3)
  like = layers.shapes(LAYERS, WIDTH, VOCABULARY)
  state = placed(jax.eval_shape(tx.init, like), of_state)
  params = placed(like, of_params)
  tokens = placed(jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32), lambda x: P(AXES))
  loss_fn = layers.make_loss_fn("rematerialised")
  step = make_train_step(loss_fn, tx, num_microbatches=MICROBATCHES, **{"mesh": mesh, **options})
  return step.lower(params, state, tokens).compile()


def between_replicas(report, unit):
  """How often, and how much in P, is sent between replicas after loops and inside of them."""
  found = [c for c in report.at_least(1024).operations if REPLICAS.intersection(c.groups or [()])]
  total = [sum(c.executions * c.bytes for c in found if bool(c.loop) == in_loop) / unit
           for in_loop in (False, True)]  # fmt: skip
  return sum(c.executions for c in found), *total


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--platform", choices=("tpu", "gpu"), default="tpu")
  parser.add_argument("--target-config", type=pathlib.Path, help="of a GPU, as XLA writes it")
  results.add_option(parser)
  args = parser.parse_args()
  device = memory.device(args.platform, args.target_config)
  if args.platform == "tpu":
    topology = topologies.get_topology_desc("v5e:2x4", platform="tpu")
    chips = topologies.make_mesh(topology, (2, 4), AXES).devices
  else:
    target = {"topology": "1x1x8", "target_config": args.target_config.read_text()}
    topology = topologies.get_topology_desc("", platform="cuda", **target)
    chips = np.array(topology.devices).reshape(2, 4)
  mesh = Mesh(chips, AXES, axis_types=(AxisType.Auto,) * 2)
  unit = sum(4 * x.size for x in jax.tree.leaves(layers.shapes(LAYERS, WIDTH, VOCABULARY)))
  where = device.device_kind.replace("TPU v5 lite", "TPU v5e")
  table = results.Table(
    f"8 x {where}, compiled without them, 2 replicas of 4 shards: {unit / 2**20:.0f} MiB of"
    f" parameters (P), {MICROBATCHES} microbatches",
    ["way", "held, P", "temp, P", "between replicas", "P after", "P in loops"],
    text=(30,),
  )
  for name, way in WAYS.items():
    step = compiled(mesh, *way)
    held = step.memory_analysis()
    sent = between_replicas(count_collectives(step), unit)
    table.add(name, held.argument_size_in_bytes / unit, held.temp_size_in_bytes / unit, *sent)
  results.save(args.save, f"sharding_{args.platform}", [table], where)


if __name__ == "__main__":
  main()
