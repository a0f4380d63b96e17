"""Weights of every type and size, counted right or refused; derivatives with respect to them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.optimizers import FORMS, mini_step

from optax_accum import accumulate, microbatch_value_and_grad

GRADS = np.array([[1.0, 2.0, 3.0], [5.0, -1.0, 0.5]], np.float32)

forms = pytest.mark.parametrize("form", FORMS)


def step_of(weights, form="update", **options):
  """The step of one cycle with these weights."""
  tx, params = accumulate(optax.sgd(1.0), len(weights), **options), jnp.zeros(3)
  state = tx.init(params)
  for g, weight in zip(GRADS, weights, strict=True):
    params, state = mini_step(tx, form)(params, state, jnp.asarray(g), weight=weight)
  return params


def mean_of(weights):
  weights = np.array([float(w) for w in weights])
  return weights @ GRADS.astype(np.float64) / weights.sum()


LARGE = [
  [2**31, 3 * 2**31],
  [np.int64(2**33), np.int64(2**35)],
  [np.uint32(2**32 - 1), np.uint32(2**31)],
  [np.int64(1), np.int64(2**33)],
  [np.array(2**33), np.array(2**34)],
  [10**20, 10**19],
  [1e30, 1e29],
  [1e-30, 4e-30],
  [np.float64(1e-20), np.float32(3e-20)],
  [True, np.int8(100)],
]


@forms
@pytest.mark.parametrize("weights", LARGE, ids=str)
def test_numbers_beyond_int32_and_far_from_one(weights, form):
  np.testing.assert_allclose(step_of(weights, form), -mean_of(weights), rtol=1e-6)


def test_they_are_converted_before_jax_can_wrap_them():
  with jax.enable_x64(False):
    wrapped = np.int64(2**33 + 3).astype(np.int32)
  assert wrapped == 3  # what counted before
  actual = step_of([np.int64(2**33 + 3), np.int64(2**33)])
  np.testing.assert_allclose(actual, -GRADS.mean(0), rtol=1e-6)


BATCH = np.arange(1.0, 7.0, dtype=np.float32)


def loss_of(weight_of):
  def loss_fn(x, batch):
    return jnp.mean(x * batch)

  return microbatch_value_and_grad(loss_fn, num_microbatches=2, weight_fn=weight_of)


@pytest.mark.parametrize("weight", [2**33, np.int64(2**33), 1e-30])
def test_weights_of_a_weight_fn(weight):
  loss, grad = jax.jit(loss_of(lambda batch: weight))(jnp.float32(2.0), BATCH)
  np.testing.assert_allclose((loss, grad), (7.0, 3.5), rtol=1e-6)


@pytest.mark.parametrize(
  "weight", [1e-31, 1e-40, 2e38, np.float32(1e-38), jnp.float32(1e31), 10**400]
)
def test_weights_that_float32_cannot_divide_by(weight):
  message = r"weight .*; it must be 0, or from 1e-30 to 1e\+30, .*: rescale the weights"
  with pytest.raises(ValueError, match=message):
    step_of([weight, weight])
  with pytest.raises(ValueError, match="weight_fn gave the " + message):
    jax.eval_shape(loss_of(lambda batch: weight), jnp.float32(2.0), BATCH)


@forms
@pytest.mark.parametrize("size", [2e-38, 1e-32, 1e37, 2e38])
def test_a_traced_total_that_float32_cannot_divide_by_shows(size, form):
  weights = jnp.array([size, size], jnp.float32)
  moved = jax.jit(lambda weights: step_of(list(weights), form))(weights)
  assert np.all(np.isnan(moved))
  loss, grad = jax.jit(lambda w: loss_of(lambda batch: w)(jnp.float32(2.0), BATCH))(weights[0])
  assert np.isnan(loss)
  assert np.isnan(grad)


def test_traced_weights_in_range_are_as_known_ones():
  for weights in ([1e-30, 3e-30], [4e29, 2e29], [0.0, 3.0], [2e-38, 1.0]):
    moved = jax.jit(lambda w: step_of(list(w)))(jnp.array(weights, jnp.float32))
    np.testing.assert_allclose(moved, -mean_of(weights), rtol=1e-5)


def test_no_nan_is_made_where_none_is_asked_for():
  with jax.debug_nans(True):
    loss, _ = loss_of(lambda batch: jnp.sum(batch))(jnp.float32(2.0), BATCH)
    step_of([jnp.float32(0), jnp.float32(0)])
  expected = 2 * np.average([3.0, 4.0], weights=[9.0, 12.0])
  np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_derivative_with_respect_to_a_weight(reduction):
  def moved(weight):
    weights = [weight, jnp.float32(1)]
    return jnp.sum(step_of(weights, reduction=reduction, differentiable=True))

  first, second = GRADS.astype(np.float64).sum(1)
  for weight in (1e-6, 0.5, 2.0):
    exact = -first if reduction == "sum" else -(first - second) / (1 + weight) ** 2
    np.testing.assert_allclose(jax.grad(moved)(jnp.float32(weight)), exact, rtol=1e-4)
  # A gradient of no weight is left out, as it may be NaN: the derivative takes it for zero.
  expected = 0 if reduction == "sum" else second
  np.testing.assert_allclose(jax.grad(moved)(jnp.float32(0)), expected, rtol=1e-6)
