"""Stream microbatches through an ordinary training loop.

The data are handwritten digits. The loader returns microbatches of different sizes, and one is
broken. A cycle is the microbatches between two optimizer steps. Every step is still the step on all
rows of its cycle, so training ends with the parameters of whole-batch training.

Run:      python examples/streaming.py
Expected: test accuracy of about 0.95, with microbatches and with whole batches. The parameters
          differ by less than 1e-4.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_accum

EPOCHS = 20
CYCLE = 4  # microbatches per step, unless the epoch ends first
SIZES = (48, 80, 16, 112)  # rows of the microbatches, in turn: 256 per cycle

digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
  (digits.data / 16).astype(np.float32),
  digits.target,
  test_size=0.25,
  random_state=0,
)


def init_params(key):
  hidden, out = jax.random.split(key)
  return {
    "hidden": jax.random.normal(hidden, (64, 64)) / 8,
    "out": jax.random.normal(out, (64, 10)) / 8,
  }


def logits_fn(params, x):
  return jnp.tanh(x @ params["hidden"]) @ params["out"]


def loss_fn(params, x, y):
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits_fn(params, x), y
  )
  return jnp.mean(losses)


def rows_of(epoch, sizes):
  """One epoch's rows in a new order, cut into pieces of these sizes, in turn."""
  order = np.random.default_rng(epoch).permutation(len(x_train))
  cuts = itertools.accumulate(itertools.cycle(sizes))
  return np.split(
    order, list(itertools.takewhile(lambda cut: cut < len(order), cuts))
  )


optimizer = optax.adamw(1e-2, weight_decay=1e-3)
streaming = optax_accum.accumulate(
  optimizer, CYCLE, skip_fn=optax.skip_not_finite
)


@jax.jit
def microbatch_step(params, state, x, y, last):
  grads = jax.grad(loss_fn)(params, x, y)
  # The loss is a mean over rows, so the rows are the weight.
  return streaming.apply(grads, state, params, weight=float(len(y)), flush=last)


@jax.jit
def whole_batch_step(params, state, x, y):
  updates, state = optimizer.update(
    jax.grad(loss_fn)(params, x, y), state, params
  )
  return optax.apply_updates(params, updates), state


params = init_params(jax.random.key(0))
state = streaming.init(params)
skipped = 0
for epoch in range(EPOCHS):
  pieces = rows_of(epoch, SIZES)
  for i, rows in enumerate(pieces):
    if epoch == 1 and i == 2:  # a batch that was corrupted while it was loaded
      broken = np.full_like(x_train[rows], np.nan)
      params, state = microbatch_step(
        params, state, broken, y_train[rows], False
      )
      skipped += int(state.skip_state["should_skip"])
    params, state = microbatch_step(
      params, state, x_train[rows], y_train[rows], i == len(pieces) - 1
    )

expected = init_params(jax.random.key(0))
expected_state = optimizer.init(expected)
for epoch in range(EPOCHS):
  for rows in rows_of(epoch, (sum(SIZES),)):
    expected, expected_state = whole_batch_step(
      expected, expected_state, x_train[rows], y_train[rows]
    )


def accuracy(params):
  return float(np.mean(np.argmax(logits_fn(params, x_test), axis=-1) == y_test))


difference = optax.tree.norm(optax.tree.sub(params, expected), ord=np.inf)
print(
  f"gradient steps:        {state.gradient_step} (whole batches: {EPOCHS * 6})"
)
print(f"skipped microbatches:  {skipped}")
print(
  f"accuracy:              {accuracy(params):.3f} (whole batches: {accuracy(expected):.3f})"
)
print(f"largest difference:    {difference:.1e}")
assert state.gradient_step == EPOCHS * 6
assert skipped == 1
assert accuracy(params) > 0.9
assert difference < 1e-4
