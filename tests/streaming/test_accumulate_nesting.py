"""`accumulate` inside and around optax's other wrappers: each pair is two ways to one result."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import trees
from support.optimizers import mini_step
from support.samples import more

from optax_accum import accumulate, has_updated

pytestmark = pytest.mark.usefixtures("usual_promotion")  # optax promotes


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


def stream(tx, params=PARAMS, of=lambda params: params, form="update"):
  """The parameters after each cycle of microbatches."""
  state, trace, step = tx.init(params), [], jax.jit(mini_step(tx, form))
  for seed in range(CYCLES):
    for grads, weight in zip(gradients(of(params), seed)[0], WEIGHTS, strict=True):
      params, state = step(params, state, grads, weight=weight)
    trace.append(params)
  return trace, state


def whole(tx, params=PARAMS, of=lambda params: params):
  """The parameters after each step on a cycle's mean."""
  tx = optax.with_extra_args_support(tx)
  state, trace, step = tx.init(params), [], jax.jit(mini_step(tx))
  for seed in range(CYCLES):
    params, state = step(params, state, gradients(of(params), seed)[1])
    trace.append(params)
  return trace, state


ADAM = optax.adamw(0.1, weight_decay=0.1)
LABELS = {"w": "one", "b": "other"}
MASK = {"w": True, "b": False}

INSIDE = {
  "chain": optax.chain(optax.clip_by_global_norm(0.5), ADAM, optax.scale(0.5)),
  "partition": optax.partition({"one": ADAM, "other": optax.sgd(0.1)}, LABELS),
  "masked": optax.masked(ADAM, MASK),
  "freeze": optax.chain(ADAM, optax.freeze(MASK)),
  "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, CYCLES)),
  "apply_if_finite": optax.apply_if_finite(ADAM, 3),
  "ema": optax.chain(ADAM, optax.ema(0.9)),
  "accumulate": accumulate(ADAM, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", [more(x) if x in ("ema", "freeze") else x for x in INSIDE])
def test_around_another_wrapper_a_cycle_is_its_step(name):
  actual, state = stream(accumulate(INSIDE[name], K))
  expected, inner_state = whole(INSIDE[name])
  trees.assert_close(actual, expected, 1e-5)
  trees.assert_close(state.inner_opt_state, inner_state, 1e-5)


def accumulated(inner):
  return accumulate(inner, K)


OUTSIDE = {
  "chain": lambda wrap: optax.chain(wrap(ADAM), optax.scale(0.5), optax.identity()),
  "named_chain": lambda wrap: optax.named_chain(("main", wrap(ADAM))),
  "partition": lambda wrap: optax.partition({"one": wrap(ADAM), "other": wrap(optax.sgd(0.1))}, LABELS),
  "masked": lambda wrap: optax.chain(
    optax.masked(wrap(ADAM), MASK),
    optax.masked(optax.set_to_zero(), {"w": False, "b": True}),
  ),
  "freeze": lambda wrap: optax.chain(wrap(ADAM), optax.freeze(MASK)),
  "inject_hyperparams": lambda wrap: optax.inject_hyperparams(lambda rate: wrap(optax.adam(rate)))(rate=0.1),
  "apply_if_finite": lambda wrap: optax.apply_if_finite(wrap(ADAM), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_inside_another_wrapper_a_cycle_is_its_step(name):
  actual, state = stream(OUTSIDE[name](accumulated))
  expected, _ = whole(OUTSIDE[name](lambda inner: inner))
  trees.assert_close(actual, expected, 1e-5)
  assert has_updated(state)


def test_around_lookahead_a_cycle_is_its_step():
  tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
  params = optax.LookaheadParams.init_synced(PARAMS)
  actual, state = stream(accumulate(tx, K), params, of=lambda p: p.fast)
  expected, inner_state = whole(tx, params, of=lambda p: p.fast)
  trees.assert_close(actual, expected, 1e-5)
  trees.assert_close(state.inner_opt_state, inner_state, 0)


@pytest.mark.parametrize(("inner", "expected"), [("mean", 15.0), ("sum", 30.0)])
def test_a_sum_has_no_weight_for_an_accumulation_within(inner, expected):
  # Weighed by what the cycles weigh, 3 and 7, these would be 19 and 190.
  tx = accumulate(accumulate(optax.sgd(-1.0), 2, reduction=inner), 2, reduction="sum")
  params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
  for weight in (1.0, 2.0, 3.0, 4.0):
    params, state = jax.jit(tx.apply)(weight, state, params, weight=weight)
  assert params == expected


def test_extra_arguments_come_through_an_outer_chain():
  inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
  tx = optax.chain(accumulate(inner, K), optax.identity())
  params, state = PARAMS, tx.init(PARAMS)
  call, of_inner = jax.jit(tx.update), jax.jit(inner.update)
  # a value that never falls: two steps of patience, then halved
  for _ in range(4 * K):
    updates, state = call(PARAMS, state, params, value=1.0)
  scale = optax.tree.get(state, "scale")
  reference_state = inner.init(PARAMS)
  for _ in range(4):
    expected, reference_state = of_inner(PARAMS, reference_state, params, value=1.0)
  assert scale == optax.tree.get(reference_state, "scale")
  assert scale < 1
  trees.assert_close(updates, expected, 1e-6)


@pytest.mark.optax_bug
def test_multisteps_loses_extra_arguments_in_a_chain():
  inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1))
  tx = optax.chain(optax.MultiSteps(inner, K).gradient_transformation(), optax.identity())
  with pytest.raises(TypeError, match="value"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
