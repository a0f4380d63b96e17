"""Bad input: what the message says, and that it comes when building or tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.optimizers import relaxed

from optax_accum import accumulate, has_updated

SGD = optax.sgd(1.0)
PARAMS = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}


@pytest.mark.parametrize(
  ("every_k", "error", "message"),
  [
    (0, ValueError, r"every_k=0 must be at least 1"),
    (-2, ValueError, r"every_k=-2 must be at least 1"),
    (2.0, TypeError, r"every_k=2\.0 must be an int of at least 1"),
    (True, TypeError, r"every_k=True must be an int of at least 1"),
    ("4", TypeError, r"every_k='4' must be an int of at least 1"),
    (None, TypeError, r"every_k=None must be an int of at least 1"),
    (
      np.ones(2, int),
      TypeError,
      r"every_k=array.* must be an int of at least 1",
    ),
  ],
)
def test_every_k(every_k, error, message):
  with pytest.raises(error, match=message):
    accumulate(SGD, every_k)


@pytest.mark.parametrize("one", [np.int64(1), jnp.int32(1)])
def test_every_k_takes_integers_of_arrays(one):
  assert accumulate(SGD, one).init(PARAMS).acc_grads == ()


@pytest.mark.parametrize(
  ("schedule", "error", "message"),
  [
    (
      lambda _: 2.0,
      TypeError,
      r"shape \(\) and dtype float32; .* integer scalar: cast it",
    ),
    (
      lambda s: jnp.stack([s, s]),
      TypeError,
      r"shape \(2,\) and dtype int32; .* integer scalar",
    ),
    (lambda _: True, TypeError, r"dtype bool; it must be an integer"),
    (
      lambda _: 0,
      ValueError,
      r"The schedule every_k returned 0; it must return 1 or more",
    ),
  ],
)
def test_schedules(schedule, error, message):
  tx = accumulate(SGD, schedule)
  with pytest.raises(error, match=message):
    jax.eval_shape(tx.update, PARAMS, tx.init(PARAMS))


class Optimizer:
  """A class where its instance, or a transformation, is wanted."""


@pytest.mark.parametrize(
  ("inner", "message"),
  [
    (
      optax.adam,
      r"something that may make one: call it first, as in adam\(\.\.\.\)",
    ),
    (
      Optimizer,
      r"something that may make one: call it first, as in Optimizer\(\.\.\.\)",
    ),
    (
      optax.MultiSteps(SGD, 2),
      r"a optax\.MultiSteps|an optax\.MultiSteps object.*it wraps",
    ),
    (
      0.1,
      r"inner=0\.1 is not an optax\.GradientTransformation: give an optax optimizer",
    ),
    (
      (SGD.init, SGD.update),
      r"build one with optax\.GradientTransformation\(init_fn",
    ),
  ],
)
def test_inner(inner, message):
  with pytest.raises(TypeError, match=message):
    accumulate(inner, 2)


def test_reduction():
  with pytest.raises(
    ValueError, match=r"reduction='max' must be one of 'mean', 'sum'"
  ):
    accumulate(SGD, 2, reduction="max")


@pytest.mark.parametrize("method", ["update", "apply"])
@pytest.mark.parametrize(
  ("grads", "error", "message"),
  [
    ({"w": PARAMS["w"]}, ValueError, r"updates\['b'\] is missing"),
    (
      {**PARAMS, "c": PARAMS["b"]},
      ValueError,
      r"updates\['c'\] is not expected",
    ),
    (
      {**PARAMS, "b": jnp.zeros(4)},
      ValueError,
      r"updates\['b'\] has shape \(4,\), not \(3,\)",
    ),
    (
      {**PARAMS, "b": jnp.zeros(3, int)},
      TypeError,
      r"updates\['b'\] is int32\[3\]; gradients",
    ),
    (
      {**PARAMS, "b": jnp.zeros(3, complex)},
      TypeError,
      r"updates\['b'\].*imaginary part",
    ),
    (
      tuple(PARAMS.values()),
      ValueError,
      r"updates\['\w'\] is missing.*parameters that init was",
    ),
  ],
)
def test_gradients_unlike_the_state(grads, error, message, method):
  tx = accumulate(SGD, 2)
  with pytest.raises(error, match=message):
    jax.eval_shape(getattr(tx, method), grads, tx.init(PARAMS), PARAMS)


def test_a_tree_of_another_kind_with_the_same_leaves():
  tx = accumulate(SGD, 2)
  with pytest.raises(
    ValueError, match=r"updates is a PyTreeDef.* and not a PyTreeDef"
  ):
    tx.update([jnp.zeros(2)], tx.init((jnp.zeros(2),)))


def test_float64_gradients_for_a_float32_accumulator():
  tx = accumulate(SGD, 2)
  state = tx.init(PARAMS)
  with jax.enable_x64(True):
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float64), PARAMS)
    match = r"updates\['b'\] has dtype float64.* float32.*would round it: .*converted .*jnp\.float64"
    with pytest.raises(TypeError, match=match):
      jax.eval_shape(tx.update, grads, state)
    state = state._replace(
      acc_grads=optax.tree.cast(state.acc_grads, jnp.float64)
    )
    jax.eval_shape(tx.update, grads, state)


def test_an_accumulator_that_is_restored_in_another_dtype():
  tx = accumulate(SGD, 2)
  for dtype in (jnp.bfloat16, jnp.int32):
    state = tx.init(PARAMS)
    state = state._replace(acc_grads=optax.tree.cast(state.acc_grads, dtype))
    match = rf"updates\['b'\] has dtype float32 and its accumulator {dtype.__name__}, .* round it"
    with pytest.raises(TypeError, match=match):
      jax.eval_shape(tx.update, PARAMS, state)


@pytest.mark.parametrize("every_k", [1, 2])
def test_the_gradient_of_an_integer(every_k):
  tx = accumulate(relaxed(optax.adam(0.1)), every_k)
  fixed, params = {"q": jnp.arange(3, dtype=jnp.int8)}, {"a": jnp.ones(3)}

  def loss_fn(params):
    return jnp.sum((params["q"].astype(jnp.float32) + params["a"]) ** 2)

  both = {**fixed, **params}
  grads = jax.grad(loss_fn, allow_int=True)(both)
  for method in (tx.update, tx.apply):
    with pytest.raises(
      TypeError,
      match=r"updates\['q'\] is float0\[3\]; .* loss\(\{\*\*others, \*\*params",
    ):
      method(grads, tx.init(both), both)
  # What the error says to write.
  grads = jax.grad(lambda params: loss_fn({**fixed, **params}))(params)
  state, new = tx.init(params), params
  for _ in range(every_k):
    new, state = tx.apply(grads, state, new)
  np.testing.assert_allclose(new["a"], 0.9, rtol=1e-5)
  updates, _ = tx.update(grads, tx.init(params), params)
  moved = optax.apply_updates(params, updates)
  np.testing.assert_allclose(
    moved["a"], 0.9 if every_k == 1 else 1.0, rtol=1e-5
  )


@pytest.mark.parametrize(
  ("dtype", "message"),
  [
    (jnp.int32, r"accumulator_dtype=int32 cannot hold a mean"),
    (
      jnp.float32,
      r"accumulator_dtype=float32 would lose the imaginary part of params\['z'\]",
    ),
  ],
)
def test_accumulator_dtype(dtype, message):
  with pytest.raises(TypeError, match=message):
    accumulate(SGD, 2, accumulator_dtype=dtype).init(
      {"z": jnp.zeros(2, jnp.complex64)}
    )


def test_missing_parameters():
  tx = accumulate(optax.adamw(0.1), 2)
  state = tx.init(PARAMS)
  with (
    jax.numpy_dtype_promotion("standard"),
    pytest.raises(ValueError, match=r"passing `params`"),
  ):
    tx.update(PARAMS, state)
  with pytest.raises(
    ValueError, match=r"apply\(.*\) got params=None; it needs the parameters"
  ):
    tx.apply(PARAMS, state, None)


@pytest.mark.parametrize("every_k", [1, 2])
@pytest.mark.parametrize(
  ("kwargs", "error", "message"),
  [
    (
      {"weight": jnp.ones(2)},
      ValueError,
      r"a weight of shape \(2,\).*must be a real scalar",
    ),
    ({"weight": -1.0}, ValueError, r"the weight -1\.0; it must be 0, or from"),
    (
      {"weight": jnp.float32(-1)},
      ValueError,
      r"the weight -1\.0; it must be 0, or from",
    ),
    (
      {"weight": float("nan")},
      ValueError,
      r"the weight nan; it must be 0, or from",
    ),
    ({"weight": 1j}, TypeError, r"must be a real scalar"),
    (
      {"flush": 1},
      TypeError,
      r"flush=1 must be a bool, or a bool scalar array",
    ),
    (
      {"flush": jnp.ones(2, bool)},
      TypeError,
      r"flush=.* must be a bool, or a bool scalar array",
    ),
    (
      {"flush": jnp.int32(1)},
      TypeError,
      r"flush=.* must be a bool, or a bool scalar array",
    ),
  ],
)
def test_weight_and_flush(kwargs, error, message, every_k):
  tx = accumulate(SGD, every_k)
  with pytest.raises(error, match=message):
    tx.update(PARAMS, tx.init(PARAMS), **kwargs)


@pytest.mark.parametrize(
  ("returned", "message"),
  [
    (
      jnp.bool_(True),
      r"skip_fn returned .*; it must return the pair \(should_skip, info\)",
    ),
    ((jnp.int32(1), ()), r"should_skip=.*; it must be a bool scalar"),
    ((jnp.ones(2, bool), ()), r"should_skip=.*; it must be a bool scalar"),
  ],
)
def test_skip_fn(returned, message):
  with pytest.raises(TypeError, match=message):
    accumulate(SGD, 2, skip_fn=lambda *_: returned).init(PARAMS)


@pytest.mark.parametrize("every_k", [1, 2])
def test_an_axis_name_that_is_not_bound(every_k):
  tx = accumulate(SGD, every_k, axis_name="batch")
  with pytest.raises(
    ValueError, match=r"axis_name='batch' is not bound here.*jax\.pmap"
  ):
    tx.update(PARAMS, tx.init(PARAMS))


def test_has_updated_without_a_state():
  with pytest.raises(
    ValueError, match=r"got a tuple without an AccumulateState in it"
  ):
    has_updated(SGD.init(PARAMS))


@pytest.mark.parametrize(("before", "now"), [(8, 1), (1, 3)])
def test_a_state_of_another_kind_of_every_k(before, now):
  params = jnp.ones(2)
  state = accumulate(optax.sgd(0.1), before).init(params)
  with pytest.raises(
    ValueError,
    match=rf"every_k={now}, and the state (has|lacks) an accumulator",
  ):
    accumulate(optax.sgd(0.1), now).update(params, state, params)


def test_a_skip_fn_that_is_no_function():
  with pytest.raises(TypeError, match="skip_fn=3 must be a function"):
    accumulate(optax.sgd(0.1), 2, skip_fn=3)
