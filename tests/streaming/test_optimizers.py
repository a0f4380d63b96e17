"""`accumulate` around every optimizer that optax exports: three cycles are three steps of it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.optimizers import mini_step
from support.samples import more

from optax_accum import accumulate

pytestmark = pytest.mark.usefixtures("usual_promotion")  # optax promotes


# Optimizers whose arguments are more than a learning rate.
CASES = {
  "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=2),
  "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 3), weight_decay=0.1),
  "fromage": lambda: optax.fromage(0.02),
  "noisy_sgd": lambda: optax.noisy_sgd(0.02, key=jax.random.key(0)),
  "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.02),
  "contrib.galore": lambda: optax.contrib.galore(0.02, rank=2, update_proj_gap=2),
  "contrib.mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.02)),
  "contrib.normalize": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(0.02)),
  "contrib.reduce_on_plateau": lambda: optax.chain(
    optax.sgd(0.02), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)
  ),
  "contrib.sam": lambda: optax.contrib.sam(optax.sgd(0.02), optax.sgd(0.05), sync_period=2),
  "contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.02), 0.02),
  "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.02)),
}  # fmt: skip

LEFT_OUT = {
  "dpsgd": "takes one gradient per example",
  "contrib.dpsgd": "takes one gradient per example",
  "contrib.differentially_private_aggregate": "takes one gradient per example",
  "contrib.hutchinson_estimator_diag_hessian": "takes a loss function instead of gradients",
  "contrib.schedule_free_eval_params": "is no transformation",
  "contrib.sophia": "takes a loss function beside the gradients",
  "lbfgs": "its line search evaluates the loss: test_line_search.py",
}


# The others are called without extra arguments, which not all of them accept.
TAKES_VALUE = ("polyak_sgd", "contrib.momo", "contrib.momo_adam", "contrib.reduce_on_plateau")


def _exported():
  """The optimizers of `optax`, and all that `optax.contrib` has but the parts of optimizers."""
  found = {}
  for name, fun in vars(optax).items():
    # nadam is a partial
    module = getattr(getattr(fun, "func", fun), "__module__", None)
    if module == "optax._src.alias" and callable(fun) and not inspect.isclass(fun):
      found[name] = fun
  for name, fun in vars(optax.contrib).items():
    part = inspect.isclass(fun) or name.startswith(("scale_by", "_"))
    if callable(fun) and not part:
      found["contrib." + name] = fun
  return found


EXPORTED = _exported()
NAMES = sorted(set(EXPORTED) - set(LEFT_OUT))
# What an accumulation could meet: moments, factors, the loss, the parameters and where they began,
# periods, wrappers. The others are more of these.
OF_EACH_KIND = (
  *("adafactor", "adamw", "lion", "polyak_sgd", "sgd"),
  *("contrib.muon", "contrib.prodigy", "contrib.sam"),
  *("contrib.schedule_free", "contrib.split_real_and_imaginary"),
)


def make(name):
  if name in CASES:
    return CASES[name]()
  fun = EXPORTED[name]
  learning_rate = inspect.signature(fun).parameters.get("learning_rate")
  return fun() if learning_rate is None else fun(learning_rate=0.02)


def test_the_list_has_what_optax_exports():
  assert len(EXPORTED) > 50
  assert {"adamw", "nadam", "sgd", "contrib.dog", "contrib.muon"} <= set(EXPORTED)
  assert not set(CASES) & set(LEFT_OUT)


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")
@pytest.mark.parametrize("name", [name if name in OF_EACH_KIND else more(name) for name in NAMES])
def test_three_cycles_are_three_steps(name):
  inner, weights = make(name), (1.0, 3.0)
  tx = accumulate(inner, every_k=2)
  key, values = jax.random.key(7), np.array([3.0, 2.9, 2.8], np.float32)
  params = {"w": jax.random.normal(key, (4, 3)), "b": jnp.array([0.5, -1.0, 2.0])}
  grads = jax.tree.map(lambda p: jax.random.normal(key, (3, 2, *p.shape)) + 0.5 * p, params)
  grads = jax.device_get(grads)

  def extra(value):
    return {"value": value} if name in TAKES_VALUE else {}

  def trained(tx, weighed, calls):
    """The last state, the parameters after each of the calls, and in which of them it stepped."""
    step, held = jax.jit(mini_step(tx)), (params, trees.strong(tx.init(params)))
    types, trace, emitted = jax.tree.map(jax.typeof, held), [], []
    for i, (g, value) in enumerate(calls):
      weight = {"weight": weights[i % 2]} if weighed else {}
      held = step(*held, g, **extra(value), **weight)
      trace.append(held[0])
      emitted.append(weighed and bool(held[1].has_updated))
      # as a scan wants it
      assert jax.tree.map(jax.typeof, held) == types or not weighed
    return held[1], trees.stack(trace), emitted

  def microbatch(i, j):
    return jax.tree.map(lambda g: g[i, j], grads)

  def mean(i):
    return jax.tree.map(lambda g: (weights[0] * g[i, 0] + weights[1] * g[i, 1]) / 4, grads)

  whole = [(mean(i), value) for i, value in enumerate(values)]
  calls = [(microbatch(i, j), value) for i, value in enumerate(values) for j in range(2)]
  expected_state, expected_trace, _ = trained(optax.with_extra_args_support(inner), False, whole)
  state, trace, emitted = trained(tx, True, calls)

  # muon iterates in low precision
  tolerance = 2e-3 if name == "contrib.muon" else 2e-5
  trees.assert_close(trees.index(trace, -1), trees.index(expected_trace, -1), tolerance)
  trees.assert_close(_arrays(state.inner_opt_state), _arrays(expected_state), tolerance)
  assert emitted == [False, True] * 3
  assert int(state.gradient_step) == 3
  assert int(state.mini_step) == 0
  for leaf, start, whole_leaf in zip(
    *map(jax.tree.leaves, (trace, params, expected_trace)), strict=True
  ):
    held = np.concatenate([start[None], leaf[1::2]])
    np.testing.assert_array_equal(leaf[0::2], held[:-1])  # to the bit
    np.testing.assert_allclose(leaf[1::2], whole_leaf, atol=10 * tolerance)


def _arrays(state):
  """The state with its random keys as numbers."""
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
    jax.tree.map(jnp.asarray, state),
  )
