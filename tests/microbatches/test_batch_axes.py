"""Rows on any axis, another in each argument; and the axis of an output that "concat" joins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import devices, trees
from support.devices import AUTO, EXPLICIT, make_mesh

from optax_accum import make_train_step, microbatch, microbatch_value_and_grad

in_64_bits = functools.partial(jax.enable_x64, True)
# Those of optax.microbatching's own tests of `in_axes`, and ours. ("concat" is of rows here.)
KINDS = {kind: kind for kind in ("sum", "mean", "max", "last", "stack")}


def for_each_kind(subscripts, a, b):
  return dict.fromkeys(KINDS, jnp.einsum(subscripts, a, b))


def test_rows_on_another_axis_give_the_same():
  rows_first = np.random.default_rng(0).normal(size=(10, 4, 5))
  rows_second = np.swapaxes(rows_first, 0, 1)

  def run(subscripts, x, axis):
    fun = functools.partial(for_each_kind, subscripts)
    options = {
      "microbatch_size": 2,
      "batch_argnums": (0, 1),
      "batch_axis": axis,
    }
    return jax.jit(microbatch(fun, reduction=KINDS, **options))(x, x)

  with in_64_bits():
    first = run("bij,bkj->ik", rows_first, 0)
    for axis in (1, -2, (1, 1), (-2, 1)):
      trees.assert_close(run("ibj,kbj->ik", rows_second, axis), first, 1e-12)
    whole = np.einsum("bij,bkj->ik", rows_first, rows_first)
    np.testing.assert_allclose(
      first["sum"], whole, rtol=0, atol=1e-12 * whole.max()
    )


def test_an_axis_for_each_argument_positions_first_and_then_names():
  x = np.random.default_rng(0).normal(size=(10, 4, 5))
  y = np.swapaxes(x, 0, 1)
  fun = functools.partial(for_each_kind, "bij,kbj->ik")

  def in_order(a, b):
    return fun(a, b)

  def run(*args, options, **kwargs):
    split = microbatch(in_order, microbatch_size=2, reduction=KINDS, **options)
    return jax.jit(split)(*args, **kwargs)

  with in_64_bits():
    expected = run(
      x, y, options={"batch_argnums": (0, 1), "batch_axis": (0, 1)}
    )
    whole = np.einsum("bij,kbj->ik", x, y)
    np.testing.assert_allclose(
      expected["sum"], whole, rtol=0, atol=1e-12 * whole.max()
    )
    by_name = {
      "batch_argnums": (),
      "batch_argnames": ("a", "b"),
      "batch_axis": (0, 1),
    }
    back = {
      "batch_argnums": (),
      "batch_argnames": ("b", "a"),
      "batch_axis": (1, 0),
    }
    for options, args, kwargs in [
      ({"batch_argnums": (1, 0), "batch_axis": (1, 0)}, (x, y), {}),
      (by_name, (), {"a": x, "b": y}),
      (by_name, (), {"b": y, "a": x}),
      (by_name, (x, y), {}),
      (back, (), {"a": x, "b": y}),
      (back, (), {"b": y, "a": x}),
      (
        {"batch_argnums": 0, "batch_argnames": "b", "batch_axis": (0, 1)},
        (x,),
        {"b": y},
      ),
      (
        {"batch_argnames": ("a", "b"), "batch_axis": (0, 1)},
        (),
        {"a": x, "b": y},
      ),
    ]:
      trees.assert_close(run(*args, options=options, **kwargs), expected, 1e-12)


def test_positions_and_names_are_the_same_arguments():
  def fun(a, b, c, *, d, e, f):
    return jnp.sum(a + b + jnp.asarray(c + d + e + f, a.dtype))

  x, named = jnp.arange(16.0), {"d": 2, "e": 3, "f": 4}
  run = functools.partial(microbatch, fun, reduction="sum", microbatch_size=2)
  expected = fun(x, x, 1, **named)
  assert run(batch_argnums=(0, 1))(x, x, 1, **named) == expected
  assert (
    run(batch_argnums=0, batch_argnames="b")(x, b=x, c=1, **named) == expected
  )
  assert (
    run(batch_argnums=(), batch_argnames=("b", "a"))(a=x, b=x, c=1, **named)
    == expected
  )


def time_major_loss(w, x, y, *, mask):
  """Of x (time, rows, 3), y (rows, time) and mask (rows,)."""
  error = (jnp.einsum("tbi,i->bt", x, w) - y) ** 2
  loss = jnp.sum(jnp.mean(error, 1) * mask) / jnp.sum(mask)
  return loss, {"error": error, "worst": jnp.max(error)}


def time_major_batch(rows, time=4):
  rng = np.random.default_rng(1)
  shapes = (time, rows, 3), (rows, time), (rows,)
  x, y, mask = (rng.normal(size=shape) for shape in shapes)
  return rng.normal(size=3), x, y, (mask > 0) + 0.5


AXES = {
  "batch_argnums": (1, 2),
  "batch_argnames": "mask",
  "batch_axis": (1, 0, 0),
}
WEIGHED = {"weight_fn": lambda x, y, *, mask: jnp.sum(mask), "has_aux": True}


@functools.cache
def whole_time_major(rows):
  """The loss, what is beside it and the gradients of a batch of so many rows."""
  with in_64_bits():
    w, x, y, mask = time_major_batch(rows)
    whole = jax.jit(jax.value_and_grad(time_major_loss, has_aux=True))
    return jax.device_get(whole(w, x, y, mask=mask))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_argument_may_have_an_axis_of_its_own(size):
  with in_64_bits():
    w, x, y, mask = time_major_batch(8)
    run = microbatch_value_and_grad(
      time_major_loss,
      aux_reduction={"error": "concat", "worst": "max"},
      microbatch_size=size,
      **AXES,
      **WEIGHED,
    )
    whole = whole_time_major(8)
    (loss, new), grads = jax.jit(run)(w, x, y, mask=mask)
    np.testing.assert_allclose(loss, whole[0][0], rtol=1e-12)
    np.testing.assert_allclose(grads, whole[1], rtol=1e-12)
    np.testing.assert_allclose(new["error"], whole[0][1]["error"], rtol=1e-12)


@pytest.mark.parametrize(
  ("kind", "size"), [(AUTO, 8), (EXPLICIT, 16), (AUTO, 24), (EXPLICIT, 24)]
)
def test_over_a_mesh_each_argument_may_have_an_axis_of_its_own(kind, size):
  with in_64_bits():
    w, x, y, mask = map(jnp.asarray, time_major_batch(32))
    tx = optax.sgd(1.0)
    step = make_train_step(
      time_major_loss,
      tx,
      mesh=make_mesh(8, kind=kind),
      microbatch_size=size,
      donate=False,
      aux_reduction={"error": "concat", "worst": "max"},
      **AXES,
      **WEIGHED,
    )
    new, _, metrics = step(w, tx.init(w), x, y, mask=mask)
    (loss, aux), grads = whole_time_major(32)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
    np.testing.assert_allclose(new, w - grads, rtol=1e-12)
    np.testing.assert_allclose(
      metrics["aux"]["error"], aux["error"], rtol=1e-12
    )


def test_microbatches_follow_an_explicit_sharding_of_the_axis_of_rows_alone():
  run = microbatch_value_and_grad(
    lambda w, x: jnp.mean(w * x),
    microbatch_size=3,
    batch_axis=1,
    batch_argnums=1,
  )
  mesh, x = make_mesh(2, kind=EXPLICIT), np.ones((4, 6), np.float32)
  with pytest.raises(
    ValueError, match=r"6 rows are sharded over 2 devices.* of 3 rows cannot"
  ):
    jax.jit(run).eval_shape(
      jnp.float32(1), devices.put(x, mesh, jax.P(None, "data"))
    )
  jax.jit(run).eval_shape(jnp.float32(1), devices.put(x, mesh, jax.P("data")))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_joins_the_first_axis_in_the_order_of_the_batch(axis):
  cases = [(8, 2), (7, 4), (8, 8)]
  rows_first = lambda x: jnp.moveaxis(2 * x, axis, 0)  # noqa: E731

  @jax.jit  # one program for all
  def every(batches):
    options = {"reduction": "concat", "batch_axis": axis}
    sizes = [size for _, size in cases]
    runs = [
      microbatch(rows_first, microbatch_size=size, **options) for size in sizes
    ]
    return [run(x) for run, x in zip(runs, batches, strict=True)]

  def batch(rows):
    shape = [3, 4, 5]
    shape[axis] = rows
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)

  batches = [batch(rows) for rows, _ in cases]
  for actual, x in zip(every(batches), batches, strict=True):
    np.testing.assert_array_equal(actual, np.moveaxis(2 * x, axis, 0))


def test_concat_refuses_what_has_no_rows_first():
  run = microbatch(
    lambda x: {"y": x}, reduction="concat", batch_axis=1, num_microbatches=2
  )
  match = r"output\['y'\] has shape \(3, 4\); .* the 4 rows .* as its leading axis: .*jnp.moveaxis"
  with pytest.raises(ValueError, match=match):
    run(jnp.ones((3, 8)))


def plain_loss(w, x, y=0.0):
  return jnp.mean(w * x) + jnp.mean(y), x


MAKERS = pytest.mark.parametrize(
  "make",
  [
    functools.partial(microbatch, plain_loss, num_microbatches=2),
    functools.partial(
      microbatch_value_and_grad, plain_loss, has_aux=True, num_microbatches=2
    ),
    functools.partial(
      make_train_step,
      plain_loss,
      optax.sgd(0.1),
      has_aux=True,
      num_microbatches=2,
    ),
  ],
  ids=["microbatch", "microbatch_value_and_grad", "make_train_step"],
)


@MAKERS
@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    (
      {"batch_argnums": (1, 2), "batch_axis": (0,)},
      ValueError,
      r"\(0,\) has 1 axes for 2 batch",
    ),
    (
      {"batch_argnums": 1, "batch_axis": (0, 1)},
      ValueError,
      r"\(0, 1\) has 2 axes for 1 batch",
    ),
    (
      {"batch_argnums": 1, "batch_argnames": "y", "batch_axis": (0, 1, 0)},
      ValueError,
      r"has 3 axes for 2 batch arguments \(1, 'y'\): give one for .* by jnp\.moveaxis, and back",
    ),
    (
      {"batch_argnums": 1, "batch_axis": ()},
      ValueError,
      "has 0 axes for 1 batch",
    ),
    (
      {"batch_argnums": 1, "batch_axis": (0.0,)},
      TypeError,
      "must be an int, or one for each",
    ),
    (
      {"batch_argnums": 1, "batch_axis": True},
      TypeError,
      "batch_axis=True must be an int",
    ),
    (
      {"concat_axis": 1},
      TypeError,
      r"joins the first axis of an output.* by jnp\.moveaxis",
    ),
    ({"unroll": 2}, TypeError, "unroll= is gone"),
  ],
)
def test_axes_that_cannot_be_are_refused(make, options, error, match):
  reduction = "reduction" if make.func is microbatch else "aux_reduction"
  with pytest.raises(error, match=match):
    make(**{reduction: "last"}, **options)
