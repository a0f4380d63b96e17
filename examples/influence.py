"""Find the training rows that made a model mistake a 3 for an 8, by gradient rollback.

Some 3s among handwritten digits are mislabeled as 8. A step of SGD is a sum over microbatches, here
of one row each. A ledger records what each row has contributed to the parameters. A rollback
subtracts the contribution of a row. The row's influence is how much a prediction then changes.

Source:   Lawrence, Sztyler and Niepert 2020, arXiv:2010.05516.
Run:      python examples/influence.py
Expected: the 30 rows of most influence are all 3s that are labeled 8 (with other seeds, 90% or
          more). Rolling back all rows restores the initial parameters, with an error of 4e-7 of the
          total update. 10 seconds on 2 CPU cores.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from train_lm import positive

import optax_accum

TRAINING, BATCH, HIDDEN, LEARNING_RATE = 1347, 64, 32, 0.5
TRUE, PLANTED = 3, 8


def init_params(key):
  hidden, out = jax.random.split(key)
  return {
    "hidden": jax.random.normal(hidden, (64, HIDDEN)) / 8,
    "out": jax.random.normal(out, (HIDDEN, 10)) / np.sqrt(HIDDEN),
  }


def logits_fn(params, x):
  return jnp.tanh(x @ params["hidden"]) @ params["out"]


def loss_fn(params, x, y):
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_fn(params, x), y
  ).mean()


# The gradient of every microbatch, on a new leading axis. The order is that of the batch, because a
# microbatch has one row. `jax.vmap` would store the intermediate values of all rows at once.
gradients = optax_accum.microbatch(
  jax.grad(loss_fn), reduction="stack", batch_argnums=(1, 2), microbatch_size=1
)


@jax.jit
def step(params, ledger, rows, x, y):
  """One step of SGD. Adds the contribution of each row to the ledger."""
  parts = jax.tree.map(
    lambda g: -LEARNING_RATE / len(rows) * g, gradients(params, x, y)
  )
  ledger = jax.tree.map(
    lambda held, part: held.at[rows].add(part), ledger, parts
  )
  return jax.tree.map(
    lambda p, part: p + part.sum(axis=0), params, parts
  ), ledger


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  flag = functools.partial(parser.add_argument, type=positive, metavar="N")
  flag(
    "--epochs", default=10, help="passes over the training rows (default: 10)"
  )
  flag("--planted", default=30, help="3s that are labeled 8 (default: 30)")
  args = parser.parse_args()
  rng, digits = np.random.default_rng(0), load_digits()
  order = rng.permutation(len(digits.data))
  images, labels = (
    (digits.data[order] / 16).astype(np.float32),
    digits.target[order],
  )
  (x, x_test), (y, y_test) = (
    np.split(images, [TRAINING]),
    np.split(labels, [TRAINING]),
  )
  threes = np.flatnonzero(y == TRUE)
  if args.epochs < 3:
    parser.error(
      f"--epochs {args.epochs} must be 3 or more, so that rows have an influence"
    )
  if 2 * args.planted > len(threes):
    parser.error(
      f"--planted {args.planted} is more than half of the {len(threes)} 3s to train on"
    )
  planted = rng.choice(threes, args.planted, replace=False)
  y[planted] = PLANTED

  start = params = init_params(jax.random.key(0))
  ledger = jax.tree.map(
    lambda p: jnp.zeros((TRAINING, *p.shape), p.dtype), params
  )
  for _ in range(args.epochs):
    order = rng.permutation(TRAINING)[: TRAINING // BATCH * BATCH]
    for rows in order.reshape(-1, BATCH):
      params, ledger = step(params, ledger, rows, x[rows], y[rows])

  def margin(params):
    """The prediction: the mean logit of 8 minus that of 3, over the 3s of the test set."""
    logits = logits_fn(params, x_test[y_test == TRUE])
    return jnp.mean(logits[:, PLANTED] - logits[:, TRUE])

  def roll_back(contribution):
    return optax.tree.sub(params, contribution)

  influence = margin(params) - jax.vmap(lambda part: margin(roll_back(part)))(
    ledger
  )
  most = np.argsort(-influence)[: args.planted]
  found = float(np.isin(most, planted).mean())
  everything = jax.tree.map(lambda parts: parts.sum(axis=0), ledger)
  error = optax.tree.norm(optax.tree.sub(roll_back(everything), start))
  relative = float(error / optax.tree.norm(everything))
  right = np.flatnonzero(y == PLANTED)
  right = right[~np.isin(right, planted)]
  print(
    f"mean margin of 8 over 3, for the 3s of the test set: {margin(params):.2f}"
  )
  print(
    f"mean influence of a row: {influence[planted].mean():.4f} for a 3 that is labeled 8,"
  )
  print(
    f"  {influence[right].mean():.4f} for an 8, {influence.mean():.4f} for any row"
  )
  print(f"planted rows among the {args.planted} of most influence: {found:.0%}")
  print(f"all rows rolled back: error {relative:.1e} of the total update")

  assert found >= 0.8, found
  assert relative < 1000 * jnp.finfo(jnp.float32).eps, relative


if __name__ == "__main__":
  main()
