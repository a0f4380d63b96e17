"""States from elsewhere, and arguments that are not what they look like: converted, or refused."""

import functools

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.optimizers import FORMS, mini_step, relaxed

from optax_accum import (
  accumulate,
  AccumulateState,
  from_multi_steps,
  has_updated,
)

PARAMS = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
K = 4

forms = pytest.mark.parametrize("form", FORMS)


def gradients(count, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  draw = lambda p: jnp.asarray(rng.normal(size=p.shape) + 1, dtype)  # noqa: E731
  return [jax.tree.map(draw, PARAMS) for _ in range(count)]


@functools.cache
def compiled(multi_steps):
  return jax.jit(multi_steps.update)


def begun(multi_steps, calls, params=PARAMS):
  """The parameters and the state of an `optax.MultiSteps` after these calls."""
  state = multi_steps.init(params)
  with jax.numpy_dtype_promotion("standard"):
    for grads in calls:
      updates, state = compiled(multi_steps)(grads, state, params)
      params = optax.apply_updates(params, updates)
  return params, state


class Begun:
  """Training of which a cycle begins under `optax.MultiSteps`; compiled once for all cases."""

  inner = relaxed(optax.adam(0.1))

  @classmethod
  @functools.cache
  def of(cls, use_grad_mean):
    return cls(use_grad_mean)

  def __init__(self, use_grad_mean):
    self.theirs = optax.MultiSteps(self.inner, K, use_grad_mean=use_grad_mean)
    tx = accumulate(self.inner, K, reduction="mean" if use_grad_mean else "sum")
    self.steps = {form: jax.jit(mini_step(tx, form)) for form in FORMS}
    self.convert = functools.partial(
      from_multi_steps, use_grad_mean=use_grad_mean, weight=1.0
    )
    self.jitted_convert = jax.jit(self.convert)
    self.divisor = K if use_grad_mean else 1

  @functools.cached_property
  def expected(self):
    """The parameters and the state after two steps on means, or sums, in float64."""
    params, state, calls = PARAMS, self.inner.init(PARAMS), gradients(2 * K)
    step = jax.jit(mini_step(self.inner))
    for part in (calls[:K], calls[K:]):
      total = jax.tree.map(
        lambda *g: sum(np.asarray(x, np.float64) for x in g), *part
      )
      grads = jax.tree.map(lambda x: jnp.float32(x / self.divisor), total)
      params, state = step(params, state, grads)
    return params, state


@pytest.mark.parametrize(
  ("before", "jitted", "use_grad_mean", "form"),
  [
    (0, True, True, "update"),
    (1, True, True, "apply"),
    (1, True, False, "update"),
    (3, False, True, "update"),
    (3, False, False, "apply"),
    (4, True, False, "update"),
    (6, True, True, "apply"),
  ],
)
def test_a_cycle_begun_under_multisteps_goes_on(
  before, jitted, use_grad_mean, form
):
  calls, made = gradients(2 * K), Begun.of(use_grad_mean)
  params, held = begun(made.theirs, calls[:before])
  state = (made.jitted_convert if jitted else made.convert)(held)
  assert isinstance(state, AccumulateState)
  for grads in calls[before:]:
    params, state = made.steps[form](params, state, grads)
  trees.assert_close((params, state.inner_opt_state), made.expected, 1e-5)
  assert (int(state.gradient_step), int(state.mini_step)) == (2, 0)
  assert state.acc_weight == 0


def test_taking_the_fields_as_they_are_is_wrong():
  calls, inner = gradients(K), optax.sgd(1.0)
  tx, exact = accumulate(inner, K), jax.tree.map(lambda *g: -sum(g) / K, *calls)
  params, held = begun(optax.MultiSteps(inner, K), calls[:2])
  copied = AccumulateState(
    *held, acc_weight=jnp.float32(2), has_updated=jnp.array(False)
  )
  ends = []
  for state in (from_multi_steps(held, weight=1), copied):
    moved = params
    for grads in calls[2:]:
      moved, state = tx.apply(grads, state, moved)
    ends.append(trees.largest_difference(moved, exact))
  assert ends[0] < 1e-6
  assert ends[1] > 0.1


@pytest.mark.parametrize("weight", [16, np.int64(16), jnp.float32(16)])
def test_a_cycle_may_go_on_with_rows(weight):
  calls, inner, rows = gradients(K), optax.sgd(1.0), [16, 16, 16, 5]
  params, held = begun(optax.MultiSteps(inner, K), calls[:2])
  tx = accumulate(inner, K)
  exact = jax.tree.map(
    lambda *g: (
      -np.average([np.asarray(x, np.float64) for x in g], axis=0, weights=rows)
    ),
    *calls,
  )
  traced = jax.jit(lambda held, weight: from_multi_steps(held, weight=weight))(
    held, weight
  )
  ends, apply = [], jax.jit(tx.apply)
  for state in [
    from_multi_steps(held, weight=weight),
    traced,
    from_multi_steps(held, weight=1),
  ]:
    moved = params
    for grads, n in zip(calls[2:], rows[2:], strict=True):
      moved, state = apply(grads, state, moved, weight=n)
    ends.append(trees.largest_difference(moved, exact))
  assert max(ends[:2]) < 1e-6
  assert ends[2] > 0.1  # what came before would count as two rows


def test_what_came_before_can_weigh_nothing():
  calls, inner = gradients(4), optax.sgd(1.0)
  calls[0] = jax.tree.map(lambda g: g * jnp.nan, calls[0])
  _, held = begun(optax.MultiSteps(inner, 3), calls[:1])
  for convert in (from_multi_steps, jax.jit(from_multi_steps)):
    state, moved = convert(held, weight=0), PARAMS
    for grads in calls[1:3]:
      moved, state = accumulate(inner, 3).apply(grads, state, moved)
    trees.assert_close(
      moved, jax.tree.map(lambda a, b: -(a + b) / 2, *calls[1:3]), 1e-6
    )


def test_a_sum_may_go_on_with_weights():
  calls, inner = gradients(3), optax.sgd(1.0)
  params, held = begun(
    optax.MultiSteps(inner, 3, use_grad_mean=False), calls[:2]
  )
  state = from_multi_steps(held, use_grad_mean=False, weight=2.0)
  tx = accumulate(inner, 3, reduction="sum")
  params, _ = tx.apply(calls[2], state, params, weight=3.0)
  trees.assert_close(
    params, jax.tree.map(lambda a, b, c: -2 * a - 2 * b - 3 * c, *calls), 1e-5
  )


@pytest.mark.parametrize(
  ("weight", "error", "match"),
  [
    (
      -1,
      ValueError,
      "The caller of from_multi_steps gave the weight -1; it must be 0, or from",
    ),
    (np.ones(2), ValueError, r"gave a weight of shape \(2,\)"),
    ("rows", TypeError, "gave the weight 'rows'; it must be a real scalar"),
  ],
)
def test_weights_that_are_none_are_refused(weight, error, match):
  held = optax.MultiSteps(optax.sgd(1.0), 2).init(PARAMS)
  with pytest.raises(error, match=match):
    from_multi_steps(held, weight=weight)


@pytest.mark.parametrize("jitted", [False, True])
def test_in_mid_cycle_the_weight_must_be_said(jitted):
  _, held = begun(optax.MultiSteps(optax.sgd(1.0), 3), gradients(2))
  where = "is traced" if jitted else "is 2"
  message = rf"state\.mini_step {where}, .* pass weight=rows, .* and weight=1 if they have no weig"
  with pytest.raises(ValueError, match=message):
    (jax.jit(from_multi_steps) if jitted else from_multi_steps)(held)


def test_a_converted_state_has_the_types_and_flags_of_ours():
  skip_fn = optax.skip_not_finite
  theirs = optax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=skip_fn)
  tx = accumulate(optax.sgd(1.0), 2, skip_fn=skip_fn)
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  calls = gradients(3, jnp.bfloat16)
  for count in range(4):
    _, held = begun(theirs, calls[:count], params)
    state = from_multi_steps(held, **({"weight": 1} if count % 2 else {}))
    assert (
      bool(has_updated(state)) == bool(theirs.has_updated(held)) == (count == 2)
    )
    assert [x.dtype for x in jax.tree.leaves(state.acc_grads)] == [
      jnp.float32
    ] * 2
    narrow = held._replace(
      acc_grads=optax.tree.cast(held.acc_grads, jnp.bfloat16)
    )
    trees.assert_close(
      from_multi_steps(narrow, weight=1).acc_grads, state.acc_grads, 1e-2
    )
    like = jax.eval_shape(tx.init, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
      lambda x: (x.shape, x.dtype), like
    )
    # no buffer stands in it twice
    jax.jit(tx.apply, donate_argnums=1)(calls[0], state, params)
  for wrong, match in (
    (
      ({"in": held},),
      r"got a tuple; it takes the .* itself\. That is state\[0\]\['in'\]: convert it",
    ),
    (
      held._asdict(),
      r"got a dict; it takes the .* itself\. Restore a checkpoint into the tree",
    ),
  ):
    with pytest.raises(TypeError, match=match):
      from_multi_steps(wrong)


