"""Temporary memory of a training step's options, on this machine, a TPU v5e or an H100.

    python benchmarks/memory.py [--platform cpu|tpu|gpu] [--forms rematerialised ...]
        [--options plain in_place ...] [--vocabulary 4096] [--target-config FILE] [--time] [--large] [--save]

A Transformer of 16 layers (CPU: 8), float32 parameters, computed in bfloat16, AdamW, parameters and
state donated, 8 microbatches. Its layers are written in the ways of `layers.make_loss_fn`; without
--forms they are scanned and rematerialised, and all options are compiled in half a minute. Nothing
runs: what is printed are XLA's own figures, in units of P, the parameters' bytes. "tpu" and "gpu"
are compiled for without a device; the first needs libtpu, the second jax-cuda12-plugin,
jax-cuda12-pjrt (of jaxlib's version) and --target-config, XLA's description of the GPU. With --time
the steps are run here, and their times compared; --large is for a GPU that is there: the model is
that of "gpu", with 8 times the rows and 4 times their length.
"""

import argparse
import os
import pathlib

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import layers
import measure
import optax
import results

from optax_accum import make_train_step

MICROBATCHES = 8
SMALL = {"layers": 8, "width": 256, "rows": 32, "length": 33}  # for a CPU
# small TPU programs show no temp
LARGE = {
  "layers": 16,
  "width": 768,
  "rows": 16,
  "length": 129,
}
HERE = {"rows": 128, "length": 513}  # to keep a GPU busy


def valid_rows(tokens):
  """A weight: the rows that hold something."""
  return jnp.sum(tokens[:, 0] >= 0).astype(jnp.float32)


OPTIONS = {
  "plain": {},
  "weight_fn": {"weight_fn": valid_rows},
  "skip_nonfinite": {"skip_nonfinite": True},
  "ragged": {"microbatch_size": None},
  "noise_scale": {"noise_scale": True},
  "in_place": {"in_place": True},
  "in_place+weight_fn": {"in_place": True, "weight_fn": valid_rows},
  "in_place+ragged": {"in_place": True, "microbatch_size": None},
}


def device(platform, target_config):
  """A device to compile for, which need not be there."""
  if platform == "cpu":
    return jax.devices()[0]
  # Read when the compilers are loaded: they would ask the network which devices these are.
  for name, kind in (("TPU", "v5litepod-8"), ("GPU", "h100-8")):
    os.environ[f"{name}_SKIP_MDS_QUERY"] = "1"
    os.environ[f"{name}_ACCELERATOR_TYPE"] = kind
    os.environ[f"{name}_WORKER_HOSTNAMES"] = "localhost"
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  jax.config.update("jax_platforms", "cpu")
  if platform == "tpu":
    return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices[0]
  target = {"topology": "1x1x8", "target_config": target_config.read_text()}
  return topologies.get_topology_desc("", platform="cuda", **target).devices[0]


def compiled_steps(form, names, sizes, like, state, tokens):
  """The compiled step of each of the options, or why there is none."""
  tx = optax.adamw(1e-3)
  for name in names:
    options = OPTIONS[name]
    split = {"num_microbatches": MICROBATCHES}
    if "microbatch_size" in options:
      split = {"microbatch_size": sizes["rows"] // MICROBATCHES + 1}
    try:
      step = make_train_step(layers.make_loss_fn(form), tx, **(options | split))
      yield name, step.lower(like, state, tokens).compile(), None
    except NotImplementedError as error:
      yield name, None, str(error).split(":")[0]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--platform", choices=("cpu", "tpu", "gpu"), default="cpu"
  )
  parser.add_argument(
    "--forms", nargs="+", choices=layers.FORMS, default=["rematerialised"]
  )
  parser.add_argument(
    "--options", nargs="+", choices=OPTIONS, default=list(OPTIONS)
  )
  parser.add_argument(
    "--vocabulary", type=int, default=4096, help="rows of the tied embedding"
  )
  parser.add_argument(
    "--target-config", type=pathlib.Path, help="of a GPU, as XLA writes it"
  )
  parser.add_argument(
    "--time", action="store_true", help="run the steps too, on this machine"
  )
  parser.add_argument(
    "--large", action="store_true", help="a model and rows for a GPU"
  )
  results.add_option(parser)
  args = parser.parse_args()
  if args.platform == "gpu" and args.target_config is None:
    parser.error(
      "--platform gpu compiles without a GPU, for the one that --target-config describes"
    )
  sizes = SMALL if args.platform == "cpu" else LARGE
  if args.large:
    sizes = LARGE | HERE
  sizes = sizes | {"vocabulary": args.vocabulary}
  target = device(args.platform, args.target_config)
  one = SingleDeviceSharding(target)
  on_device = lambda tree: jax.tree.map(lambda x: x.update(sharding=one), tree)  # noqa: E731
  like = layers.shapes(sizes["layers"], sizes["width"], sizes["vocabulary"])
  tokens = jax.ShapeDtypeStruct((sizes["rows"], sizes["length"]), jnp.int32)
  like, tokens = on_device(like), on_device(tokens)
  state = on_device(jax.eval_shape(optax.adamw(1e-3).init, like))
  unit = sum(4 * x.size for x in jax.tree.leaves(like))
  where = target.device_kind.replace("TPU v5 lite", "TPU v5e")
  if args.platform != "cpu":
    where += ", compiled without one"
  table = results.Table(
    f"{where}: {unit / 2**20:.0f} MiB of parameters (P),"
    + "".join(f" {name} {size}," for name, size in sizes.items())
    + f" {MICROBATCHES} microbatches",
    [
      "layers",
      "option",
      "temp, P",
      "temp / plain",
      *(["time / plain"] if args.time else []),
    ],
    text=(16, 20),
  )
  names = dict.fromkeys(["plain", *args.options])
  for form in args.forms:
    plain = None
    for name, compiled, reason in compiled_steps(
      form, names, sizes, like, state, tokens
    ):
      if compiled is None:
        print(f"{form} {name} refused: {reason}")
        continue
      plain = plain or compiled
      temp, of_plain = (
        step.memory_analysis().temp_size_in_bytes for step in (compiled, plain)
      )
      timed = [time_ratio(compiled, plain, like, tokens)] if args.time else []
      table.add(form, name, temp / unit, temp / of_plain, *timed)
  results.save(args.save, f"memory_{args.platform}", [table], where)


def time_ratio(step, plain, like, tokens):
  """The time of a step over that of the plain one; the two take turns."""

  def running(compiled):
    params = layers.initial(jax.random.key(0), like)
    held = [params, optax.adamw(1e-3).init(params)]
    batch = jnp.zeros(tokens.shape, tokens.dtype)

    def call():
      *held[:], metrics = compiled(*held, batch)
      return metrics["loss"]

    return call

  times = measure.paired_ms(
    {"step": running(step), "plain": running(plain)}, 30
  )
  return measure.ratio(times, "step", "plain")


if __name__ == "__main__":
  main()
