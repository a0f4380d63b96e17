"""What `accumulate` promises call by call: means, weights, skips, flushes, counters, dtypes."""

import copy
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.optimizers import FORMS, mini_step
from support.samples import more

from optax_accum import accumulate, AccumulateTransformation, has_updated

NAN, INF = float("nan"), float("inf")
PARAMS = {"w": np.zeros(2, np.float32)}


def grads_of(value):
  return {"w": jnp.full(2, value, jnp.float32)}


@functools.cache
def jitted(tx, form):
  """One program for all values."""
  return jax.jit(mini_step(tx, form))


def run(tx, calls, params=PARAMS, form="update"):
  """Calls `tx` on ``(gradient, keywords)`` pairs; returns the trace of parameters and states."""
  params = jax.tree.map(jnp.asarray, params)
  state, trace, step = tx.init(params), [], jitted(tx, form)
  for value, kwargs in calls:
    params, state = step(params, state, grads_of(value), **kwargs)
    trace.append((params, state))
  return trace


def values_of(trace):
  return [float(params["w"][0]) for params, _ in trace]


def counters_of(trace):
  return [(int(s.mini_step), int(s.gradient_step), bool(s.has_updated)) for _, s in trace]


forms = pytest.mark.parametrize("form", FORMS)


@forms
def test_a_cycle_is_one_step_on_the_mean(form):
  trace = run(accumulate(optax.sgd(1.0), 3), [(g, {}) for g in (1, 2, 6, 3, 3, 3)], form=form)
  np.testing.assert_allclose(values_of(trace), [0, 0, -3, -3, -3, -6], rtol=1e-6)
  assert counters_of(trace) == [
    (1, 0, False), (2, 0, False), (0, 1, True), (1, 1, False), (2, 1, False), (0, 2, True)
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("every_k", "dtype", "form"),
  [(1, None, "apply"), (2, None, "update"), (2, jnp.bfloat16, "apply")],
)
def test_the_sum_does_not_round_weights_to_the_dtype_of_the_gradients(every_k, dtype, form):
  tx = accumulate(optax.identity(), every_k, reduction="sum", accumulator_dtype=dtype)
  params, three = jnp.zeros(2, jnp.bfloat16), jnp.full(2, 3, jnp.bfloat16)
  state = tx.init(params)
  for weight in (257.0, 0.0)[:every_k]:
    params, state = mini_step(tx, form)(params, state, three, weight=jnp.float32(weight))
  assert params.dtype == jnp.bfloat16
  exact = jnp.bfloat16(3 * 257)  # 772: bfloat16 has eight bits
  assert exact != three[0] * jnp.bfloat16(257)
  np.testing.assert_array_equal(params == exact, True)


@pytest.mark.parametrize(
  ("python_weight", "every_k", "form"),
  [(True, 2, "apply"), (False, 2, "update"), (False, 1, "apply")],
)
def test_a_cycle_of_zero_weight_is_no_step(every_k, python_weight, form):
  # Adam would move the parameters by its momentum if it ran.
  with jax.numpy_dtype_promotion("standard"):
    tx = accumulate(optax.adam(0.1), every_k)
    params = {"w": jnp.ones(2)}
    zero = 0 if python_weight else jnp.float32(0)
    trace = [(params, tx.init(params))]
    step = jax.jit(mini_step(tx, form), static_argnames="weight" if python_weight else None)
    for weight in [1.0] * every_k + [zero] * every_k:
      trace.append(step(*trace[-1], grads_of(3.0), weight=weight))
  (held_params, held), (new_params, after) = trace[every_k], trace[-1]
  assert bool(held.has_updated)
  assert not after.has_updated
  assert (int(after.mini_step), int(after.gradient_step)) == (0, 1)
  trees.assert_close(after.inner_opt_state, held.inner_opt_state, 0)
  trees.assert_close(new_params, held_params, 0)


@pytest.mark.parametrize(("skip", "form"), [(False, "update"), (False, "apply"), (True, "update")])
def test_a_bad_gradient_at_any_position_leaves_the_next_cycle_clean(skip, form):
  inner = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=10)
  tx = accumulate(inner, 3, skip_fn=optax.skip_not_finite if skip else None)
  for position, bad in itertools.product(range(3), [NAN, INF, -INF]):
    cycle = [1.0, 2.0, 3.0]
    cycle[position] = bad
    if skip:
      cycle.insert(position + 1, [1.0, 2.0, 3.0][position])  # it never happened
    values = values_of(run(tx, [(g, {}) for g in (*cycle, 4.0, 5.0, 6.0)], form=form))
    assert values[-4] == (-2 if skip else 0)
    assert values[-1] == (-7 if skip else -5)
    assert not np.any(np.isnan(values))


NAN_IN_THE_FIRST_CYCLE = [(g, {}) for g in (1.0, NAN, 2.0, 2.0)]