def test_a_converted_state_goes_through_a_scan_in_float64():
  with jax.enable_x64(True):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    calls = gradients(K)
    _, held = begun(optax.MultiSteps(optax.sgd(1.0), K), calls[:1], params)
    state, tx = from_multi_steps(held, weight=1), accumulate(optax.sgd(1.0), K)
    assert {type(x) for x in jax.tree.leaves(state)} == {type(jnp.zeros(()))}
    many = jax.tree.map(lambda *g: jnp.stack(g), *calls[1:])
    body = lambda held, g: (tx.apply(g, held[1], held[0]), None)  # noqa: E731
    params, _ = jax.lax.scan(body, (params, state), many)[0]
  exact = jax.tree.map(lambda p, *g: p - sum(g) / K, PARAMS, *calls)
  trees.assert_close(params, exact, 1e-5)


def test_accumulators_of_float64_parameters_are_put_into_float64():
  with jax.enable_x64(True):
    wide = functools.partial(
      jax.tree.map, lambda x: jnp.asarray(x, jnp.float64)
    )
    calls, params = [wide(g) for g in gradients(K)], wide(PARAMS)
    _, held = begun(optax.MultiSteps(optax.sgd(1.0), K), calls[:1], params)
    state, tx = from_multi_steps(held, weight=1), accumulate(optax.sgd(1.0), K)
    state = state._replace(
      acc_grads=optax.tree.cast(state.acc_grads, jnp.float64)
    )
    for grads in calls[1:]:
      params, state = tx.apply(grads, state, params)
    exact = jax.tree.map(lambda *g: -sum(g) / K, *calls)
  # optax 0.2.8 rounds the first to float32
  trees.assert_close(params, exact, 1e-6)


