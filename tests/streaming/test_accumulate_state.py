"""States from elsewhere, and arguments that are not what they look like: refused, or they go on."""

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.optimizers import FORMS, mini_step, relaxed

from optax_accum import accumulate

PARAMS = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
forms = pytest.mark.parametrize("form", FORMS)


def gradients(count, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  draw = lambda p: jnp.asarray(rng.normal(size=p.shape) + 1, dtype)  # noqa: E731
  return [jax.tree.map(draw, PARAMS) for _ in range(count)]


@pytest.mark.parametrize(
  ("form", "jitted"), [("update", True), ("apply", False)]
)
def test_a_state_of_multisteps_goes_on_at_the_end_of_a_cycle(form, jitted):
  inner, k = relaxed(optax.adam(0.1)), 4
  calls, theirs = gradients(2 * k), optax.MultiSteps(inner, k)
  tx, params, old = accumulate(inner, k), PARAMS, theirs.init(PARAMS)
  update = jax.jit(theirs.update)
  with jax.numpy_dtype_promotion("standard"):
    for grads in calls[:k]:
      updates, old = update(grads, old, params)
      params = optax.apply_updates(params, updates)
  # What the docstring of accumulate says.
  state = tx.init(params)._replace(
    inner_opt_state=old.inner_opt_state, gradient_step=old.gradient_step
  )
  step = mini_step(tx, form)
  if jitted:
    step = jax.jit(step)
  for grads in calls[k:]:
    params, state = step(params, state, grads)
  expected, expected_state = PARAMS, inner.init(PARAMS)
  alone = jax.jit(mini_step(inner))
  for part in (calls[:k], calls[k:]):
    means = [
      np.mean(x, axis=0, dtype=np.float64)
      for x in zip(*map(jax.tree.leaves, part), strict=True)
    ]
    mean = jax.tree.unflatten(jax.tree.structure(PARAMS), means)
    mean = jax.tree.map(jnp.float32, mean)
    expected, expected_state = alone(expected, expected_state, mean)
  trees.assert_close(
    (params, state.inner_opt_state), (expected, expected_state), 1e-5
  )
  assert (int(state.gradient_step), int(state.mini_step)) == (2, 0)


SGD = optax.sgd(1.0)
TX = accumulate(SGD, 2)
SKIPS = accumulate(SGD, 2, skip_fn=optax.skip_not_finite)
STATE = TX.init(PARAMS)
NOT_OURS = r"and not an AccumulateState: pass what init .* restore a checkpoint into the tree"


@forms
@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize(
  ("state", "message"),
  [
    (
      optax.MultiSteps(SGD, 2).init(PARAMS),
      r"is a MultiStepsState and not .*tx\.init\(params\)\._replace",
    ),
    (SGD.init(PARAMS), f"is a tuple {NOT_OURS}"),
    (None, f"is a NoneType {NOT_OURS}"),
    (
      (STATE, optax.EmptyState()),
      r"is a tuple .* of this transformation \(or of the chain that it is in",
    ),
    (STATE._asdict(), f"is a dict {NOT_OURS}"),  # restored without its types
    (list(STATE), f"is a list {NOT_OURS}"),
  ],
)
def test_states_of_others_are_refused_with_what_to_do(
  form, every_k, state, message
):
  with pytest.raises(ValueError, match=message):
    getattr(accumulate(SGD, every_k), form)(PARAMS, state, PARAMS)


def test_a_chains_state_that_was_restored_as_a_dict_is_refused():
  tx = optax.chain(TX, optax.scale(1.0))
  state = serialization.to_state_dict(tx.init(PARAMS))
  with pytest.raises(ValueError, match=NOT_OURS):
    tx.update(PARAMS, state, PARAMS)


def test_a_restored_state_goes_on_as_the_message_says():
  _, state = TX.update(gradients(1)[0], STATE)
  restored = serialization.from_state_dict(
    STATE, serialization.to_state_dict(state)
  )
  trees.assert_close(restored, state, 0)


@forms
def test_a_state_made_with_or_without_skip_fn_is_told_from_the_other(form):
  for tx, state in ((TX, SKIPS.init(PARAMS)), (SKIPS, STATE)):
    with pytest.raises(
      ValueError, match=r"made with another skip_fn, or with or.*Go on with"
    ):
      getattr(tx, form)(PARAMS, state, PARAMS)
  for tx, skip_state in ((TX, ()), (SKIPS, SKIPS.init(PARAMS).skip_state)):
    # as it says
    getattr(tx, form)(PARAMS, STATE._replace(skip_state=skip_state), PARAMS)


@forms
@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize("number", [float, np.float32])
def test_gradients_may_be_numbers(form, every_k, number):
  tx, params = accumulate(SGD, every_k), {"a": jnp.zeros(()), "b": jnp.zeros(2)}
  state = tx.init(params)
  for value in (1.0, 4.0):
    grads = {"a": number(value), "b": np.full(2, value, np.float32)}
    params, state = mini_step(tx, form)(params, state, grads)
  expected = {1: -5.0, 2: -2.5}[every_k]
  trees.assert_close(
    params, {"a": jnp.float32(expected), "b": jnp.full(2, expected)}, 0
  )


@forms
def test_other_keywords_reach_inner(form):
  passed = [
    "weight_decay",
    "value",
    "grad",
    "learning_rate",
    "value_fn",
    "height",
    "height_map",
    "weighting",
    "weight_1",
    "kl_weight",
    "step_flush",
    "flash",
    "loss",
    "key",
  ]

  def update(updates, state, params=None, **extra_args):
    assert list(extra_args) == passed
    return updates, state

  tx = accumulate(optax.GradientTransformationExtraArgs(SGD.init, update), 1)
  getattr(tx, form)(
    PARAMS, tx.init(PARAMS), PARAMS, **dict.fromkeys(passed, 1.0)
  )