@pytest.mark.optax_bug
def test_multisteps_keeps_a_nan():
  inner = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=10)
  with jax.numpy_dtype_promotion("standard"):
    theirs = run(optax.MultiSteps(inner, 2), NAN_IN_THE_FIRST_CYCLE)
  assert values_of(theirs) == [0, 0, 0, 0]  # the NaN has stopped the training


@pytest.mark.optax_bug
def test_multisteps_says_updated_after_a_skip():
  theirs = optax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite)
  with jax.numpy_dtype_promotion("standard"):
    *_, (_, state) = run(theirs, [(g, {}) for g in (1.0, 1.0, NAN)])
  assert theirs.has_updated(state)


@pytest.mark.parametrize(("skip_fn", "form"), [
  (optax.skip_not_finite, "update"),
  (functools.partial(optax.skip_large_updates, max_squared_norm=50.0), "apply"),
], ids=["skip_not_finite", "skip_large_updates"])  # fmt: skip
def test_the_state_of_skip_fn_keeps_its_dtypes(skip_fn, form):
  tx, params = accumulate(optax.sgd(1.0), 2, skip_fn=skip_fn), jnp.zeros(2)
  start = tx.init(params)
  grads = jnp.array([[1, 1], [INF, 1], [3, 3]], jnp.bfloat16)

  def call(carry, g):
    return mini_step(tx, form)(*carry, g), None

  with jax.numpy_dtype_promotion("standard"):
    (params, state), _ = jax.lax.scan(call, (params, start), grads)
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)
  np.testing.assert_array_equal(params, -2)
  if "norm_squared" in state.skip_state:
    # as of the parameters
    assert state.skip_state["norm_squared"].dtype == jnp.float32
    assert state.skip_state["norm_squared"] == 18


def test_a_state_restored_under_a_smaller_k_ends_with_the_next_counted_call():
  before, after = (accumulate(optax.sgd(1.0), k, skip_fn=optax.skip_not_finite) for k in (5, 2))
  params, state = run(before, [(g, {}) for g in (1, 2, 3)])[-1]
  params, state = after.apply(grads_of(NAN), state, params)
  assert not state.has_updated  # a skipped call never happened
  params, state = after.apply(grads_of(6.0), state, params)
  assert state.has_updated
  np.testing.assert_array_equal(params["w"], -3)


@pytest.mark.parametrize(("every_k", "form"), [(1, "update"), (2, "apply"), (lambda _: 2, "update")])  # fmt: skip
def test_the_gradient_step_stays_at_its_maximum(every_k, form):
  most = np.iinfo(np.int32).max
  tx, params = accumulate(optax.sgd(1.0), every_k), jnp.zeros(2)
  state = tx.init(params)._replace(gradient_step=jnp.int32(most - 1))
  steps, step = [], jax.jit(mini_step(tx, form))
  for _ in range(4):
    params, state = step(params, state, jnp.ones(2))
    steps.append(int(state.gradient_step))
  assert state.has_updated
  assert steps == ([most] * 4 if every_k == 1 else [most - 1] + [most] * 3)


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize(
  ("of_grads", "of_params"),
  [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.float16)],
)
def test_updates_have_the_dtypes_of_inner_alone(of_grads, of_params, every_k):
  params = {"w": jnp.ones(3, of_params)}
  grads = {"w": jnp.ones(3, of_grads)}
  with jax.numpy_dtype_promotion("standard"):
    like = {"w": jnp.ones(3, jnp.promote_types(of_grads, of_params))}
    for inner in (optax.sgd(0.1), optax.adamw(0.1), optax.adafactor(0.1), optax.lion(0.1)):
      expected, _ = jax.eval_shape(inner.update, grads, inner.init(like), params)
      tx = accumulate(inner, every_k)
      state = tx.init(like)
      updates, new_state = jax.eval_shape(tx.update, grads, state, params)
      assert updates["w"].dtype == expected["w"].dtype
      new_params, applied_state = jax.eval_shape(tx.apply, grads, state, params)
      assert new_params["w"].dtype == of_params
      if every_k == 2:
        for new in (new_state, applied_state):
          assert [x.dtype for x in jax.tree.leaves(new)] == [
            x.dtype for x in jax.tree.leaves(state)
          ]


def test_1024_bfloat16_gradients_average_right():
  tx = accumulate(optax.identity(), 1024)
  grads = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (1024, 16)), jnp.bfloat16)

  @jax.jit
  def mean(tx_state):
    def call(state, g):
      updates, state = tx.update(g, state)
      return state, updates

    return jax.lax.scan(call, tx_state, grads)[1][-1]

  actual = np.asarray(mean(tx.init(grads[0])), np.float64)
  exact = np.asarray(grads, np.float64).mean(0)
  np.testing.assert_allclose(actual, exact, rtol=2**-8)
  total, _ = jax.lax.scan(lambda held, g: (held + g, None), jnp.zeros_like(grads[0]), grads)
  in_bfloat16 = np.asarray(total / 1024, np.float64)
  # what adding up in bfloat16 gives
  assert np.max(np.abs(in_bfloat16 - exact)) > 0.05


