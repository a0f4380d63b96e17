"""States that would change their types in an update: what could lose is refused, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.optimizers import FORMS, mini_step

from optax_accum import accumulate, make_train_step

PARAMS, ONES = jnp.zeros(3), jnp.ones(3)

forms = pytest.mark.parametrize("form", FORMS)
ks = pytest.mark.parametrize("every_k", [1, 2, lambda _: 1], ids=["1", "2", "schedule"])


def changing(before, after):
  """A transformation whose state is `before` at first, and then ``after(state)``."""
  return optax.GradientTransformation(lambda _: before, lambda u, s, p=None: (u, after(s)))


@forms
@ks
def test_a_state_that_starts_as_an_integer(form, every_k):
  tx = accumulate(changing(0, lambda s: s + 0.6), every_k)
  message = r"inner_opt_state has dtype int32, and float32 after.*init return float32 there"
  with pytest.raises(TypeError, match=message):
    jax.eval_shape(mini_step(tx, form), PARAMS, tx.init(PARAMS), ONES)


@forms
@ks
def test_float32_gradients_of_bfloat16_parameters(form, every_k):
  tx = accumulate(optax.sgd(0.1, momentum=0.9), every_k)
  params, grads = {"w": jnp.ones(3, jnp.bfloat16)}, {"w": ONES}
  message = r"inner_opt_state\[0\]\.trace\['w'\] has dtype bfloat16, and float32 .*jnp\.float32\)"
  with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match=message):
    jax.eval_shape(mini_step(tx, form), params, tx.init(params), grads)


@forms
@pytest.mark.parametrize("way_out", ["init", "option"])
def test_the_ways_out_are_what_optax_alone_does(form, way_out):
  params = jnp.ones(3, jnp.bfloat16)
  inner = optax.sgd(0.1, momentum=0.9)
  state_inner = inner.init(params)
  tx, start = accumulate(inner, 2), params.astype(jnp.float32)
  if way_out == "option":
    tx, start = accumulate(optax.sgd(0.1, 0.9, accumulator_dtype=jnp.float32), 2), params
  state, actual, expected = tx.init(start), params, params
  rounded = state_inner
  grads = jnp.asarray(np.random.default_rng(0).normal(size=(100, 3)), jnp.float32)
  grads = grads.at[:5].multiply(100)
  step = jax.jit(mini_step(tx, form))
  with jax.numpy_dtype_promotion("standard"):
    alone = jax.jit(mini_step(inner))
    for g in grads:
      for _ in range(2):
        actual, state = step(actual, state, g)
      expected, state_inner = alone(expected, state_inner, g)
      _, rounded = alone(expected, rounded, g)
      rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), rounded)
  trees.assert_close(actual, expected, 0)
  trees.assert_close(state.inner_opt_state, state_inner, 1e-6)
  assert trees.largest_difference(rounded, state_inner) > 1e-2  # what a cast would have given


@forms
@ks
def test_a_cast_that_loses_nothing_stays(form, every_k):
  inner = changing(jnp.zeros(3), lambda s: (s + 0.5).astype(jnp.bfloat16))
  tx = accumulate(inner, every_k)
  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(4):
    params, state = mini_step(tx, form)(params, state, ONES)
  expected = 1 if every_k == 2 else 2
  trees.assert_close(state.inner_opt_state, jnp.full(3, expected, jnp.float32), 0)


@forms
@ks
@pytest.mark.parametrize(
  ("before", "after", "message"),
  [
    (jnp.zeros(3), lambda s: s[:2], r"has shape \(3,\), and \(2,\) after an update: the opt"),
    ({"a": ONES}, lambda s: {"b": s["a"]}, r"inner_opt_state\['a'\] is missing after an update"),
    ({"a": ONES}, lambda s: {**s, "b": ONES}, r"inner_opt_state\['b'\] is new after an update"),
    ([ONES], lambda s: (s[0],), r"inner_opt_state is a PyTreeDef.*, and a PyTreeDef.* after"),
    (jax.random.key(0), jax.random.key_data, r"inner_opt_state has shape \(\), and \(2,\) after"),
  ],
)
def test_a_state_of_another_tree_or_shape(form, every_k, before, after, message):
  tx = accumulate(changing(before, after), every_k)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(mini_step(tx, form), PARAMS, tx.init(PARAMS), ONES)


@forms
@ks
def test_a_random_key_stays_one(form, every_k):
  tx = accumulate(changing(jax.random.key(0), lambda s: jax.random.split(s)[0]), every_k)
  _, state = jax.eval_shape(mini_step(tx, form), PARAMS, tx.init(PARAMS), ONES)
  assert state.inner_opt_state.dtype == jax.random.key(0).dtype


def test_updates_that_change_the_shape_of_parameters():
  inner = optax.stateless(lambda updates, _: jnp.ones((2, 3)))
  tx = accumulate(inner, 2)
  with (
    jax.numpy_rank_promotion("allow"),
    pytest.raises(ValueError, match=r"params has shape \(3,\), and \(2, 3\) after an update"),
  ):
    jax.eval_shape(tx.apply, ONES, tx.init(PARAMS), PARAMS)


def weighed_step(tx):
  def loss_fn(params, batch):
    return jnp.mean((batch @ params) ** 2)

  weight_fn = {"weight_fn": lambda batch: jnp.sum(batch[:, 0])}
  return make_train_step(loss_fn, tx, num_microbatches=2, donate=False, **weight_fn)


@pytest.mark.parametrize(
  ("before", "after", "error", "message"),
  [
    (0, lambda s: s + 0.6, TypeError, r"opt_state has dtype int32, and float32 after an update"),
    ({"a": ONES}, lambda s: {}, ValueError, r"opt_state\['a'\] is missing after an update"),
  ],
)
def test_a_train_step_that_may_leave_a_batch_out(before, after, error, message):
  with pytest.raises(error, match=message):
    weighed_step(changing(before, after)).eval_shape(PARAMS, before, jnp.ones((4, 3)))
