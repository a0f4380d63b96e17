"""States that change their types in an update: they widen as in optax alone, or are refused."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import trees
from support.devices import make_mesh
from support.optimizers import mini_step

from optax_accum import accumulate, make_train_step

PARAMS, ONES = jnp.zeros(3), jnp.ones(3)
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def changing(before, after):
  """A transformation whose state is `before` at first, and then ``after(state)``."""
  return optax.GradientTransformation(lambda _: before, lambda u, s, p=None: (u, after(s)))


def dtypes(tree):
  return jax.tree.map(jnp.result_type, tree)


# An integer, and a leaf that another one widens once that is wider.
WIDENING = {
  "int": changing(0, lambda s: s + 0.6),
  "twice": changing((jnp.ones(3, jnp.bfloat16), jnp.int8(1)), lambda s: (s[0] * s[1], s[1] * jnp.float16(1.5))),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDENING)
@pytest.mark.parametrize(("every_k", "form"), [(1, "update"), (2, "apply"), (lambda _: 1, "update")])  # fmt: skip
def test_a_state_widens_as_in_optax_alone(name, every_k, form):
  inner = WIDENING[name]
  tx = accumulate(inner, every_k)
  params, state, expected = PARAMS, tx.init(PARAMS), inner.init(PARAMS)
  step, first = jax.jit(mini_step(tx, form)), None
  with jax.numpy_dtype_promotion("standard"):
    for _ in range(4):
      for _ in range(2 if every_k == 2 else 1):
        params, state = step(params, state, ONES)
        first = first or dtypes(state.inner_opt_state)
      expected = inner.update(ONES, expected)[1]
  trees.assert_close(state.inner_opt_state, jax.tree.map(jnp.asarray, expected), 1e-6)
  # known before the conditional, so that the next calls are compiled once
  if every_k != 1:
    assert dtypes(state.inner_opt_state) == first


@pytest.mark.parametrize(("form", "start"), [("update", jnp.float32), ("apply", jnp.bfloat16)])
def test_float32_gradients_of_bfloat16_parameters_keep_their_precision(form, start):
  params = jnp.ones(3, jnp.bfloat16)
  tx, state_inner = accumulate(MOMENTUM, 2), MOMENTUM.init(params)
  state, actual, expected = tx.init(params.astype(start)), params, params
  rounded = state_inner
  grads = jnp.asarray(np.random.default_rng(0).normal(size=(100, 3)), jnp.float32)
  grads = grads.at[:5].multiply(100)
  step = jax.jit(mini_step(tx, form))
  with jax.numpy_dtype_promotion("standard"):
    alone = jax.jit(mini_step(MOMENTUM))
    updates = jax.eval_shape(tx.update, grads[0], state, params)[0]
    assert updates.dtype == jax.eval_shape(MOMENTUM.update, grads[0], state_inner)[0].dtype
    for g in grads:
      for _ in range(2):
        actual, state = step(actual, state, g)
      expected, state_inner = alone(expected, state_inner, g)
      _, rounded = alone(expected, rounded, g)
      rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), rounded)
  trees.assert_close(actual, expected, 0)
  trees.assert_close(state.inner_opt_state, state_inner, 1e-6)
  # what a cast back would have given
  assert trees.largest_difference(rounded, state_inner) > 1e-2


@pytest.mark.parametrize(("form", "every_k"), [("apply", 1), ("update", 2)])
def test_a_cast_that_loses_nothing_stays(form, every_k):
  mesh = make_mesh(2, kind=AxisType.Explicit)
  with jax.set_mesh(mesh):
    before = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, P("data")))
    after = lambda s: jax.reshard((s + 0.5).astype(jnp.bfloat16), P())  # noqa: E731
    tx = accumulate(changing(before, after), every_k)
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(mini_step(tx, form))
    for _ in range(4):
      params, state = step(params, state, ONES)
  expected = 1 if every_k == 2 else 2
  trees.assert_close(state.inner_opt_state, jnp.full(4, expected, jnp.float32), 0)
  assert state.inner_opt_state.sharding.spec == P("data")


@pytest.mark.parametrize(("form", "every_k"), [("update", 2), ("apply", 2), ("apply", 1)])
@pytest.mark.parametrize(("before", "after", "message"), [
  (jnp.zeros(3), lambda s: s[:2], r"After .*_state has shape \(2,\), not \(3,\): the opt"),
  ({"a": ONES}, lambda s: {"b": s["a"]}, r"After an update inner_opt_state\['a'\] is missing"),
  ({"a": ONES}, lambda s: {**s, "b": ONES}, r"After .* inner_opt_state\['b'\] is not expected"),
  ([ONES], lambda s: (s[0],), r"After .* inner_opt_state is a PyTree.* and not a PyTree"),
  (jax.random.key(0), jax.random.key_data, r"After .*inner_opt_state has shape \(2,\), not \(\)"),
  (
    jax.random.key(0),
    lambda s: jnp.uint32(0),
    "key<fry>",  # JAX's own
  ),
])  # fmt: skip
def test_a_state_that_becomes_another_tree_or_shape_is_refused(
  form, every_k, before, after, message
):
  tx = accumulate(changing(before, after), every_k)
  with pytest.raises((ValueError, TypeError), match=message):
    jax.eval_shape(mini_step(tx, form), PARAMS, tx.init(PARAMS), ONES)


if hasattr(optax, "monitor"):  # since optax 0.2.7

  def test_a_monitor_is_refused_and_a_snapshot_is_not():
    measure = {"norm": optax.tree.norm}
    tx = accumulate(optax.chain(optax.sgd(0.1), optax.monitor(measure)), 2)
    message = (
      r"measurements\['norm'\] is not expected: .*optax\.monitor's do not: use optax\.snapshot"
    )
    with pytest.raises(ValueError, match=message):
      tx.apply(ONES, tx.init(PARAMS), PARAMS)
    # As it says.
    tx = accumulate(optax.chain(optax.sgd(0.1), optax.snapshot("norm", optax.tree.norm)), 2)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
      params, state = tx.apply(ONES, state, params)
    np.testing.assert_allclose(optax.tree.get(state, "norm"), 0.1 * 3**0.5, rtol=1e-6)


def loss_fn(params, batch):
  return jnp.mean(batch @ params)


def weighed_step(tx, **options):
  options = {"weight_fn": lambda batch: jnp.sum(batch[:, 0])} | options
  return make_train_step(loss_fn, tx, num_microbatches=2, **options)


COUNTS = changing(np.int32(0), lambda s: jnp.asarray(s, jnp.float32) + 0.6)


@pytest.mark.parametrize(("tx", "options", "held"), [
  (COUNTS, {}, lambda state: state),
  (optax.chain(accumulate(COUNTS, 1), COUNTS), {}, lambda state: state[1]),
  (accumulate(COUNTS, 1), {}, lambda state: state.inner_opt_state),
], ids=["weights", "chain", "accumulate"])  # fmt: skip
def test_a_train_step_widens_what_it_is_given(tx, options, held):
  step = weighed_step(tx, **options)
  # It is donated too, though of another dtype than what comes out. Warnings are errors.
  params, state = jnp.zeros(3), tx.init(PARAMS)
  for rows in (jnp.zeros((4, 3)), jnp.ones((4, 3))):
    params, state, _ = step(params, state, rows)
    assert held(state).dtype == jnp.float32
  np.testing.assert_allclose(held(state), 0.6, rtol=1e-6)
