"""docs/sharp_edges.md is true, of what JAX and Optax do and no other test asserts."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from support.pages import DOCS

import optax_accum

PAGE = " ".join((DOCS / "sharp_edges.md").read_text().split())

pytestmark = pytest.mark.usefixtures("usual_promotion")


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)


def start():
  return {"w": jnp.zeros(4), "b": jnp.zeros(())}, jax.random.normal(jax.random.key(0), (64, 4))


@pytest.mark.parametrize("explicit", [True, False])
def test_eager_arithmetic_after_a_step_over_a_mesh(explicit):
  kinds = jax.sharding.AxisType
  axes = (kinds.Explicit if explicit else kinds.Auto,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=axes)
  params, batch = start()
  tx = optax.adam(0.1)
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=4, mesh=mesh)
  params, *_ = step(params, tx.init(params), batch)
  assert jax.jit(optax.tree.norm)(params) > 0
  if not explicit:
    assert optax.tree.norm(params) > 0
    return
  (message,) = re.findall("ValueError: (Length of device assignment[^`]*)`", PAGE)
  with pytest.raises(ValueError, match=re.escape(message)):
    optax.tree.norm(params)


def test_stepped_is_that_of_the_part_that_accumulates():
  parts = {"slow": optax_accum.accumulate(optax.sgd(0.1), 2), "fast": optax.sgd(0.1)}
  tx = optax.partition(parts, {"w": "slow", "b": "fast"})
  params, batch = start()
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=4, donate=False)
  moved, state, metrics = step(params, tx.init(params), batch)
  assert not metrics["stepped"]
  assert moved["b"] != params["b"]
  assert jnp.array_equal(moved["w"], params["w"])
  assert step(moved, state, batch)[2]["stepped"]
