"""What `virtual_devices=8` costs a step, and whether its programs compute the same way.

    python benchmarks/same_bits.py [--save]
    python benchmarks/same_bits.py --platform tpu|gpu [--target-config FILE] [--save]

A Transformer of scanned and rematerialised layers, AdamW behind a global norm, on 1, 2, 4 and 8
devices, each beside the step without `virtual_devices` on as many. The first runs on CPU devices, in
float32; the second compiles for devices that need not be there (see memory.py), in bfloat16. P is the
size of the parameters. "sent" is what a device sends in one step, in rings (see sharding.py).

"other" counts the compiled computations with arithmetic of floats that the program of one device
does not have, without those that only add, scale or choose, as sums over devices do.
"""

import argparse
import collections
import os
import pathlib
import re

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import layers
import measure
import memory
import numpy as np
import optax
import results
from sharding import sent

from optax_accum import count_collectives, make_train_step

VIRTUAL = 8
MICROBATCHES = 3
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
# layers, width, vocabulary, rows of a microbatch on a virtual device, their length
SMALL = 4, 128, 512, 2, 33
LARGE = 8, 512, 2048, 2, 129
# What adds up and cuts, and computes nothing else.
SUMS = {"add", "multiply", "select", "compare", "and", "or", "bitcast-convert"}
FLOATS = {
  "convolution", "cosine", "custom-call", "divide", "dot", "exponential", "exponential-minus-one",
  "log", "log-plus-one", "maximum", "minimum", "power", "reduce", "rsqrt", "sine", "sqrt",
  "subtract", "tanh",
}  # fmt: skip


def devices_of(platform, target_config):
  """Those to run or to compile for."""
  if platform == "cpu":
    return jax.devices()
  memory.device(platform, target_config)
  if platform == "tpu":
    return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
  target = {"topology": "1x1x8", "target_config": target_config.read_text()}
  return topologies.get_topology_desc("", platform="cuda", **target).devices


def made(devices, sizes, dtype, virtual):
  """A step on these devices, and the types of what it takes."""
  depth, width, vocabulary, rows, length = sizes
  mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
  same = NamedSharding(mesh, PartitionSpec())

  def everywhere(tree):
    return jax.tree.map(lambda x: x.update(sharding=same), tree)

  params = everywhere(layers.shapes(depth, width, vocabulary))
  state = everywhere(jax.eval_shape(TX.init, params))
  tokens = jax.ShapeDtypeStruct(
    (rows * VIRTUAL * MICROBATCHES, length),
    jnp.int32,
    sharding=NamedSharding(mesh, PartitionSpec("data")),
  )
  step = make_train_step(
    layers.make_loss_fn("rematerialised", dtype=dtype),
    TX,
    # As many rows in a microbatch of a device.
    microbatch_size=rows * (virtual or len(devices)),
    mesh=mesh,
    virtual_devices=virtual,
  )
  return step, (params, state, tokens)


def computations(program):
  """The texts of what computes with floats, without names; loops' bodies are of these."""
  bodies = re.findall(r"^%?[\w.\-]+ [^\n]*\{\n(.*?)^\}", program, re.M | re.S)
  for body in bodies:
    found = set(re.findall(r"= \(?(?:f32|bf16)\S* ([\w\-]+)\(", body))
    is_loop = "get-tuple-element(" in body
    if found & FLOATS and not is_loop:
      yield nameless(body)


def nameless(body):
  """The text of a computation, whose values are numbered in the order in which they appear."""
  body = re.sub(r", metadata=\{.*?\}|, backend_config=.*|\{[^{}]*\}", "", body)
  body = re.sub(r", (calls|to_apply)=\S*", "", body)
  names = {}

  def number(match):
    return names.setdefault(match[0], f"%{len(names)}")

  return re.sub(r"%[\w.\-]+", number, body)


def timed(devices, sizes, rounds):
  """Milliseconds of the plain step and of that with virtual devices, each round."""
  calls = {}
  depth, width, vocabulary, *_ = sizes
  for virtual in (None, VIRTUAL):
    step, (_, _, like) = made(devices, sizes, jnp.float32, virtual)
    shapes = layers.shapes(depth, width, vocabulary)
    params = layers.initial(jax.random.key(0), shapes)
    held = [params, TX.init(params)]
    tokens = jnp.asarray(
      np.random.default_rng(0).integers(0, vocabulary, like.shape), jnp.int32
    )

    def call(step=step, held=held, tokens=tokens):
      *held[:], metrics = step(*held, tokens)
      return metrics["loss"]

    call()
    calls[virtual] = call
  return measure.paired_ms(calls, rounds)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--platform", choices=("cpu", "tpu", "gpu"), default="cpu"
  )
  parser.add_argument(
    "--target-config", type=pathlib.Path, help="of a GPU, as XLA writes it"
  )
  parser.add_argument("--rounds", type=int, default=15)
  results.add_option(parser)
  args = parser.parse_args()
  devices = devices_of(args.platform, args.target_config)
  is_here = args.platform == "cpu"
  sizes, dtype = (SMALL, jnp.float32) if is_here else (LARGE, jnp.bfloat16)
  unit = sum(4 * x.size for x in jax.tree.leaves(layers.shapes(*sizes[:3])))
  columns = ["devices", "temp, P", "plain temp, P", "sent, P", "plain sent, P"]
  columns += ["other"]
  if is_here:
    columns.append("time")
  where = devices[0].device_kind.replace("TPU v5 lite", "TPU v5e")
  table = results.Table(
    f"{where}: {unit / 2**20:.1f} MiB of parameters (P), {VIRTUAL} virtual devices",
    columns,
    text=(10,),
  )
  first = None
  for count in (1, 2, 4, 8):
    row = [str(count)]
    found = {}
    for virtual in (VIRTUAL, None):
      step, like = made(devices[:count], sizes, dtype, virtual)
      found[virtual] = step.lower(*like).compile()
    for figure in (
      lambda c: c.memory_analysis().temp_size_in_bytes / unit,
      lambda c: sent(count_collectives(c).at_least(1024).operations, unit),
    ):
      row += [figure(found[VIRTUAL]), figure(found[None])]
    texts = collections.Counter(computations(found[VIRTUAL].as_text()))
    first = first or texts
    row.append((texts - first).total())
    if is_here:
      times = timed(devices[:count], sizes, args.rounds)
      row.append(measure.ratio(times, VIRTUAL, None))
    table.add(*row)
  results.save(
    args.save,
    "same_bits" + ("" if is_here else f"_{args.platform}"),
    [table],
    None if is_here else where + ", compiled without one",
  )


if __name__ == "__main__":
  main()
