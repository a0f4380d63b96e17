"""The whole-cycle step beside what it replaces: time, temporary memory, compile time.

    python benchmarks/whole_cycle.py [--rounds 15] [--microbatches 8] [--large] [--save]

Every row does the same work: loss and gradients of 64 rows of a small Transformer (that of
examples/train_lm.py), then one clip + AdamW step, parameters and state donated. Times are
medians of ratios within a round, in which all rows take turns. A second table has the temporary
memory for 1 to 32 microbatches, of steps that are compiled and not run. With --large the
Transformer is one for a GPU, and computes in bfloat16; what compiles for minutes is left out.
"""

import argparse

import jax
import jax.numpy as jnp
import measure
import optax
import paths  # noqa: F401
import results
from support import trees
from support.oracle import hand_written, with_optimizer
import train_lm

import optax_accum

SMALL = {"layers": 4, "width": 128}, 128
LARGE = {"layers": 12, "width": 768, "dtype": jnp.bfloat16}, 512


def optax_microbatch(loss_fn, n):
  """`optax.microbatching.microbatch` (optax 0.2.7 and later) around `jax.value_and_grad`."""
  mean = optax.microbatching.AccumulationType.MEAN

  def value_and_grad(params, batch):
    return optax.microbatching.microbatch(
      jax.value_and_grad(loss_fn), 1, batch.shape[0] // n, mean
    )(params, batch)

  return value_and_grad


def python_loop(loss_fn, n):
  """A Python loop over the microbatches, unrolled by tracing."""

  def value_and_grad(params, batch):
    parts = trees.blocks(batch, n)
    results = [jax.value_and_grad(loss_fn)(params, parts[i]) for i in range(n)]
    return jax.tree.map(lambda *x: sum(x) / n, *results)

  return value_and_grad


def temp_by_microbatches(loss_fn, tx, arguments, size):
  """The temporary memory of a step that splits the same batch further and further."""

  def temp(n, in_place):
    step = optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=n, in_place=in_place
    )
    try:
      return measure.compile_step(step, *arguments).temp_bytes / size
    except NotImplementedError:  # in place with a JAX older than 0.10
      return None

  table = results.Table(
    "temporary memory by number of microbatches",
    ["microbatches", "temp, P", "temp in place, P"],
  )
  for n in 1, 2, 4, 8, 16, 32:
    table.add(n, temp(n, False), temp(n, True))
  return table


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=15)
  parser.add_argument("--microbatches", type=int, default=8)
  parser.add_argument(
    "--large", action="store_true", help="a model for a GPU, in bfloat16"
  )
  results.add_option(parser)
  args = parser.parse_args()
  n = args.microbatches

  sizes, length = LARGE if args.large else SMALL
  model = train_lm.Transformer(**sizes)
  loss_fn = train_lm.make_loss_fn(model)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  batch = jnp.asarray(
    next(train_lm.batches(train_lm.load_data()[0], 64, length, 1))
  )

  def fresh():
    params = model.init(jax.random.key(0), batch[:1, :-1])["params"]
    return params, tx.init(params)

  plain = jax.value_and_grad(loss_fn)
  steps = {
    f"optax_accum, N={n}": optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=n
    ),
    f"... noise_scale=True, N={n}": optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=n, noise_scale=True
    ),
    f"hand-written scan, N={n}": with_optimizer(hand_written(loss_fn, n), tx),
    f"optax.microbatching, N={n}": with_optimizer(
      optax_microbatch(loss_fn, n), tx
    ),
    f"Python loop, N={n}": with_optimizer(python_loop(loss_fn, n), tx),
    "optax_accum, N=1": optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=1
    ),
    "whole batch at once": with_optimizer(plain, tx),
  }
  if not hasattr(optax, "microbatching"):
    del steps[f"optax.microbatching, N={n}"]
  if args.large:
    del steps[f"Python loop, N={n}"]
  compiled = {
    name: measure.compile_step(step, *fresh(), batch)
    for name, step in steps.items()
  }
  states = {name: fresh() for name in steps}
  size = sum(
    x.nbytes for x in jax.tree.leaves(states["whole batch at once"][0])
  )

  def call(name):
    def run():
      *states[name], metrics = compiled[name].call(*states[name], batch)
      return metrics

    return run

  times = measure.paired_ms({name: call(name) for name in steps}, args.rounds)
  reference = f"hand-written scan, N={n}"
  rows, length = batch.shape
  table = results.Table(
    f"{size / 2**20:.1f} MiB of parameters (P), {rows} rows of {length - 1} bytes",
    [
      "step",
      "time, ms",
      "time / scan",
      "time / whole",
      "temp, P",
      "compile, s",
    ],
    text=(28,),
  )
  for name, c in compiled.items():
    table.add(
      name,
      min(times[name]),
      measure.ratio(times, name, reference),
      measure.ratio(times, name, "whole batch at once"),
      c.temp_bytes / size,
      c.compile_s,
    )
  tables = [table]
  if not args.large:
    arguments = (*fresh(), batch)
    tables.append(temp_by_microbatches(loss_fn, tx, arguments, size))
  results.save(args.save, "whole_cycle", tables)


if __name__ == "__main__":
  main()
