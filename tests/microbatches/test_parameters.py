"""Objects that hold more than parameters are refused, with what to pass instead."""

import equinox as eqx
from flax import linen, nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh

from optax_accum import accumulate, make_train_step, microbatch_value_and_grad

TX = optax.sgd(0.1)
X = jnp.arange(12.0).reshape(4, 3)


class Noisy(nnx.Module):
  def __init__(self):
    self.linear, self.dropout = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)
    self.rngs = nnx.Rngs(0)


def linen_state():
  model = linen.Dense(2)
  params = model.init(jax.random.key(0), X)
  return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def mlp():
  return eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))


REFUSED = [
  (linen_state, r"argument 0\.step has .* cannot be differentiated: "),
  (Noisy, r"argument 0\.rngs.* has .* cannot be differentiated: "),
  (mlp, r"activation has type .* cannot be differentiated: .* eqx.partition\(model, eqx.is_inexact"),
  (lambda: {"a": True, "b": 1.0}, r"argument 0\['a'\] has type bool and cannot be diff"),
  (lambda: {"a": np.int8(1), "b": 1.0}, r"argument 0\['a'\] has dtype int8 and cannot be diff"),
  (lambda: {"a": "w", "b": 1.0}, r"argument 0\['a'\] has type str and cannot be diff"),
]  # fmt: skip
refused = pytest.mark.parametrize(("make", "match"), REFUSED)


@refused
@pytest.mark.parametrize(("mesh", "donate"), [(None, True), (make_mesh(2), False)], ids=["alone", "mesh"])  # fmt: skip
def test_a_step_refuses_objects_that_hold_more_than_parameters(make, match, mesh, donate):
  step = make_train_step(lambda p, x: jnp.mean(x), TX, num_microbatches=2, mesh=mesh, donate=donate)
  model = make()
  for call in (step, step.eval_shape):
    with pytest.raises(TypeError, match=match):
      call(model, (), X)
  with pytest.raises(TypeError, match=match):
    step(model, X)  # as a step of a TrainState is called


@refused
def test_gradients_are_refused_where_a_leaf_has_none(make, match):
  run = microbatch_value_and_grad(lambda p, x: jnp.mean(x), num_microbatches=2)
  with pytest.raises(TypeError, match=match):
    run(make(), X)


def linear_loss(params, x):
  return jnp.mean(x @ params["w"])


PARAMS = {"w": jnp.ones(3)}
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def test_a_call_without_a_state_or_a_batch_is_refused():
  step = make_train_step(linear_loss, TX, num_microbatches=2)
  match = r"got 2 arguments.*order is step\(params, opt_state, batch\), and finish\(.*cycle"
  for call in (step, step.finish):
    for second in (X, TX.init(PARAMS)):
      with pytest.raises(TypeError, match=match):
        call(PARAMS, second)


@pytest.mark.parametrize(
  ("tx", "mesh"),
  [(TX, None), (MOMENTUM, make_mesh(2)), (accumulate(TX, 2), None)],
  ids=["sgd", "momentum", "acc"],
)
def test_parameters_and_a_state_in_each_others_place_are_refused(tx, mesh):
  step = make_train_step(linear_loss, tx, num_microbatches=2, mesh=mesh, donate=False)
  state = tx.init(PARAMS)
  with pytest.raises(TypeError, match="the order is"):
    step(state, PARAMS, X)
  step(PARAMS, state, X)


@pytest.mark.parametrize("mesh", [None, make_mesh(2)], ids=["alone", "mesh"])
def test_parameters_that_an_earlier_step_was_donated_are_named(mesh):
  params = jax.tree.map(jnp.copy, PARAMS)
  step = make_train_step(linear_loss, TX, num_microbatches=2, mesh=mesh)
  params, state, _ = step(params, TX.init(params), X)
  step(params, state, X)
  message = r"\['w'\] has been deleted: .* Use what that step returned, or make"
  # over a mesh, XLA would end the process
  with pytest.raises(RuntimeError, match=message):
    step(params, state, X)
  step = make_train_step(linear_loss, TX, num_microbatches=2, mesh=mesh, donate=False)
  gone = X.copy()
  gone.delete()
  with pytest.raises(RuntimeError, match="has been deleted"):
    step(PARAMS, TX.init(PARAMS), gone)
