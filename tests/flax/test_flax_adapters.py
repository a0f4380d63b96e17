"""Adapters beside frozen parameters: they alone have gradients, accumulators and moments."""

from typing import Any

from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.compiled import temp_bytes
from support.devices import make_mesh

from optax_accum import accumulate
import optax_accum.flax
from optax_accum.flax import linen_train_step

WIDTH, RANK, ROWS = 128, 2, 16

pytestmark = pytest.mark.usefixtures("usual_promotion")  # flax relies on it


class LoraState(train_state.TrainState):
  base: Any


def make_base():
  return {"kernel": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / WIDTH**0.5}


def make_adapters():
  a = jax.random.normal(jax.random.key(1), (WIDTH, RANK)) / WIDTH**0.5
  return {"a": a, "b": jnp.zeros((RANK, WIDTH))}


def apply(base, adapters, batch):
  x = batch["x"]
  out = x @ base["kernel"] + x @ adapters["a"] @ adapters["b"]
  return jnp.mean((jnp.tanh(out) - batch["y"]) ** 2)


def make_batch():
  x, y = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
  return {"x": x, "y": y}


def of_field(variables, batch, rngs):
  return apply(variables["base"], variables["params"], batch)


def of_params(variables, batch, rngs):
  return apply(variables["params"]["base"], variables["params"]["adapters"], batch)


def size(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


FROZEN = {"adapters": "train", "base": "freeze"}


def partitioned(tx):
  return optax.partition({"train": tx, "freeze": optax.set_to_zero()}, FROZEN)


@pytest.mark.parametrize("mesh", [None, make_mesh(8)], ids=["alone", "mesh"])
def test_a_base_in_a_field_has_no_gradient_and_is_stepped_by_none(mesh):
  base, adapters, batch = make_base(), make_adapters(), make_batch()
  tx = optax.adam(0.01)

  def make():
    return LoraState.create(apply_fn=None, params=make_adapters(), base=base, tx=tx)

  assert size(make().opt_state) == 2 * size(adapters) + 4
  step = linen_train_step(of_field, num_microbatches=2, mesh=mesh)
  state = make()
  for _ in range(2):
    state, _ = step(state, batch)
  whole = train_state.TrainState.create(apply_fn=None, params=adapters, tx=tx)

  @jax.jit
  def whole_step(state):
    grads = jax.grad(lambda p: apply(base, p, batch))(state.params)
    return state.apply_gradients(grads=grads)

  for _ in range(2):
    whole = whole_step(whole)
  trees.assert_close(jax.device_get(state.params), whole.params, 1e-4)
  trees.assert_close(jax.device_get(state.base), jax.device_get(base), 0)


def test_the_accumulator_of_a_scan_is_that_of_the_adapters():
  base, adapters, batch = make_base(), make_adapters(), make_batch()
  tx = optax.adam(0.01)
  step = linen_train_step(of_field, num_microbatches=4)
  ours = temp_bytes(step, LoraState.create(apply_fn=None, params=adapters, base=base, tx=tx), batch)
  # A partition of the parameters saves moments alone: the gradients of all are added up.
  params = {"adapters": make_adapters(), "base": make_base()}
  state = train_state.TrainState.create(apply_fn=None, params=params, tx=partitioned(tx))
  assert size(state.opt_state) == 2 * size(adapters) + 4
  step = linen_train_step(of_params, num_microbatches=4)
  assert temp_bytes(step, state, batch) > size(base) > ours


@pytest.mark.parametrize("how", ["partition", "masked"])
def test_the_accumulator_of_a_stream_is_that_of_the_adapters(how):
  base, adapters, batch = make_base(), make_adapters(), make_batch()
  tx = optax.adam(0.01)
  mask, frozen = {"adapters": True, "base": False}, {"adapters": False, "base": True}
  params = {"adapters": adapters, "base": base}
  if how == "partition":
    inside, outside = partitioned(accumulate(tx, 2)), accumulate(partitioned(tx), 2)
  else:
    zero = optax.masked(optax.set_to_zero(), frozen)
    inside = optax.chain(optax.masked(accumulate(tx, 2), mask), zero)
    outside = accumulate(optax.chain(optax.masked(tx, mask), zero), 2)
  results = []
  for transform in (inside, outside):
    state = optax_accum.flax.TrainState.create(apply_fn=None, params=params, tx=transform)
    accumulated = size(optax.tree.get(state.opt_state, "acc_grads"))
    assert accumulated == size(params if transform is outside else adapters)

    @jax.jit
    def mini_step(state, part):
      grads = jax.grad(lambda p: apply(p["base"], p["adapters"], part))(state.params)
      return state.apply_gradients(grads=grads, weight=len(part["x"]))

    for part in trees.strided(batch, 2):
      state = mini_step(state, part)
    assert int(state.gradient_step) == 1
    trees.assert_close(state.params["base"], base, 0)
    results.append(state.params["adapters"])
  trees.assert_close(*results, 1e-6)
  grads = jax.grad(lambda p: apply(base, p, batch))(adapters)
  expected = train_state.TrainState.create(apply_fn=None, params=adapters, tx=tx)
  trees.assert_close(results[0], expected.apply_gradients(grads=grads).params, 1e-4)
