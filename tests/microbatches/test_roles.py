"""What the defaults refuse: rows that would not be split, and keys that all microbatches share."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import AUTO, EXPLICIT, make_mesh

from optax_accum import make_train_step, microbatch, microbatch_value_and_grad

ROWS = 8
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(ROWS, 3)), rng.normal(size=ROWS)
LABELS = rng.integers(4, size=ROWS)
WEIGHTS = rng.normal(size=(3, 4))


def squared_error(w, x, y):
  return jnp.mean((jnp.einsum("bi,i->b", x, w) - y) ** 2)


def cross_entropy(w, x, y):
  return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(x @ w, y))


LOSSES = pytest.mark.parametrize(
  ("fun", "w", "y"), [(squared_error, np.ones(3), Y), (cross_entropy, WEIGHTS, LABELS)]
)
REFUSED = (
  r"argument 2 has 8 rows, as many as the batch, and batch_argnums=None does not split"
  r" it\..* name both, batch_argnums=\(1, 2\); .* batch_argnums=1\."
)


def step_loss(fun, params, *args, **options):
  """The loss that a step gives."""
  step = make_train_step(fun, optax.sgd(0.1), donate=False, **options)
  return step(params, optax.sgd(0.1).init(params), *args)[-1]["loss"]


def cycle_loss(fun, *args, **options):
  return jax.jit(microbatch_value_and_grad(fun, **options))(*args)[0]


@LOSSES
@pytest.mark.parametrize("run", [cycle_loss, step_loss])
def test_labels_that_are_not_split_are_refused(run, fun, w, y):
  with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
    args = w, X, y
    expected = jax.jit(fun)(*args)
    if run is step_loss:  # in its first call
      with pytest.raises(ValueError, match=REFUSED):
        run(fun, *args, microbatch_size=2)
    actual = run(fun, *args, microbatch_size=2, batch_argnums=(1, 2))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    # The planted wrong answer, which is what is asked for here.
    unsplit = run(fun, *args, microbatch_size=1, batch_argnums=1)
    assert abs(unsplit - expected) > 1e-2


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_labels_that_are_not_split_are_refused_over_a_mesh(kind):
  args = squared_error, np.ones(3), X, Y
  with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
    mesh = make_mesh(8, kind=kind)
    run = functools.partial(step_loss, *args, num_microbatches=1, mesh=mesh)
    with pytest.raises(ValueError, match=REFUSED):
      run()
    expected = jax.jit(squared_error)(*args[1:])
    actual = run(batch_argnums=(1, 2))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def scaled_mean(w, x, *others, named=None):
  """Of what else there is, nothing has to do with rows."""
  others = [o for o in jax.tree.leaves((others, named)) if np.ndim(o)]
  scale = sum((jnp.mean(jnp.asarray(o, jnp.float32)) for o in others), 0.0)
  return jnp.mean(w * x) * (1 + scale)


@pytest.mark.parametrize(("others", "named", "options", "fix"), [
  ((np.ones((2, 6)), {"a": [np.ones(6)]}), None, {}, r"argument 3 .*\(1, 3\)"),
  ((), {"m": np.ones(6)}, {}, r"argument 'named' .*\(1, \"named\"\)"),
  # A table, or a teacher, of which a leaf has as many by chance.
  ((), {"w": np.ones((6, 6)), "b": np.ones(2)}, {}, None),
  ((np.ones(6),), np.ones(6), {"batch_argnums": 1}, None),
  ((np.ones(()), 6, True, None, {}), None, {}, None),
])  # fmt: skip
def test_an_argument_all_of_whose_leaves_have_the_rows_is_refused(others, named, options, fix):
  tx = optax.sgd(0.1)
  step = make_train_step(scaled_mean, tx, num_microbatches=2, **options)
  args = np.float32(1), tx.init(1.0), np.ones(6, np.float32), *others
  kwargs = {} if named is None else {"named": named}
  with (
    contextlib.nullcontext()
    if fix is None
    else pytest.raises(ValueError, match=fix + ".* batch_argnums=1")
  ):
    step.eval_shape(*args, **kwargs)


@pytest.mark.parametrize("other", [
  {"w": np.ones((64, 8), np.float32), "b": np.ones(64, np.float32)},
  np.ones(10, np.float32),
], ids=["a teacher of width 64", "10 class frequencies"])  # fmt: skip
def test_in_a_later_call_as_many_rows_are_a_coincidence(other):
  """The last batch of an epoch is smaller, hours into a run."""
  tx = optax.sgd(0.1)
  step = make_train_step(scaled_mean, tx, num_microbatches=2, donate=False)
  held = np.float32(1), tx.init(1.0)
  leaves = jax.tree.leaves(other)
  rows, loss = len(leaves[0]), 1 + len(leaves)
  for count in (128, rows):
    *_, metrics = step(*held, np.ones(count, np.float32), other)
    assert metrics["loss"] == loss
  cycle = step.add(step.begin(held[0]), held[0], np.ones(rows, np.float32), other)
  assert step.finish(*held, cycle)[-1]["loss"] == loss


def test_over_a_mesh_the_rows_are_those_of_all_devices():
  def fun(w, x, scales):
    return jnp.mean(w * x) * jnp.sum(scales)

  loss = step_loss(
    fun, jnp.ones(()), jnp.ones(16), jnp.ones(2), num_microbatches=2, mesh=make_mesh(8)
  )
  assert float(loss) == 2


def aux_of(aux, x, **options):
  """The aux of a cycle over the rows `x`, by default those of no word."""
  run = microbatch_value_and_grad(lambda w, x: (jnp.mean(w * x), aux(x)), has_aux=True, **options)
  return jax.jit(run)(np.float32(1), x)[0][1]


@pytest.mark.parametrize(("aux", "shape", "options", "where"), [
  (lambda x: x, (8,), {"num_microbatches": 2}, "4 rows"),
  (lambda x: x, (3,), {"microbatch_size": 2}, "2 rows"),
  (lambda x: jnp.zeros(4), (8,), {"num_microbatches": 2}, "4 rows"),
  (lambda x: x, (8,), {"num_microbatches": 8}, None),
  (lambda x: x, (8,), {"num_microbatches": 2, "aux_reduction": "mean"}, None),
  (lambda x: x, (8,), {"num_microbatches": 1, "weight_fn": jnp.sum}, None),
  (lambda x: jnp.sum(x), (8,), {"num_microbatches": 2}, None),
])  # fmt: skip
def test_an_aux_with_the_rows_of_a_microbatch_is_refused(aux, shape, options, where):
  run = functools.partial(aux_of, lambda x: {"a": [aux(x)]}, **options)
  x = jax.ShapeDtypeStruct(shape, np.float32)
  if where is None:
    jax.eval_shape(run, x)
    return
  match = rf"^aux\['a'\]\[0\] has {where}, as many as a microbatch.* give \"concat\".* or \"mean\""
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(run, x)


def test_over_a_mesh_an_aux_has_the_rows_of_one_device():
  step = make_train_step(
    lambda w, x: (jnp.mean(w * x), x),
    optax.sgd(0.1),
    has_aux=True,
    num_microbatches=1,
    mesh=make_mesh(8),
  )
  w, x = np.float32(1), np.ones(16, np.float32)
  held = w, optax.sgd(0.1).init(w)
  assert step.eval_shape(*held, x[:8])[2]["aux"].shape == (1,)  # one row each
  with pytest.raises(ValueError, match=r"^aux has 2 rows, as many as a micro"):
    step.eval_shape(*held, x)


def test_what_has_another_role_is_not_refused():
  def fun(w, x, carry, key):
    noise = jax.vmap(jax.random.uniform)(key)
    return jnp.mean(x @ w) + jnp.mean(noise), (carry, None)

  step = make_train_step(fun, optax.identity(), num_microbatches=2, carry_argnum=2, rng_argnums=3)
  rows = np.ones(6, np.float32)
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 6))
  step.eval_shape(rows, (), np.ones((6, 6), np.float32), rows, keys)


def test_a_batch_of_one_row_has_nothing_to_split():
  step = make_train_step(
    lambda w, x, y: jnp.mean(w * x) + jnp.mean(y), optax.sgd(0.1), microbatch_size=4
  )
  w, x, y = (np.ones(shape, np.float32) for shape in ((), (1, 2), (1, 3)))
  assert float(step(w, optax.sgd(0.1).init(w), x, y)[-1]["loss"]) == 2


def test_microbatch_of_several_arguments_says_which_is_split():
  w, x = np.arange(4, dtype=np.float32), np.ones((4, 4), np.float32)

  def run(**options):
    run = microbatch(lambda w, x: x @ w, reduction="concat", num_microbatches=2, **options)
    return jax.jit(run)

  match = (
    r"batch_argnums=None splits the only argument, and this call has \[0, 'x'\], of which any may be"
    r" the batch: say which, e\.g\. batch_argnums=1 if argument 0 is the parameters"
  )
  with pytest.raises(ValueError, match=match):
    run()(w, x=x)
  np.testing.assert_array_equal(run(batch_argnums=1)(w, x), x @ w)
  only = microbatch(lambda x: 2 * x, reduction="concat", num_microbatches=2)
  np.testing.assert_array_equal(jax.jit(only)(x=x), 2 * x)


def dropout(w, x, key):
  mask = jax.random.bernoulli(key["dropout"], 0.5, x.shape)
  return jnp.mean(jnp.where(mask, x * w, 0)), mask


@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
def test_a_key_that_would_be_shared_is_refused(mesh):
  x, key, tx = np.ones((8, 16), np.float32), {"dropout": jax.random.key(0)}, optax.sgd(0.1)
  options = {"num_microbatches": 4, "has_aux": True, "aux_reduction": "stack"}
  match = (
    r"argument 2\['dropout'\] is a random key, from which every microbatch .*"
    r" rng_argnums=2; .* rng_argnums=\(\)"
  )

  def step_masks(*args, rng_argnums=None, **named):
    step = make_train_step(dropout, tx, mesh=mesh, donate=False, rng_argnums=rng_argnums, **options)
    return step(np.float32(1), tx.init(1.0), x, *args, **named)[2]["aux"]

  def cycle_masks(*args, rng_argnums=None, **named):
    run = microbatch_value_and_grad(dropout, rng_argnums=rng_argnums, **options)
    return jax.jit(run)(np.float32(1), x, *args, **named)[0][1]

  for masks in (step_masks,) if mesh else (step_masks, cycle_masks):
    with pytest.raises(ValueError, match=match):
      masks(key)
    own, shared = (np.asarray(masks(key, rng_argnums=argnums)) for argnums in (2, ()))
    assert (shared == shared[:1]).all()
    assert len({mask.tobytes() for mask in own}) == len(own)
    named = np.asarray(masks(key=key, rng_argnums="key"))
    np.testing.assert_array_equal(named, own)


def test_keys_that_microbatch_would_share_are_refused():
  def noise(x, *, key, other=None):
    return jax.random.uniform(key)

  options = {"reduction": "stack", "num_microbatches": 2, "batch_argnums": 0}
  run = lambda **more: jax.jit(microbatch(noise, **options, **more))  # noqa: E731
  key = jax.random.key(0)
  # The fix names those that are named already too.
  match = r"argument 'other'\['k'\] is a random key, .* arguments of their own.* rng_argnums=\(\"key\", \"other\"\); "
  with pytest.raises(ValueError, match=match):
    run(rng_argnums="key")(jnp.ones(4), key=key, other={"k": key})
  own = run(rng_argnums="key")(jnp.ones(4), key=key)
  shared = run(rng_argnums=())(jnp.ones(4), key=key, other=key)
  assert (len(set(own.tolist())), len(set(shared.tolist()))) == (2, 1)


def test_keys_that_are_split_or_carried_are_not_refused():
  keys, uniform = jax.random.split(jax.random.key(0), 4), jax.vmap(jax.random.uniform)
  draw = microbatch(uniform, reduction="concat", num_microbatches=2)
  np.testing.assert_array_equal(jax.jit(draw)(keys), jax.jit(uniform)(keys))

  def fun(w, x, key):
    key, used = jax.random.split(key)
    return jnp.mean(w * x), (key, jax.random.uniform(used))

  run = microbatch_value_and_grad(
    fun, num_microbatches=2, has_aux=True, carry_argnum=2, aux_reduction="stack"
  )
  (_, (_, noise)), _ = jax.jit(run)(np.float32(1), np.ones(4, np.float32), jax.random.key(0))
  assert noise[0] != noise[1]
