"""Weights of every type and size, counted right or refused; derivatives with respect to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
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


@functools.cache
def jitted_step_of(form):
  return jax.jit(lambda weights: step_of(list(weights), form))


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
def test_weights_may_be_beyond_int32_and_far_from_one(form):
  every = jax.jit(lambda: [step_of(weights, form) for weights in LARGE])()
  for weights, step in zip(LARGE, every, strict=True):
    np.testing.assert_allclose(step, -mean_of(weights), rtol=1e-6, err_msg=str(weights))
  # Of what is not traced:
  np.testing.assert_allclose(step_of(LARGE[0], form), -mean_of(LARGE[0]), rtol=1e-6)


BATCH = np.arange(1.0, 7.0, dtype=np.float32)


def loss_of(weight_of):
  def loss_fn(x, batch):
    return jnp.mean(x * batch)

  return microbatch_value_and_grad(loss_fn, num_microbatches=2, weight_fn=weight_of)


def test_a_weight_fn_may_return_weights_of_any_size():
  cycles = [loss_of(lambda batch, w=w: w) for w in (2**33, np.int64(2**33), 1e-30)]
  every = jax.jit(lambda *args: [cycle(*args) for cycle in cycles])
  for loss, grad in every(jnp.float32(2.0), BATCH):
    np.testing.assert_allclose((loss, grad), (7.0, 3.5), rtol=1e-6)


def test_traced_weights_in_range_are_as_known_ones():
  for weights in ([1e-30, 3e-30], [4e29, 2e29], [0.0, 3.0], [2e-38, 1.0]):
    moved = jitted_step_of("update")(np.array(weights, np.float32))
    np.testing.assert_allclose(moved, -mean_of(weights), rtol=1e-5)
  cycle = loss_of(lambda batch: jnp.where(batch[0] == 1, 1e-20, 1e20))
  np.testing.assert_allclose(jax.jit(cycle)(jnp.float32(2.0), BATCH), (8, 4), rtol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_weight_has_a_derivative(reduction):
  def moved(weight):
    weights = [weight, jnp.float32(1)]
    return jnp.sum(step_of(weights, reduction=reduction, differentiable=True))

  first, second = GRADS.astype(np.float64).sum(1)
  derivative = jax.jit(jax.grad(moved))
  for weight in (1e-6, 0.5, 2.0):
    exact = -first if reduction == "sum" else -(first - second) / (1 + weight) ** 2
    np.testing.assert_allclose(derivative(np.float32(weight)), exact, rtol=1e-4)
  # A microbatch of no weight is left out, as it may be NaN.
  assert derivative(np.float32(0)) == 0


@functools.partial(jax.jit, static_argnames="reduction")
def sums_of_touched_rows(weights, reduction):
  """The step of a cycle in which each microbatch has a gradient for a parameter of its own."""
  tx = accumulate(optax.sgd(-1.0), len(weights), reduction=reduction)

  def body(held, both):
    return tx.apply(both[0], held[1], held[0], weight=both[1]), None

  params = jnp.zeros(len(weights))
  return jax.lax.scan(body, (params, tx.init(params)), (jnp.eye(len(weights)), weights))[0][0]


@jax.jit
@functools.partial(
  microbatch_value_and_grad, microbatch_size=1, weight_fn=lambda batch: batch["tokens"][0]
)
def of_rows(rows, batch):
  return jnp.mean(rows[batch["row"]])


@pytest.mark.parametrize("weights", [[1e8, 1, 1, 3], [50_001] * 300 + [1, 2]])
def test_a_small_weight_after_large_ones_multiplies_as_it_is(weights):
  exact = np.array(weights) / np.sum(weights)
  given = np.float32(weights)
  np.testing.assert_allclose(sums_of_touched_rows(given, "mean"), exact, rtol=3e-7)
  np.testing.assert_array_equal(sums_of_touched_rows(given, "sum"), given)
  batch = {"row": np.arange(len(weights)), "tokens": given}
  grads = of_rows(np.zeros(len(weights), np.float32), batch)[1]
  np.testing.assert_allclose(grads, exact, rtol=3e-7)


@forms
def test_where_every_call_steps_a_traced_weight_that_is_none_shows(form):
  tx, params = accumulate(optax.sgd(1.0), 1), jnp.zeros(3)
  run = mini_step(tx, form)
  step = jax.jit(lambda w: run(params, tx.init(params), jnp.asarray(GRADS[0]), weight=w)[0])
  for weight in (-1.0, np.nan, np.inf, 0.0, 3.0, 1e30):
    expected = {0.0: np.zeros(3), 3.0: -GRADS[0], 1e30: -GRADS[0]}.get(weight, np.full(3, np.nan))
    np.testing.assert_allclose(step(weight), expected, rtol=1e-6, err_msg=str(weight))


def test_a_traced_weight_below_zero_shows():
  cycle = jax.jit(loss_of(lambda batch: batch[0]))
  for weights in ([3.0, -1.0], [-1.0, 3.0]):
    assert np.all(np.isnan(jitted_step_of("update")(np.array(weights, np.float32))))
    # each is the first of a microbatch
    batch = np.array([*weights, 1, 1, 1, 1], np.float32)
    loss, grad = cycle(jnp.float32(2.0), batch)
    assert np.isnan(loss)
    assert np.isnan(grad)


def test_a_weight_below_the_rounding_of_the_sum_hides_no_nan():
  tx, one, nan = accumulate(optax.sgd(1.0), 3), np.ones(2, np.float32), np.float32([np.nan] * 2)
  update, start = jax.jit(tx.update), tx.init(jnp.zeros(2))
  for grads in (nan, one):
    state = start
    for g, w in ((one, 2.0**25), (grads, 1.0), (one, 1.0)):
      updates, state = update(g, state, weight=np.float32(w))
    assert np.all(np.isnan(updates)) == np.isnan(grads[0])
  for g, w in ((one, 2.0**25), (one, 1.0), (nan, 0.0)):
    updates, state = update(g, state, weight=np.float32(w))
  np.testing.assert_array_equal(updates, [-1, -1])


@forms
def test_an_accumulation_inside_another_counts_what_each_cycle_weighed(form):
  weights, grads = (1, 3, 5, 7), (1.0, 2.0, 3.0, 4.0)
  for outer, inner in ((2, 2), (1, 4), (4, 1)):
    tx, params = accumulate(accumulate(optax.sgd(1.0), inner), outer), np.float32(0)
    state, step = trees.strong(tx.init(params)), jax.jit(mini_step(tx, form))
    for w, g in zip(weights, grads, strict=True):
      params, state = step(params, state, np.float32(g), weight=w)
    np.testing.assert_allclose(params, -(1 + 6 + 15 + 28) / 16, rtol=1e-6)
  assert -(1 * 1.75 + 1 * 43 / 12) / 2 != -50 / 16  # each cycle alike


@pytest.mark.parametrize("options", [{"weight_fn": jnp.sum}, {"skip_nonfinite": True}])
def test_sums_are_selected_and_not_gradients(options):
  """XLA for GPU keeps a second gradient, of the parameters' size, where a gradient is selected."""
  params, batch = jnp.ones((5, 7)), jnp.ones((4, 5))
  run = microbatch_value_and_grad(
    lambda params, batch: jnp.sum(batch @ params), num_microbatches=2, **options
  )
  eqns = jax.make_jaxpr(run)(params, batch).jaxpr.eqns
  [body] = [eqn.params["jaxpr"].jaxpr for eqn in eqns if eqn.primitive.name == "scan"]
  made_by = {v: eqn.primitive.name for eqn in body.eqns for v in eqn.outvars}
  # of jnp.where
  selects = [eqn for eqn in body.eqns if eqn.params.get("name") == "_where"]
  of_gradients = [eqn for eqn in selects if eqn.outvars[0].aval.shape == params.shape]
  assert [made_by[eqn.invars[1]] for eqn in of_gradients] == ["add"]
