"""What a line search is given: the same objective at other parameters, and its derivative."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import devices, oracle
from support.devices import make_mesh
from support.optimizers import relaxed
from support.samples import more

import optax_accum

PADDED = {"microbatch_size": 3, "weight_fn": lambda batch: jnp.sum(batch["valid"])}


def data(rows=16, dtype=np.float32):
  rng = np.random.default_rng(0)
  # the last microbatch is padding
  valid = np.r_[np.ones(rows - 4), np.zeros(4)].astype(dtype)
  x, y = rng.normal(size=(rows, 4)).astype(dtype), rng.normal(size=rows).astype(dtype)
  return {"x": x, "y": y, "valid": valid}


def params(dtype=np.float32):
  return {"w": jnp.arange(1.0, 5.0, dtype=dtype), "b": jnp.ones((), dtype)}


def loss_fn(params, batch):
  errors = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
  return jnp.sum(batch["valid"] * errors) / jnp.sum(batch["valid"])


def recorded(inspect):
  """A transformation whose state is what `inspect(value_fn, params)` returns."""

  def update(updates, state, params, *, value_fn, **extra_args):
    return jax.tree.map(jnp.zeros_like, updates), inspect(value_fn, params)

  return optax.GradientTransformationExtraArgs(
    jax.jit(lambda params: inspect(lambda p: loss_fn(p, data()), params)), update
  )


def padded_steps(step):
  """The parameters after four steps of L-BFGS in float64."""
  batch, start = data(dtype=np.float64), params(np.float64)
  return oracle.take_steps(step, relaxed(optax.lbfgs()), start, [batch] * 4)[0]


@functools.cache
def whole_padded_steps():
  with jax.enable_x64(True):
    batch, start = data(dtype=np.float64), params(np.float64)
    stepped = padded_steps(oracle.whole_batch_step(loss_fn, relaxed(optax.lbfgs())))
    assert abs(stepped["b"] - start["b"]) > 0.1
    without = optax_accum.microbatch_value_and_grad(loss_fn, microbatch_size=3)
    # padding that is weighed by its rows
    assert np.isnan(jax.jit(without)(start, batch)[0])
    return stepped


@pytest.mark.more
def test_lbfgs_on_padding_takes_the_steps_of_the_whole_batch():
  with jax.enable_x64(True):
    step = optax_accum.make_train_step(
      loss_fn,
      relaxed(optax.lbfgs()),
      microbatch_size=6,
      weight_fn=PADDED["weight_fn"],
      donate=False,
      mesh=make_mesh(2, kind=devices.EXPLICIT),
    )
    chex.assert_trees_all_close(padded_steps(step), whole_padded_steps(), rtol=1e-7)


@pytest.mark.parametrize("mesh_size", [more(None), 4])
def test_the_derivatives_of_the_value_are_the_gradient(mesh_size):
  def inspect(value_fn, params):
    tangent = jax.tree.map(jnp.ones_like, params)
    return {
      "value": value_fn(params),
      "reverse": jax.grad(value_fn)(params),
      "forward": jax.jvp(value_fn, (params,), (tangent,))[1],
    }

  batch, tx = data(), recorded(inspect)
  mesh = None if mesh_size is None else make_mesh(mesh_size)
  options = {**PADDED, "microbatch_size": 4, "donate": False, "mesh": mesh}
  step = optax_accum.make_train_step(loss_fn, tx, **options)
  _, seen, _ = step(params(), tx.init(params()), batch)
  value, grad = jax.jit(jax.value_and_grad(loss_fn))(params(), batch)
  np.testing.assert_allclose(seen["value"], value, rtol=1e-6)
  chex.assert_trees_all_close(jax.device_get(seen["reverse"]), grad, rtol=1e-5)
  np.testing.assert_allclose(seen["forward"], sum(map(jnp.sum, jax.tree.leaves(grad))), rtol=1e-5)


def test_a_line_search_does_not_leave_out_what_diverges():
  def barrier(p, x):  # infinite at p = 1, and NaN beyond
    return jnp.mean(-jnp.log(1 - p * x) - 3 * p * x) + 5

  search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=20)
  tx, x, paths = optax.chain(optax.sgd(4.0), search), jnp.ones(8), []
  options = {"microbatch_size": 6, "mesh": make_mesh(2), "donate": False}
  for skip in (False, True):
    step = optax_accum.make_train_step(barrier, tx, skip_nonfinite=skip, **options)
    paths.append(oracle.take_steps(step, tx, jnp.float32(0.0), [x] * 3)[0])
  assert paths[0] == paths[1] < 1


@pytest.mark.parametrize("has_weight", [False, True])
def test_a_microbatch_that_is_skipped_at_the_present_parameters_is_left_out_of_the_search(
  has_weight,
):
  x = np.ones(9, np.float32)
  x[[2, 6]] = np.nan  # all of microbatch 2 of 4 and a smaller one

  def loss_fn(p, x):
    errors = (p * x - 3) ** 2
    return (jnp.sum(errors), len(x)) if has_weight else jnp.mean(errors)

  def update(updates, state, params, *, value_fn, **extra_args):
    return jnp.zeros_like(updates), jax.value_and_grad(value_fn)(jnp.float32(2.0))

  tx = optax.GradientTransformationExtraArgs(lambda p: (p, p), update)
  step = optax_accum.make_train_step(
    loss_fn, tx, microbatch_size=2, donate=False, skip_nonfinite=True, has_weight=has_weight
  )
  start = jnp.float32(0.0)
  _, seen, metrics = step(start, tx.init(start), x)
  # by a reciprocal, which rounds once
  assert (float(seen[0]), float(seen[1])) == pytest.approx((1.0, -2.0), rel=1e-6)
  assert int(metrics["skipped_microbatches"]) == 1
