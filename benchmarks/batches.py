"""Loss per token and per second of a language model, at five batches of 4 to 64 rows.

    python benchmarks/batches.py [--rows 5376] [--seeds 2] [--save]

The Transformer of examples/train_lm.py, with 2 layers and 64 features, sees the same rows of 64
bytes in the same order with each batch. Batches above 8 rows are accumulated in microbatches of 8.
AdamW has beta2 = 0.95 and a peak learning rate of 0.015 for 64 rows. For other batches beta2 is
0.95 ** (rows / 64), so its half-life is the same number of tokens, and the learning rate is scaled
by the square root of the rows. Half and twice that are tried too. The last row of the first table
keeps beta2. Steps of all batches are timed in turn, once training is over.
13 minutes on 2 cores with other work.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paths  # noqa: F401
import results
import tqdm
import train_lm

import optax_accum

BATCHES = (4, 8, 16, 32, 64)
MICROBATCH, LENGTH, LOOKS = 8, 64, 6
LEARNING_RATE, B2 = 0.015, 0.95  # of the largest batch
FACTORS = (0.5, 1.0, 2.0)


def optimizer(peak, steps, b2):
  """The optimizer of train_lm.py. The peak is part of its state, so all peaks have one program."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.1, 1.0, steps // 10, steps, 0.1
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b2=b2),
    optax.inject_hyperparams(optax.scale)(step_size=peak),
  )