@pytest.mark.parametrize(("every_k", "differentiable"), [(1, False), (2, False), (2, True)])
def test_real_updates_of_complex_gradients_stay_real(every_k, differentiable):
  inner = optax.stateless(lambda updates, _: jax.tree.map(jnp.real, updates))
  tx = accumulate(inner, every_k, differentiable=differentiable)
  state = tx.init(jnp.zeros(2, jnp.complex64))
  for weight in [1.0, 3.0][:every_k]:
    updates, state = tx.update(
      jnp.full(2, weight - 2j, jnp.complex64), state, weight=jnp.float32(weight)
    )
  assert updates.dtype == jnp.float32
  np.testing.assert_array_equal(updates, 2.5 if every_k == 2 else 1)


@pytest.mark.parametrize(("form", "differentiable"), [("update", False), ("apply", True)])
def test_an_accumulator_of_lower_precision_does_not_round_the_updates(form, differentiable):
  inner = optax.scale(1 / 3)
  expected, _ = inner.update(jnp.ones(2), inner.init(jnp.zeros(2)))
  assert np.all(expected != expected.astype(jnp.bfloat16).astype(jnp.float32))
  tx = accumulate(inner, 2, accumulator_dtype=jnp.bfloat16, differentiable=differentiable)
  params = jnp.zeros(2)
  state = tx.init(params)
  for _ in range(2):
    params, state = mini_step(tx, form)(params, state, jnp.ones(2))
  trees.assert_close(params, expected, 0)
  assert state.acc_grads.dtype == jnp.bfloat16


def keeping(*names):
  """A transformation whose state is what `update` was last given by these names."""

  def update(updates, state, params=None, **extra_args):
    return updates, {name: extra_args[name] for name in names}

  def init(params):
    return {name: params if name == "grad" else jnp.zeros(()) for name in names}

  return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize(
  ("form", "reduction", "every_k"),
  [("update", "mean", 3), ("apply", "sum", 3), ("update", "mean", 1)],
)
def test_value_and_grad_are_reduced_as_the_gradients(form, reduction, every_k):
  inf, nan = np.inf, np.nan
  cycles = [  # the values, weights and flushes of calls; the gradient is the negative value
    [(inf, 1, 0), (2, 1, 0), (3, 1, 0)],
    [(2, 1, 0), (nan, 0, 0), (5, 3, 0)],
    [(1, 1, 0), (4, 2, 1)],
    # The first is skipped, and the third.
    [(nan, 1, 0), (7, 1, 0), (nan, 1, 0), (1, 1, 0), (4, 2, 0)],
  ]
  if every_k == 1:
    cycles = [[call] for calls in cycles for call in calls if call[1] and call[0] == call[0]]

  def skip_fn(grads, gradient_step, params):
    return jnp.isnan(grads), ()

  tx = accumulate(keeping("value", "grad"), every_k, reduction=reduction, skip_fn=skip_fn)
  params = jnp.zeros(())
  state, step = tx.init(params), jax.jit(mini_step(tx, form))
  types = jax.tree.map(jax.typeof, trees.strong(state))
  for calls in cycles:
    for value, weight, flush in np.float32(calls):
      params, state = step(
        params, state, -value, weight=weight, flush=flush > 0, value=value, grad=-value
      )
      assert jax.tree.map(jax.typeof, state) == types
    counted = [(w * v, w) for v, w, _ in calls if w and v == v]
    total, weight = np.sum(counted, axis=0)
    expected = total / weight if reduction == "mean" else total
    assert has_updated(state)
    np.testing.assert_allclose(state.inner_opt_state["value"], expected, rtol=1e-6)
    if every_k > 1:
      np.testing.assert_allclose(state.inner_opt_state["grad"], -expected, rtol=1e-6)


def test_a_value_in_some_calls_is_that_of_these():
  def update(updates, state, params=None, *, value=None, value_fn):
    assert value_fn is max
    return updates, state if value is None else value

  inner = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
  tx = accumulate(inner, 3)
  state = tx.init(jnp.ones(()))
  for extra_args in ({"value": 2.0}, {"weight": 5.0}, {"value": 8.0, "weight": 2.0}):
    _, state = tx.update(jnp.ones(()), state, value_fn=max, **extra_args)
  assert float(state.inner_opt_state) == (2 + 16) / 3


