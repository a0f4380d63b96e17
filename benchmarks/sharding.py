"""What a step needs and sends by the way in which parameters and state are sharded.

    python benchmarks/sharding.py [--platform tpu|gpu] [--target-config FILE] [--programs] [--save]
    python benchmarks/sharding.py --processes [--save]

A Transformer of scanned and rematerialised layers, float32 parameters, AdamW, 8 microbatches, on 2
replicas of 4 shards. P is the size of the parameters in bytes. The first compiles it for 8 chips of
a TPU v5e (needs libtpu) or 8 H100s (see memory.py), computed in bfloat16, and runs nothing. The
second runs a smaller one, in float32, on two processes of this machine with 4 CPU devices each.

"sent" is what a device sends in one step, if arrays go around in rings: 2 (n - 1) / n of an array
that n devices reduce, and (n - 1) / n of one that they gather, scatter or transpose. If each
replica is a host, what spans the replicas goes over the slow network: how often, how much of it
after the last microbatch, and how much in loops.

With --programs it compiles what microbatches that arrive call by call run, `add` and `finish`,
beside the step of all rows, and prints the memory of a device.
"""

import argparse
import functools
import multiprocessing
import pathlib
import socket
import statistics
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import layers
import measure
import memory
import numpy as np
import optax
import paths  # noqa: F401
import results
from support.compiled import executions, groups_of

from optax_accum import count_collectives, make_train_step

AXES = ("replica", "fsdp")
# groups that hold both replicas
REPLICAS = {(i, i + 4) for i in range(4)} | {tuple(range(8))}
MICROBATCHES, TX = 8, optax.adamw(1e-3)
ROUNDS = 7


class Sizes(NamedTuple):
  """Of a model and its batch."""

  layers: int = 8
  width: int = 1024
  vocabulary: int = 8192
  rows: int = 64
  length: int = 129
  dtype: Any = jnp.bfloat16

  @property
  def params(self):
    return layers.shapes(self.layers, self.width, self.vocabulary)

  @property
  def unit(self):
    """P, in bytes."""
    return sum(4 * x.size for x in jax.tree.leaves(self.params))


MORE_ROWS = Sizes(rows=512)
# for two processes on two cores
SMALL = Sizes(4, 256, 512, 64, 17, jnp.float32)


class Way(NamedTuple):
  """The axes that shard parameters, state and the rows of activations, and a step's options."""

  params: Any
  state: Any
  options: dict[str, Any]
  rows: Any = None  # None: as the compiler likes


ONCE, REPLICA = {"data_axis": AXES}, {"data_axis": "replica"}
WAYS = {
  "replicated": Way((), (), ONCE),
  "state sharded (ZeRO-1)": Way((), AXES, ONCE),
  "gathered once a step": Way(AXES, AXES, ONCE),
  "layer by layer": Way("fsdp", "fsdp", REPLICA, "fsdp"),
  "layer by layer, in_place": Way(
    "fsdp", "fsdp", REPLICA | {"in_place": True}, "fsdp"
  ),
  "layer by layer, unconstrained": Way("fsdp", "fsdp", REPLICA),
  "layer by layer, no replicas": Way(AXES, AXES, {"mesh": None}, AXES),
}
BY_LAYER = ("layer by layer", "layer by layer, unconstrained")
TIMED = (
  "replicated",
  "state sharded (ZeRO-1)",
  "gathered once a step",
  *BY_LAYER,
)


def made(mesh, sizes, way, microbatches=MICROBATCHES):
  """The step of a way, and what it takes: shapes with shardings."""

  def placed(tree, axes):
    last = lambda x: P(*[None] * (x.ndim - 1), axes) if x.ndim else P()  # noqa: E731
    sharded = lambda x: x.update(sharding=NamedSharding(mesh, last(x)))  # noqa: E731
    return jax.tree.map(sharded, tree)

  state = placed(jax.eval_shape(TX.init, sizes.params), way.state)
  tokens = jax.ShapeDtypeStruct((sizes.rows, sizes.length), jnp.int32)
  tokens = tokens.update(sharding=NamedSharding(mesh, P(AXES)))
  # In a step with mesh=, the constraint names axes of that. Without, it needs the mesh.
  rows = (
    NamedSharding(mesh, P(AXES))
    if way.rows == AXES
    else way.rows and P(way.rows)
  )
  loss_fn = layers.make_loss_fn(
    "rematerialised", dtype=sizes.dtype, rows_over=rows
  )
  options = {"mesh": mesh, "num_microbatches": microbatches, **way.options}
  args = placed(sizes.params, way.params), state, tokens
  return make_train_step(loss_fn, TX, **options), args


