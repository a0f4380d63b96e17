"""Which batch is worthwhile: compare the noise scale with training at several batch sizes.

This is a smaller train_lm.py. For each batch size, it trains until the held-out loss reaches a
target. It tries several learning rates, and counts the steps of the fastest. A fit of
steps = least * (1 + critical / batch) gives the critical batch, beyond which more rows save few
steps (McCandlish et al. 2018, arXiv:1812.06162, section 2). The noise scale estimates the critical
batch from a single training.

Run:      python examples/noise_scale.py [--target NATS] [--batches N ...] [--plot FILE]
Expected: 286 steps with 8 rows and 60 with 128, which fits 47 * (1 + 43 / rows). The noise scale at
          the target is 56 rows, whatever the batch size that it is measured with. 3 minutes on 2
          CPU cores.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from train_lm import batches, load_data, make_loss_fn, positive, Transformer

import optax_accum

MICROBATCH = 4  # rows; the smallest batch must have two microbatches
LENGTH = 32
EVERY = 5  # steps between evaluations of the held-out loss
RATES = (2e-3, 4e-3)
MOST_ROWS = 40_000  # of one training


class Job(NamedTuple):
  """What all trainings share."""

  loss_fn: Any
  params: Any
  tokens: np.ndarray
  held_out: np.ndarray


class Training(NamedTuple):
  """The number of steps to the target, and the noise scale in each step."""

  rows: int
  rate: float
  steps: float  # interpolated between two evaluations
  noise_scales: list[float]


def make_job() -> Job:
  tokens, held_out = load_data()
  model = Transformer(layers=2, width=64)
  params = jax.jit(model.init)(
    jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)
  )["params"]
  windows = held_out[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)].reshape(
    -1, LENGTH + 1
  )
  return Job(make_loss_fn(model), params, tokens, windows[:512])


def optimizer(rate: float = 0.0) -> optax.GradientTransformation:
  """Adam with the learning rate in its state, so that all rates run the same program."""
  adam = optax.inject_hyperparams(optax.adam)(learning_rate=rate)
  return optax.chain(optax.clip_by_global_norm(1.0), adam)


def trainings(job: Job, rows: int, target: float) -> list[Training]:
  """Trains with one batch size and every learning rate."""
  step = optax_accum.make_train_step(
    job.loss_fn,
    optimizer(),
    num_microbatches=rows // MICROBATCH,
    noise_scale=True,
  )
  estimate = optax_accum.gradient_noise_scale(decay=0.95)
  update, evaluate = jax.jit(estimate.update), jax.jit(job.loss_fn)

  def train(rate: float) -> Training:
    params, noise_state, scales = (
      jax.tree.map(jnp.copy, job.params),
      estimate.init(),
      [],
    )
    opt_state, before = (
      optimizer(rate).init(params),
      float(evaluate(params, job.held_out)),
    )
    for i, batch in enumerate(
      batches(job.tokens, rows, LENGTH, MOST_ROWS // rows), 1
    ):
      params, opt_state, metrics = step(params, opt_state, batch)
      scale, noise_state = update(metrics["noise_scale"], noise_state)
      scales.append(scale)
      if i % EVERY == 0:
        loss = float(evaluate(params, job.held_out))
        if loss <= target:
          steps = i - EVERY * (target - loss) / (before - loss)
          return Training(rows, rate, steps, [float(x) for x in scales])
        before = loss
    return Training(rows, rate, float("inf"), [])

  return [
    train(rate) for rate in tqdm.tqdm(RATES, f"batches of {rows}", leave=False)
  ]


def critical_batch(best: list[Training]) -> tuple[float, float]:
  """The least steps and the critical batch that fit best, with equal weight for each training."""
  steps = np.array([training.steps for training in best])
  inverse = 1 / np.array([training.rows for training in best])
  # steps = a + b / rows, divided by steps: relative errors
  a, b = np.linalg.lstsq(
    np.stack([1 / steps, inverse / steps], 1), np.ones_like(steps)
  )[0]
  return a, b / a


def draw(
  figure: Any, best: list[Training], least: float, critical: float
) -> None:
  left, right = figure.subplots(1, 2)
  for training in best:
    left.plot(training.noise_scales, label=f"batches of {training.rows}")
  left.axhline(
    critical,
    color="black",
    linestyle="--",
    label="critical batch, from all trainings",
  )
  left.set(xlabel="optimizer step", ylabel="noise scale, rows", yscale="log")
  left.legend()
  rows = np.array([training.rows for training in best])
  right.plot(rows, [training.steps for training in best], "o", label="trained")
  line = np.geomspace(rows[0], rows[-1])
  right.plot(
    line,
    least * (1 + critical / line),
    label=f"{least:.0f} (1 + {critical:.0f} / rows)",
  )
  right.set(
    xlabel="rows of a batch",
    ylabel="steps to the target",
    xscale="log",
    yscale="log",
  )
  right.legend()


def parse_args() -> tuple[argparse.Namespace, Any]:
  """The settings and, with --plot, the figure. Exits if a setting is invalid."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  flag = parser.add_argument
  flag(
    "--target",
    type=float,
    default=2.4,
    metavar="NATS",
    help="held-out loss (default: 2.4)",
  )
  sizes = [8, 16, 32, 64, 128]
  flag(
    "--batches",
    type=positive,
    nargs="+",
    default=sizes,
    metavar="N",
    help="rows of each",
  )
  flag(
    "--plot",
    metavar="FILE",
    help="draw the noise scales and the steps; needs matplotlib",
  )
  args = parser.parse_args()
  args.batches = sorted(set(args.batches))
  if len(args.batches) < 2 or any(
    n % MICROBATCH or n == MICROBATCH for n in args.batches
  ):
    parser.error(
      f"--batches takes two sizes or more, multiples of {MICROBATCH} above it"
    )
  figure = None
  if args.plot:
    try:
      from matplotlib.figure import Figure

      figure = Figure(figsize=(10, 4), layout="constrained")
      figure.savefig(args.plot)  # fails before training if it cannot be written
    except (ImportError, OSError, ValueError) as error:
      parser.error(f"--plot {args.plot}: {error}")
  return args, figure


def main() -> None:
  args, figure = parse_args()
  job, best = make_job(), []
  print(
    "rows  learning rate   steps     rows in all   noise scale: half-way, at the end"
  )
  for rows in args.batches:
    found = min(
      trainings(job, rows, args.target), key=lambda training: training.steps
    )
    if not found.noise_scales:
      raise SystemExit(
        f"the loss did not reach {args.target} in {MOST_ROWS} rows: give a higher --target"
      )
    best.append(found)
    scales = found.noise_scales
    print(
      f"{rows:4d}{found.rate:13g}{found.steps:10.1f}{rows * found.steps:14.0f}"
      f"{scales[len(scales) // 2]:22.1f}{scales[-1]:12.1f}",
      flush=True,
    )
  least, critical = critical_batch(best)
  measured = float(np.median([training.noise_scales[-1] for training in best]))
  print(
    f"\nsteps = {least:.0f} * (1 + {critical:.0f} / rows), so the critical batch is"
    f" {critical:.0f} rows"
  )
  print(f"the noise scale at the target is {measured:.0f} rows")
  if figure:
    draw(figure, best, least, critical)
    figure.savefig(args.plot)


if __name__ == "__main__":
  main()