def test_every_k_of_one_leaves_value_and_value_fn_alone():
  def update(updates, state, params=None, *, value, grad, value_fn):
    assert value_fn is max
    assert value.dtype == jnp.bfloat16
    return updates, (value.astype(jnp.float32), grad)

  inner = optax.GradientTransformationExtraArgs(lambda params: (params, params), update)
  tx, one = optax.chain(optax.scale(2.0), accumulate(inner, 1)), jnp.ones(())
  extra_args = {"value": jnp.bfloat16(3), "grad": jnp.full((), 5.0), "value_fn": max}
  _, (_, state) = tx.update(one, tx.init(one), **extra_args)
  # The gradient is the reduced one, as in longer cycles.
  assert tuple(map(float, state.inner_opt_state)) == (3.0, 2.0)


def test_has_updated_is_whether_any_of_several_did():
  every_k = {"a": 2, "b": 3, "none": 1}  # the last has no parameters
  parts = {label: accumulate(optax.sgd(1.0), k) for label, k in every_k.items()}
  tx = optax.partition(parts, {"x": "a", "y": "b"})
  params = {"x": jnp.zeros(2), "y": jnp.zeros(2)}
  state, flags = tx.init(params), []
  for _ in range(6):
    _, state = tx.update(params, state, params)
    flags.append(bool(has_updated({"opt_state": (state,), "step": 0})))
  assert flags == [False, True, True, True, False, True]


def test_the_state_keeps_the_names_of_multisteps():
  state = accumulate(optax.sgd(1.0), 2).init(jnp.zeros(2))
  assert state._fields[:5] == optax.MultiStepsState._fields
  assert optax.tree.get(state, "mini_step") is state.mini_step


def test_the_transformation_is_a_pair_that_can_be_copied():
  tx = accumulate(optax.sgd(1.0), 2)
  init, update = tx
  assert (init, update) == (tx.init, tx.update)
  assert isinstance(tx, optax.GradientTransformationExtraArgs)
  through_jax = jax.tree.map(lambda f: f, tx)
  for twin in (copy.copy(tx), copy.deepcopy(tx), through_jax, tx._replace(init=optax.sgd(1).init)):
    assert isinstance(twin, AccumulateTransformation)
    assert callable(twin.apply)


def test_accumulators_serve_as_buffers_leaf_by_leaf():
  def update(updates, state, params=None):
    return {"same": updates["same"], "half": updates["half"].astype(jnp.float64)}, state

  with jax.enable_x64(True):
    tx = accumulate(optax.GradientTransformation(lambda params: (), update), 2)
    params = {"same": jnp.ones(100_000, jnp.float32), "half": jnp.ones(10, jnp.float32)}
    state = tx.init(params)
    step = jax.jit(lambda grads, state: tx.update(grads, state), donate_argnums=(1,))
    temp = step.lower(params, state).compile().memory_analysis().temp_size_in_bytes
    assert temp < 100_000  # a quarter of the large leaf
    for _ in range(2):
      updates, state = step(params, state)
    assert updates["half"].dtype == jnp.float64
    np.testing.assert_array_equal(updates["same"], np.ones(100_000, np.float32))


class Counted(eqx.Module):
  """What has no gradient: functions, an integer array, a key, a name, a float of Python."""

  mlp: eqx.nn.MLP
  count: jax.Array
  key: jax.Array
  name: str
  drop: eqx.nn.Dropout

  def __call__(self, x):
    return self.mlp(x)


@pytest.mark.parametrize("every_k", [more(1), 2])
def test_apply_keeps_what_has_no_gradient(every_k):
  key = jax.random.key(0)
  mlp = eqx.nn.MLP(4, 1, 8, 1, activation=jnp.tanh, key=key)
  model = Counted(mlp, jnp.int32(3), key, "name", eqx.nn.Dropout(0.5))
  x = jnp.ones((8, 4))
  loss_fn = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)  # noqa: E731
  grads = eqx.filter_jit(eqx.filter_grad(loss_fn))(model)
  inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
  tx = accumulate(inner, every_k)
  state = tx.init(eqx.filter(model, eqx.is_inexact_array))
  actual, expected = (model, state), (model, state)
  apply, update = eqx.filter_jit(tx.apply), eqx.filter_jit(tx.update)
  for _ in range(2):
    actual = apply(grads, actual[1], actual[0])
    updates, expected_state = update(grads, expected[1], expected[0])
    expected = eqx.apply_updates(expected[0], updates), expected_state
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  moved = eqx.filter(actual[0], eqx.is_inexact_array)
  trees.assert_close(moved, eqx.filter(expected[0], eqx.is_inexact_array), 1e-6)
  model = actual[0]
  assert (model.mlp.activation, model.name, int(model.count)) == (jnp.tanh, "name", 3)
  assert model.key == key
  eager, _ = tx.apply(grads, state, model)
  assert eager.count is model.count