def compiled(mesh, sizes, way):
  """The compiled step of a way, and what it takes."""
  step, args = made(mesh, sizes, way)
  return step.lower(*args).compile(), args


def programs(mesh, sizes, way):
  """What a cycle runs, in a call of all rows, and in calls of one microbatch each."""
  in_place = way._replace(options=way.options | {"in_place": True})
  yield "step", compiled(mesh, sizes, way)[0]
  yield "step, in_place", compiled(mesh, sizes, in_place)[0]
  step, (params, state, tokens) = made(mesh, sizes, way, microbatches=1)
  tokens = tokens.update(shape=(sizes.rows // MICROBATCHES, sizes.length))
  cycle = step.add.eval_shape(step.begin(params), params, tokens)
  yield "add", step.add.lower(cycle, params, tokens).compile()
  yield "finish", step.finish.lower(params, state, cycle).compile()


def sent(collectives, sizes):
  """What a device sends in these, in P."""

  def share(c):
    if c.kind == "collective-permute":
      return 1
    groups = groups_of(c)
    devices = len(groups[0]) if groups else 8
    return (2 if c.kind == "all-reduce" else 1) * (devices - 1) / devices

  nbytes = sum(often(c, sizes) * c.bytes * share(c) for c in collectives)
  return nbytes / sizes.unit


def often(collective, sizes):
  """How often it runs in a step: in the loop over microbatches is that over layers."""
  return executions(collective, MICROBATCHES, sizes.layers)


def needs(step, sizes):
  """What a device holds, needs and sends, the last also by collectives that span replicas."""
  held, found = (
    step.memory_analysis(),
    count_collectives(step).at_least(1024).operations,
  )
  spanning = [c for c in found if REPLICAS.intersection(groups_of(c))]
  return (
    held.argument_size_in_bytes / sizes.unit,
    held.temp_size_in_bytes / sizes.unit,
    sent(found, sizes),
    sum(often(c, sizes) for c in spanning),
    *(
      sent([c for c in spanning if bool(c.loop) == loop], sizes)
      for loop in (False, True)
    ),
  )


def memory_of(step, unit):
  """What a device holds while a program runs: in the program's own terms, and in all."""
  held = step.memory_analysis()
  arguments, outputs, aliased, temp = (
    getattr(held, f"{name}_size_in_bytes") / unit
    for name in ("argument", "output", "alias", "temp")
  )
  in_all = arguments + outputs - aliased + temp
  return arguments, outputs, aliased, temp, in_all


MEMORY_COLUMNS = [
  "arguments, P",
  "outputs, P",
  "aliased, P",
  "temp, P",
  "in all, P",
]
COLUMNS = [
  "held, P",
  "temp, P",
  "sent, P",
  "span replicas",
  "after, P",
  "in loops, P",
]
MESH = "2 replicas of 4 shards"


def mesh_of(devices):
  return Mesh(
    np.reshape(devices, (2, 4)), AXES, axis_types=(AxisType.Auto,) * 2
  )


def chips_of(platform, target_config):
  """A mesh of devices that need not be there, and their name."""
  kind = memory.device(platform, target_config).device_kind
  if platform == "tpu":
    topology = topologies.get_topology_desc("v5e:2x4", platform="tpu")
    chips = topologies.make_mesh(topology, (2, 4), AXES).devices
  else:
    target = {"topology": "1x1x8", "target_config": target_config.read_text()}
    chips = topologies.get_topology_desc("", platform="cuda", **target).devices
  return mesh_of(chips), kind.replace("TPU v5 lite", "TPU v5e")


def title_of(where, sizes):
  """Of a table of compiled programs."""
  return (
    f"8 x {where}, compiled without them, {MESH}: {sizes.unit / 2**20:.0f} MiB of parameters (P),"
    f" {sizes.rows} rows of {sizes.length - 1} tokens, {MICROBATCHES} microbatches"
  )


def memory_by_program(mesh, where):
  """The table of the programs of a cycle."""
  sizes = Sizes()
  columns = ["way", "program", *MEMORY_COLUMNS]
  table = results.Table(title_of(where, sizes), columns, text=(34, 16))
  for name in ("replicated", "gathered once a step"):
    for program, step in programs(mesh, sizes, WAYS[name]):
      table.add(name, program, *memory_of(step, sizes.unit))
  return [table]


def as_compiled(mesh, where):
  """The tables of compiled steps."""
  tables = []
  for sizes, names in ((Sizes(), WAYS), (MORE_ROWS, BY_LAYER)):
    title = title_of(where, sizes)
    tables.append(results.Table(title, ["way", *COLUMNS], text=(34,)))
    for name in names:
      tables[-1].add(name, *needs(compiled(mesh, sizes, WAYS[name])[0], sizes))
  return tables


def taken(step, held):
  """The loss of a step, whose parameters and state replace those in `held`."""
  *held[:2], metrics = step(*held)
  return metrics["loss"]


def process(address, index, rows):
  """One of two processes. The first puts the rows of the table into a queue."""
  jax.config.update("jax_num_cpu_devices", 4)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, 2, index)
  mesh, calls, needed = mesh_of(jax.devices()), {}, {}
  params = jax.device_get(layers.initial(jax.random.key(0), SMALL.params))
  tokens = np.random.default_rng(0).integers(
    SMALL.vocabulary, size=(SMALL.rows, SMALL.length)
  )
  start = params, jax.device_get(TX.init(params)), tokens.astype(np.int32)
  for name in TIMED:
    step, args = compiled(mesh, SMALL, WAYS[name])
    held = jax.device_put(start, jax.tree.map(lambda x: x.sharding, args))
    calls[name] = functools.partial(taken, step, list(held))
    needed[name] = needs(step, SMALL)
  times = measure.paired_ms(calls, ROUNDS)
  for name in TIMED if index == 0 else ():
    seconds = statistics.median(times[name]) / 1e3
    rows.put(
      (
        name,
        *needed[name],
        seconds,
        measure.ratio(times, name, "layer by layer"),
      )
    )


def on_processes():
  """The table of two processes of this machine."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  context = multiprocessing.get_context("spawn")
  rows = context.Queue()
  for index in range(2):
    context.Process(
      target=process, args=(address, index, rows), daemon=True
    ).start()
  table = results.Table(
    f"2 processes of 4 CPU devices, {MESH}: {SMALL.unit / 2**20:.0f} MiB of parameters (P),"
    f" {SMALL.rows} rows of {SMALL.length - 1} tokens, {MICROBATCHES} microbatches, median of"
    f" {ROUNDS} rounds",
    ["way", *COLUMNS, "s a step", "/ layer by layer"],
    text=(34,),
  )
  for _ in TIMED:
    table.add(*rows.get(timeout=600))
  return table


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--platform", choices=("tpu", "gpu"), default="tpu")
  parser.add_argument(
    "--target-config", type=pathlib.Path, help="of a GPU, as XLA writes it"
  )
  parser.add_argument(
    "--programs", action="store_true", help="memory of `add` and `finish`"
  )
  parser.add_argument(
    "--processes", action="store_true", help="run it on two processes instead"
  )
  results.add_option(parser)
  args = parser.parse_args()
  if args.processes:
    return results.save(
      args.save, "sharding_processes", [on_processes()], "cpu"
    )
  mesh, where = chips_of(args.platform, args.target_config)
  if args.programs:
    found = memory_by_program(mesh, where)
    return results.save(args.save, f"programs_{args.platform}", found, where)
  tables = as_compiled(mesh, where)
  results.save(args.save, f"sharding_{args.platform}", tables, where)


if __name__ == "__main__":
  main()
