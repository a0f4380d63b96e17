"""Bad input: what the message says, and that it comes when building or tracing."""

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.optimizers import mini_step, relaxed

from optax_accum import accumulate

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


TX = accumulate(SGD, 2)
STATE = TX.init(PARAMS)


def passed(state, every_k=2, method="update"):
  """A call with another state."""
  return lambda: getattr(accumulate(SGD, every_k), method)(PARAMS, state, PARAMS)


def chained():
  tx = optax.chain(TX, optax.scale(1.0))
  tx.update(PARAMS, serialization.to_state_dict(tx.init(PARAMS)), PARAMS)


NOT_OURS = r"and not an AccumulateState: pass what init .* restore a checkpoint into the tree"
OF_MULTISTEPS = r"is a MultiStepsState and not .*tx\.init\(params\)\._replace"
NO_INT = "must be an int of at least 1"
CALL_IT = "something that may make one: call it first, as in"
NO_SCALAR = "must be a real scalar"
NO_WEIGHT = "it must be 0 or more"
UNLIKE_THE_STATE = [
  ({"w": PARAMS["w"]}, ValueError, r"updates\['b'\] is missing"),
  ({**PARAMS, "c": PARAMS["b"]}, ValueError, r"\['c'\] is not expected"),
  ({**PARAMS, "b": jnp.zeros(4)}, ValueError, r"updates\['b'\] has shape \(4,\), not \(3,\)"),
  ({**PARAMS, "b": jnp.zeros(3, int)}, TypeError, r"updates\['b'\] is int32\[3\]; gradients"),
  (tuple(PARAMS.values()), ValueError, r"updates\['\w'\] is missing.*parameters that init was"),
]
KEYWORDS = [
  ("weight", jnp.ones(2), ValueError, rf"a weight of shape \(2,\).*{NO_SCALAR}"),
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
  (built(inner=optax.adam), TypeError, rf"{CALL_IT} adam\(\.\.\.\)"),
  (built(inner=Optimizer), TypeError, rf"{CALL_IT} Optimizer\(\.\.\.\)"),
  (built(inner=optax.MultiSteps(SGD, 2)), TypeError, r"an optax\.MultiSteps object.*it wraps"),
  (built(inner=0.1), TypeError, r"inner=0\.1 is not an optax\.GradientTransformation: give an optax optimizer"),
  (built(inner=(SGD.init, SGD.update)), TypeError, r"build one with optax\.GradientTransformation\(init_fn"),
  (built(reduction="max"), ValueError, "reduction='max' must be one of 'mean', 'sum'"),
  (started(COMPLEX, accumulator_dtype=jnp.float32), TypeError,
    r"accumulator_dtype=float32 would lose the imaginary part of params\['z'\]"),
  *((called(every_k, options={"axis_name": "batch"}), NameError, "unbound axis name: batch") for every_k in (1, 2)),
  (passed(optax.MultiSteps(SGD, 2).init(PARAMS)), ValueError, OF_MULTISTEPS),
  (passed(SGD.init(PARAMS), method="apply"), ValueError, f"a tuple {NOT_OURS}"),
  (passed(SGD.init(PARAMS), 1), ValueError, f"is a tuple {NOT_OURS}"),
  (passed(None, 1, "apply"), ValueError, f"is a NoneType {NOT_OURS}"),
  (passed((STATE, ())), ValueError, r"a tuple .* \(or of the chain that it is in"),
  (passed(STATE._asdict()), ValueError, f"is a dict {NOT_OURS}"),
  (chained, ValueError, f"is a str {NOT_OURS}"),  # restored without its types
  (lambda: TX.update([PARAMS], STATE._replace(acc_grads=(PARAMS,)), [PARAMS]), ValueError,
    r"updates is a PyTreeDef.* and not a PyTreeDef"),
  *(
    (called(method=method, grads=grads), error, message)
    for method, (grads, error, message) in zip(
      ("update", "apply") * 3, UNLIKE_THE_STATE, strict=False
    )
  ),
  *(
    (called(every_k, **{name: value}), error, message)
    for every_k, (name, value, error, message) in zip(
      (1, 2) * 3, KEYWORDS, strict=False
    )
  ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_an_error_names_the_value_and_what_it_must_be(call, error, message):
  with pytest.raises(error, match=message):
    call()


@pytest.mark.parametrize("one", [np.int64(1), jnp.int32(1)])
def test_every_k_takes_integers_of_arrays(one):
  assert accumulate(SGD, one).init(PARAMS).acc_grads == ()


@pytest.mark.parametrize(
  ("form", "every_k", "number"),
  [("update", 1, float), ("apply", 2, float), ("update", 2, np.float32)],
)
def test_gradients_may_be_numbers(form, every_k, number):
  tx, params = accumulate(SGD, every_k), {"a": jnp.zeros(()), "b": jnp.zeros(2)}
  state = tx.init(params)
  for value in (1.0, 4.0):
    grads = {"a": number(value), "b": np.full(2, value, np.float32)}
    params, state = mini_step(tx, form)(params, state, grads)
  expected = {1: -5.0, 2: -2.5}[every_k]
  trees.assert_close(params, {"a": jnp.float32(expected), "b": jnp.full(2, expected)}, 0)


@pytest.mark.parametrize(("every_k", "form"), [(1, "update"), (2, "apply")])
def test_the_gradient_of_an_integer_is_refused_with_what_to_write(every_k, form):
  tx = accumulate(relaxed(optax.adam(0.1)), every_k)
  fixed, params = {"q": jnp.arange(3, dtype=jnp.int8)}, {"a": jnp.ones(3)}

  def loss_fn(params):
    return jnp.sum((params["q"].astype(jnp.float32) + params["a"]) ** 2)

  both = {**fixed, **params}
  grads = jax.grad(loss_fn, allow_int=True)(both)
  message = r"updates\['q'\] is float0\[3\]; .* loss\(\{\*\*others, \*\*params"
  with pytest.raises(TypeError, match=message):
    getattr(tx, form)(grads, tx.init(both), both)
  # What the error says to write.
  grads = jax.grad(lambda params: loss_fn({**fixed, **params}))(params)
  held = params, tx.init(params)
  for _ in range(every_k):
    held = mini_step(tx, form)(*held, grads)
  np.testing.assert_allclose(held[0]["a"], 0.9, rtol=1e-5)
