"""`accumulate` inside and around optax's other wrappers: each pair is two ways to one result."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_accum import accumulate, has_updated


@pytest.fixture(autouse=True)
def _optax_promotes():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, -0.3])}
WEIGHTS = (1.0, 3.0)
CYCLES, K = 3, len(WEIGHTS)


def gradients(params, seed):
  """The gradients of one cycle's microbatches, and their weighted mean."""
  keys = jax.random.split(jax.random.key(seed), K)
  each = [jax.tree.map(lambda p, key=key: jax.random.normal(key, p.shape), params) for key in keys]

  def mean(*g):
    return sum(w * x for w, x in zip(WEIGHTS, g, strict=True)) / sum(WEIGHTS)

  return each, jax.tree.map(mean, *each)


def stream(tx, params=PARAMS, of=lambda params: params, **extra_args):
  """The parameters after each cycle of microbatches."""
  state, trace = tx.init(params), []
  update = jax.jit(tx.update)
  for seed in range(CYCLES):
    for grads, weight in zip(gradients(of(params), seed)[0], WEIGHTS, strict=True):
      updates, state = update(grads, state, params, weight=weight, **extra_args)
      params = optax.apply_updates(params, updates)
    trace.append(params)
  return trace, state


def whole(tx, params=PARAMS, of=lambda params: params, **extra_args):
  """The parameters after each step on a cycle's mean."""
  tx = optax.with_extra_args_support(tx)
  state, trace = tx.init(params), []
  update = jax.jit(tx.update)
  for seed in range(CYCLES):
    updates, state = update(gradients(of(params), seed)[1], state, params, **extra_args)
    params = optax.apply_updates(params, updates)
    trace.append(params)
  return trace, state


ADAM = optax.adamw(0.1, weight_decay=0.1)
LABELS = {"w": "one", "b": "other"}
MASK = {"w": True, "b": False}

INSIDE = {
  "chain": optax.chain(optax.clip_by_global_norm(0.5), ADAM, optax.scale(0.5)),
  "partition": optax.partition({"one": ADAM, "other": optax.sgd(0.1)}, LABELS),
  "multi_transform": optax.multi_transform({"one": ADAM, "other": optax.sgd(0.1)}, LABELS),
  "masked": optax.masked(ADAM, MASK),
  "freeze": optax.chain(ADAM, optax.freeze(MASK)),
  "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
    learning_rate=optax.linear_schedule(0.1, 0.0, CYCLES)
  ),
  "apply_if_finite": optax.apply_if_finite(ADAM, 3),
  "ema": optax.chain(ADAM, optax.ema(0.9)),
  "accumulate": accumulate(ADAM, 1),
}


@pytest.mark.parametrize("name", INSIDE)
def test_around_another_wrapper(name):
  actual, state = stream(accumulate(INSIDE[name], K))
  expected, inner_state = whole(INSIDE[name])
  helpers.assert_trees_equal_to(actual, expected, 1e-5)
  helpers.assert_trees_equal_to(state.inner_opt_state, inner_state, 1e-5)


def accumulated(inner):
  return accumulate(inner, K)


