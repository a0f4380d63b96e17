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
COMPLEX = {"z": jnp.zeros(2, jnp.complex64)}


class Optimizer:
  """A class where its instance, or a transformation, is wanted."""


def built(**options):
  """A call of `accumulate`."""
  return lambda: accumulate(**{"inner": SGD, "every_k": 2, **options})


def started(params=PARAMS, **options):
  """A call of `init`."""
  return lambda: built(**options)().init(params)


def called(every_k=2, method="update", grads=PARAMS, options=(), **keywords):
  """A call of `update` or `apply`, traced: keywords are known to the program."""

  def call():
    tx = accumulate(SGD, every_k, **dict(options))
    state = tx.init(PARAMS)
    run = getattr(tx, method)
    jax.eval_shape(lambda grads: run(grads, state, PARAMS, **keywords), grads)

  return call


NO_INT = "must be an int of at least 1"
CALL_IT = "something that may make one: call it first, as in"
NO_SCALAR = "must be a real scalar"
NO_WEIGHT = "it must be 0 or more"
UNLIKE_THE_STATE = [
  ({"w": PARAMS["w"]}, ValueError, r"updates\['b'\] is missing"),
  ({**PARAMS, "c": PARAMS["b"]}, ValueError, r"\['c'\] is not expected"),
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
    tuple(PARAMS.values()),
    ValueError,
    r"updates\['\w'\] is missing.*parameters that init was",
  ),
]
KEYWORDS = [
  (
    "weight",
    jnp.ones(2),
    ValueError,
    rf"a weight of shape \(2,\).*{NO_SCALAR}",
  ),
  ("weight", -1.0, ValueError, rf"the weight -1\.0; {NO_WEIGHT}"),
  ("weight", jnp.float32(-1), ValueError, rf"the weight -1\.0; {NO_WEIGHT}"),
  ("weight", float("nan"), ValueError, rf"the weight nan; {NO_WEIGHT}"),
  ("weight", 1j, TypeError, NO_SCALAR),
]
REFUSED = [
  (built(every_k=0), ValueError, "every_k=0 must be at least 1"),
  (built(every_k=-2), ValueError, "every_k=-2 must be at least 1"),
  (built(every_k=2.0), TypeError, rf"every_k=2\.0 {NO_INT}"),
  (built(every_k=True), TypeError, f"every_k=True {NO_INT}"),
  (built(every_k="4"), TypeError, f"every_k='4' {NO_INT}"),
  (built(every_k=None), TypeError, f"every_k=None {NO_INT}"),
  (built(every_k=np.ones(2, int)), TypeError, f"every_k=array.* {NO_INT}"),
  (
    called(lambda _: 2.0),
    TypeError,
    r"returned float32\[\]; .* integer scalar: cast it",
  ),
  (
    called(lambda step: jnp.stack([step, step])),
    TypeError,
    r"returned int32\[2\]; .* integer scalar",
  ),
  (
    called(lambda _: True),
    TypeError,
    r"bool\[\]; it must be an integer scalar",
  ),
  (built(inner=optax.adam), TypeError, rf"{CALL_IT} adam\(\.\.\.\)"),
  (built(inner=Optimizer), TypeError, rf"{CALL_IT} Optimizer\(\.\.\.\)"),
  (
    built(inner=optax.MultiSteps(SGD, 2)),
    TypeError,
    r"an optax\.MultiSteps object.*it wraps",
  ),
  (
    built(inner=0.1),
    TypeError,
    r"inner=0\.1 is not an optax\.GradientTransformation: give an optax optimizer",
  ),
  (
    built(inner=(SGD.init, SGD.update)),
    TypeError,
    r"build one with optax\.GradientTransformation\(init_fn",
  ),
  (
    built(reduction="max"),
    ValueError,
    "reduction='max' must be one of 'mean', 'sum'",
  ),
  (
    started(COMPLEX, accumulator_dtype=jnp.int32),
    TypeError,
    "accumulator_dtype=int32 cannot hold a mean",
  ),
  (
    started(COMPLEX, accumulator_dtype=jnp.float32),
    TypeError,
    r"accumulator_dtype=float32 would lose the imaginary part of params\['z'\]",
  ),
  (
    lambda: has_updated(SGD.init(PARAMS)),
    ValueError,
    "got a tuple without an AccumulateState in it",
  ),
  *(
    (
      called(every_k, options={"axis_name": "batch"}),
      NameError,
      "unbound axis name: batch",
    )
    for every_k in (1, 2)
  ),
  *(
    (called(method=method, grads=grads), error, message)
    for method in ("update", "apply")
    for grads, error, message in UNLIKE_THE_STATE
  ),
  *(
    (called(every_k, **{name: value}), error, message)
    for every_k in (1, 2)
    for name, value, error, message in KEYWORDS
  ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_an_error_names_the_value_and_what_it_must_be(call, error, message):
  with pytest.raises(error, match=message):
    call()


def test_an_error_names_the_kind_of_tree_where_the_leaves_are_the_same():
  tx = accumulate(SGD, 2)
  with pytest.raises(
    ValueError, match=r"updates is a PyTreeDef.* and not a PyTreeDef"
  ):
    tx.update([jnp.zeros(2)], tx.init((jnp.zeros(2),)))


@pytest.mark.parametrize("one", [np.int64(1), jnp.int32(1)])
def test_every_k_takes_integers_of_arrays(one):
  assert accumulate(SGD, one).init(PARAMS).acc_grads == ()


@pytest.mark.parametrize("every_k", [1, 2])
def test_the_gradient_of_an_integer_is_refused_with_what_to_write(every_k):
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


def test_parameters_that_are_missing_are_asked_for():
  tx = accumulate(optax.adamw(0.1), 2)
  state = tx.init(PARAMS)
  with (
    jax.numpy_dtype_promotion("standard"),
    pytest.raises(ValueError, match=r"passing `params`"),
  ):
    tx.update(PARAMS, state)


@pytest.mark.parametrize(("before", "now"), [(8, 1), (1, 3)])
def test_a_state_with_or_without_an_accumulator_is_told_from_the_other(
  before, now
):
  params = jnp.ones(2)
  state = accumulate(optax.sgd(0.1), before).init(params)
  with pytest.raises(
    ValueError, match=r"every_k=1 there are no accumulators: .* flush=True"
  ):
    accumulate(optax.sgd(0.1), now).update(params, state, params)