def test_a_nan_that_multisteps_keeps_ends_with_its_cycle():
  nan = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
  inner = optax.apply_if_finite(optax.sgd(1.0), 5)
  params, held = begun(optax.MultiSteps(inner, 2), [nan, nan])
  tx, state = accumulate(inner, 2), from_multi_steps(held)
  ones = jax.tree.map(jnp.ones_like, PARAMS)
  for _ in range(2):
    params, state = tx.apply(ones, state, params)
  trees.assert_close(params, jax.tree.map(lambda p: p - 1, PARAMS), 0)


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
      r"MultiStepsState.*optax_accum\.from_multi_steps\(",
    ),
    (SGD.init(PARAMS), f"is a tuple {NOT_OURS}"),
    (None, f"is a NoneType {NOT_OURS}"),
    (
      (STATE, optax.EmptyState()),
      "there is one in it. Call the transformation of the whole",
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
  with pytest.raises(
    ValueError, match=r"made with a skip_fn, and this accumulate has none"
  ):
    getattr(TX, form)(PARAMS, SKIPS.init(PARAMS), PARAMS)
  with pytest.raises(
    ValueError, match=r"made without skip_fn or with another one: go on with"
  ):
    getattr(SKIPS, form)(PARAMS, STATE, PARAMS)
  for tx, skip_state in ((TX, ()), (SKIPS, SKIPS.init(PARAMS).skip_state)):
    # as it says
    getattr(tx, form)(PARAMS, STATE._replace(skip_state=skip_state), PARAMS)


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize(
  ("form", "arguments", "message"),
  [
    (
      "apply",
      (PARAMS, PARAMS, STATE),
      r"an AccumulateState as params, and a dict as state",
    ),
    (
      "apply",
      (STATE, PARAMS, PARAMS),
      r"as updates.*the order is apply\(updates, state, params\)",
    ),
    (
      "update",
      (STATE, PARAMS),
      r"as updates.*the order is update\(updates, state, params\)",
    ),
    (
      "update",
      (PARAMS, PARAMS, STATE),
      r"an AccumulateState as params, and a dict as state",
    ),
  ],
)
def test_arguments_in_another_order_are_refused_with_the_right_one(
  form, arguments, message, every_k
):
  with pytest.raises(ValueError, match=message):
    getattr(accumulate(SGD, every_k), form)(*arguments)


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
def test_gradients_that_are_nothing_are_refused(form):
  for every_k in (1, 2):
    tx = accumulate(SGD, every_k)
    with pytest.raises(
      ValueError, match=r"updates=None.* zeros .* weight=0.0 and flush=True"
    ):
      getattr(tx, form)(None, tx.init(PARAMS), PARAMS)
    with pytest.raises(
      TypeError, match=r"updates\['b'\] is a str; gradients are floating"
    ):
      getattr(tx, form)({**PARAMS, "b": "x"}, tx.init(PARAMS), PARAMS)


@forms
@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize(
  ("misspelt", "meant"),
  [
    ("weights", "weight"),
    ("wieght", "weight"),
    ("Weight", "weight"),
    ("weight_fn", "weight"),
    ("flush_now", "flush"),
    ("weights_", "weight"),
    ("flsh", "flush"),
  ],
)
def test_misspelt_keywords_get_what_was_meant(form, every_k, misspelt, meant):
  tx = accumulate(SGD, every_k)
  with pytest.raises(
    TypeError, match=rf"{form} got .* '{misspelt}': did you mean {meant}=\?"
  ):
    getattr(tx, form)(PARAMS, tx.init(PARAMS), PARAMS, **{misspelt: 1})


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