OUTSIDE = {
  "chain": lambda wrap: optax.chain(wrap(ADAM), optax.scale(0.5), optax.identity()),
  "named_chain": lambda wrap: optax.named_chain(("main", wrap(ADAM))),
  "partition": lambda wrap: optax.partition(
    {"one": wrap(ADAM), "other": wrap(optax.sgd(0.1))}, LABELS
  ),
  "masked": lambda wrap: optax.chain(
    optax.masked(wrap(ADAM), MASK), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
  ),
  "freeze": lambda wrap: optax.chain(wrap(ADAM), optax.freeze(MASK)),
  "inject_hyperparams": lambda wrap: optax.inject_hyperparams(lambda rate: wrap(optax.adam(rate)))(
    rate=0.1
  ),
  "apply_if_finite": lambda wrap: optax.apply_if_finite(wrap(ADAM), 3),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_inside_another_wrapper(name):
  actual, state = stream(OUTSIDE[name](accumulated))
  expected, _ = whole(OUTSIDE[name](lambda inner: inner))
  helpers.assert_trees_equal_to(actual, expected, 1e-5)
  assert has_updated(state)


def test_around_lookahead():
  tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
  params = optax.LookaheadParams.init_synced(PARAMS)
  actual, state = stream(accumulate(tx, K), params, of=lambda p: p.fast)
  expected, inner_state = whole(tx, params, of=lambda p: p.fast)
  helpers.assert_trees_equal_to(actual, expected, 1e-5)
  helpers.assert_trees_equal_to(state.inner_opt_state, inner_state, 0)


def test_inside_lookahead_it_counts_calls():
  # Around it, lookahead synchronizes every so many calls; sync_period=2 steps are 2 * K calls.
  def make(inner, period):
    return optax.lookahead(inner, sync_period=period, slow_step_size=0.5)

  params = optax.LookaheadParams.init_synced(PARAMS)
  tx = make(accumulate(optax.sgd(0.1), K), 2 * K)
  state = tx.init(params)
  expected, _ = whole(make(optax.sgd(0.1), 2), params, of=lambda p: p.fast)
  for seed in range(CYCLES):
    for grads in [gradients(PARAMS, seed)[1]] * K:  # lookahead passes no weights on
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    helpers.assert_trees_equal_to(params, expected[seed], 1e-5)


def test_apply_is_update():
  tx = accumulate(INSIDE["chain"], K)
  expected, _ = stream(tx)
  params, state, apply = PARAMS, tx.init(PARAMS), jax.jit(tx.apply)
  for seed in range(CYCLES):
    for grads, weight in zip(gradients(PARAMS, seed)[0], WEIGHTS, strict=True):
      params, state = apply(grads, state, params, weight=weight)
    helpers.assert_trees_equal_to(params, expected[seed], 1e-6)


def test_extra_arguments_through_an_outer_chain():
  inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
  tx = optax.chain(accumulate(inner, K), optax.identity())
  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(4 * K):  # a value that never falls: two steps of patience, then halved
    updates, state = tx.update(PARAMS, state, params, value=1.0)
  scale = optax.tree.get(state, "scale")
  reference_state = inner.init(PARAMS)
  for _ in range(4):
    expected, reference_state = inner.update(PARAMS, reference_state, params, value=1.0)
  assert scale == optax.tree.get(reference_state, "scale")
  assert scale < 1
  helpers.assert_trees_equal_to(updates, expected, 1e-6)


@pytest.mark.optax_bug
def test_multisteps_loses_extra_arguments_in_a_chain():
  inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1))
  tx = optax.chain(optax.MultiSteps(inner, K).gradient_transformation(), optax.identity())
  with pytest.raises(TypeError, match="value"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)


@pytest.mark.parametrize(
  ("form", "search"),
  [
    ("update", optax.scale_by_zoom_linesearch(max_linesearch_steps=4)),
    ("apply", optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)),
  ],
  ids=["update", "apply"],
)
def test_lbfgs_with_its_line_search(form, search):
  rng = np.random.default_rng(0)
  rows, targets = rng.normal(size=(8, 3)), rng.normal(size=8)
  rows, targets = jnp.asarray(rows, jnp.float32), jnp.asarray(targets, jnp.float32)

  def loss(x, rows, targets):
    return jnp.mean((rows @ x - targets) ** 2)

  def value_fn(x):
    return loss(x, rows, targets)

  inner = optax.lbfgs(memory_size=2, linesearch=search)
  tx = accumulate(inner, 2)
  expected = x = jnp.zeros(3)
  inner_state, state = inner.init(x), tx.init(x)
  parts = [(slice(0, 6), 6.0), (slice(6, 8), 2.0)]

  @jax.jit
  def step(x, state):
    value, grad = jax.value_and_grad(value_fn)(x)
    updates, state = inner.update(grad, state, x, value=value, grad=grad, value_fn=value_fn)
    return optax.apply_updates(x, updates), state

  @jax.jit
  def call(x, state, part_rows, part_targets, weight):
    value, grad = jax.value_and_grad(value_fn)(x)
    kwargs = {"weight": weight, "value": value, "grad": grad, "value_fn": value_fn}
    grads = jax.grad(loss)(x, part_rows, part_targets)
    if form == "apply":
      return tx.apply(grads, state, x, **kwargs)
    updates, state = tx.update(grads, state, x, **kwargs)
    return optax.apply_updates(x, updates), state

  for _ in range(3):
    expected, inner_state = step(expected, inner_state)
    for part, weight in parts:
      x, state = call(x, state, rows[part], targets[part], weight)
    np.testing.assert_allclose(x, expected, rtol=1e-3, atol=1e-4)
  assert value_fn(x) < 0.7 * value_fn(jnp.zeros(3))