class Job:
  """The model, its rows, and what is held out."""

  def __init__(self, rows):
    self.tokens, held_out = train_lm.load_data()
    self.rows, self.model = rows, train_lm.Transformer(layers=2, width=64)
    self.loss_fn = train_lm.make_loss_fn(self.model)
    self.init = jax.jit(self.model.init)
    self.held_out = held_out[: 512 * (LENGTH + 1)].reshape(512, LENGTH + 1)
    self.evaluate = jax.jit(
      optax_accum.microbatch(
        self.loss_fn,
        reduction="mean",
        batch_argnums=1,
        microbatch_size=MICROBATCH,
      )
    )

  def start(self, seed):
    """Parameters, and all rows in the order of training."""
    blank = jnp.zeros((1, LENGTH), jnp.int32)
    params = self.init(jax.random.key(seed), blank)["params"]
    starts = np.random.default_rng(seed).integers(
      len(self.tokens) - LENGTH, size=self.rows
    )
    return params, self.tokens[starts[:, None] + np.arange(LENGTH + 1)]

  def step(self, batch, b2, microbatches=None):
    count = microbatches or max(1, batch // MICROBATCH)
    tx = optimizer(1.0, self.rows // batch, b2)
    return optax_accum.make_train_step(self.loss_fn, tx, num_microbatches=count)

  def train(self, step, batch, b2, peak, seed):
    """The held-out losses, each after the same number of rows."""
    params, rows = self.start(seed)
    opt_state = optimizer(peak, self.rows // batch, b2).init(params)
    losses = []
    for part in np.split(rows, LOOKS):
      for one in np.split(part, len(part) // batch):
        params, opt_state, _ = step(params, opt_state, one)
      losses.append(float(self.evaluate(params, self.held_out)))
    return losses


def milliseconds(job, rounds):
  """The median time of a step, by batch and microbatches. Steps of all take turns."""
  counts = {
    batch: sorted({1, max(1, batch // MICROBATCH)}) for batch in BATCHES
  }
  keys = [(batch, count) for batch in BATCHES for count in counts[batch]]
  steps, states, taken = {}, {}, {key: [] for key in keys}
  params, rows = job.start(0)
  for batch, count in keys:
    steps[batch, count] = job.step(batch, B2, count)
    tx = optimizer(LEARNING_RATE, job.rows // batch, B2)
    states[batch, count] = jax.tree.map(jnp.copy, (params, tx.init(params)))
  for i in range(rounds + 1):
    for key in keys:
      start = time.perf_counter()
      *states[key], _ = jax.block_until_ready(
        steps[key](*states[key], rows[: key[0]])
      )
      if i:  # the first compiles
        taken[key].append(1000 * (time.perf_counter() - start))
  return {key: float(np.median(times)) for key, times in taken.items()}


def trained(job, ways, seeds):
  """The held-out losses of each way and multiple of its learning rate: float[seeds, LOOKS]."""
  found = {}
  bar = tqdm.tqdm(total=len(ways) * len(FACTORS) * seeds, leave=False)
  for batch, b2 in ways:
    step = job.step(batch, b2)
    for factor in FACTORS:
      runs = []
      for seed in range(seeds):
        runs.append(job.train(step, batch, b2, factor * rate_of(batch), seed))
        bar.update()
      found[batch, b2, factor] = np.array(runs)
  bar.close()
  return found


def rate_of(batch):
  return LEARNING_RATE * (batch / BATCHES[-1]) ** 0.5


def tables_of_losses(ways, found, tokens):
  """The losses at the end, and those on the way with the best learning rate of each batch."""
  final = results.Table(
    "held-out loss at the end, nats per byte, by multiple of the learning rate",
    [
      "rows",
      "beta2",
      "learning rate",
      *(f"x {factor:g}" for factor in FACTORS),
      "best, seeds ±",
    ],
    text=(8, 8),
  )
  best = {}
  for batch, b2 in ways:
    losses = [found[batch, b2, factor][:, -1] for factor in FACTORS]
    best[batch, b2] = min(
      FACTORS, key=lambda factor: found[batch, b2, factor][:, -1].mean()
    )
    least = found[batch, b2, best[batch, b2]][:, -1]
    beta2, rate = f"{b2:.4f}", f"{rate_of(batch):.5f}"
    final.add(
      batch,
      beta2,
      rate,
      *(f"{x.mean():.3f}" for x in losses),
      f"{np.ptp(least) / 2:.3f}",
    )
  curves = results.Table(
    "held-out loss with the best of these learning rates",
    ["tokens", *(f"{batch} rows" for batch in BATCHES)],
    text=(10,),
  )
  for look in range(LOOKS):
    means = [
      found[*way, best[way]][:, look].mean() for way in ways[: len(BATCHES)]
    ]
    curves.add(
      (look + 1) * tokens // LOOKS, *(round(float(x), 3) for x in means)
    )
  return [final, curves]


def table_of_times(job, rounds):
  timed = results.Table(
    "time of a step, in microbatches of 8 rows and in one",
    ["rows", "microbatches", "ms", "ms in one", "s for all tokens", "s in one"],
    text=(8,),
  )
  times = milliseconds(job, rounds)
  for batch in BATCHES:
    count, steps = max(1, batch // MICROBATCH), job.rows // batch
    each, whole = times[batch, count], times[batch, 1]
    timed.add(
      batch, count, each, whole, each * steps / 1000, whole * steps / 1000
    )
  return timed


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rows", type=int, default=5376, help="of each training")
  parser.add_argument(
    "--seeds", type=int, default=2, help="of parameters and rows, averaged"
  )
  parser.add_argument("--rounds", type=int, default=30, help="of timed steps")
  results.add_option(parser)
  args = parser.parse_args()
  if args.rows % (LOOKS * BATCHES[-1]):
    parser.error(
      f"--rows {args.rows} must be a multiple of {LOOKS * BATCHES[-1]}"
    )
  job = Job(args.rows)
  ways = [(batch, B2 ** (batch / BATCHES[-1])) for batch in BATCHES] + [
    (BATCHES[0], B2)
  ]
  losses = tables_of_losses(
    ways, trained(job, ways, args.seeds), args.rows * LENGTH
  )
  results.save(
    args.save, "batches", [*losses, table_of_times(job, args.rounds)]
  )


if __name__ == "__main__":
  main()
