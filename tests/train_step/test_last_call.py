"""What the last call of a step returned is known in the next, and nothing else passes for it."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed

from optax_accum import make_train_step

TX = relaxed(optax.adam(0.1))
X = np.linspace(1, 2, 32, dtype=np.float32).reshape(16, 2)


def init_params():
  return {"w": jnp.arange(1.0, 3.0), "b": jnp.float32(0.5)}


def loss_fn(params, batch, offset):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - offset["a"]) ** 2)


def offset():
  return {"a": jnp.float32(3.0)}


def stepped(mesh, change):
  """Three steps; before the last, `change` puts something else in."""
  step = make_train_step(loss_fn, TX, num_microbatches=2, mesh=mesh)
  params, state, batch, other = (
    init_params(),
    TX.init(init_params()),
    {"x": X},
    offset(),
  )
  for i in range(3):
    if i == 2:
      params, state, batch, other = change(params, state, batch, other)
    params, state, metrics = step(params, state, batch, other)
  return jax.device_get((params, state, metrics))


def one_parameter(params, state, batch, other):
  return params | {"w": jnp.ones(2)}, state, batch, other


def in_place(params, state, batch, other):
  params["w"] = np.ones(2, np.float32)
  return params, state, batch, other


def the_batch_alone(params, state, batch, other):
  return params, state, {"x": 2 * X}, other


def swapped(params, state, batch, other):
  adam = state[0]
  return (
    params,
    (adam._replace(mu=adam.nu, nu=adam.mu), *state[1:]),
    batch,
    other,
  )


CHANGES = [
  one_parameter,
  in_place,
  the_batch_alone,
  swapped,
]


@functools.cache
def unchanged():
  """Where three steps on one device end."""
  return stepped(None, lambda *args: args)


# By turns over automatic and explicit axes.
@pytest.mark.parametrize(
  ("change", "kind"),
  [(x, (AUTO, EXPLICIT)[i % 2]) for i, x in enumerate(CHANGES)],
)
def test_what_is_put_in_is_looked_at(change, kind):
  alone = stepped(None, change)
  trees.assert_close(stepped(make_mesh(8, kind=kind), change), alone, 1e-5)
  assert trees.largest_difference(alone[0], unchanged()[0]) > 1e-4


def test_the_same_arrays_in_another_tree_are_looked_at():
  mesh = make_mesh(8)
  step = make_train_step(
    lambda p, x: jnp.mean(x) * sum(map(jnp.sum, jax.tree.leaves(p))),
    optax.sgd(0.1),
    num_microbatches=2,
    mesh=mesh,
  )
  params, state, _ = step(
    {"b": jnp.ones(2), "w": jnp.ones(3)}, optax.sgd(0.1).init({}), X
  )
  moved, _, _ = step([params["b"], params["w"]], state, X)
  assert isinstance(moved, list)
  assert [x.shape for x in moved] == [(2,), (3,)]


def test_what_was_returned_and_then_deleted_elsewhere_is_named():
  """On several devices a call would end the process, in JAX 0.10."""
  mesh = make_mesh(8)
  params, other = devices.put((init_params(), offset()), mesh)
  state, batch = (
    devices.put(TX.init(params), mesh),
    {"x": devices.put(X, mesh, P("data"))},
  )
  step = make_train_step(loss_fn, TX, num_microbatches=2)
  params, state, _ = step(params, state, batch, other)
  jax.block_until_ready(jax.jit(lambda x: 2 * x, donate_argnums=0)(params["w"]))
  with pytest.raises(RuntimeError, match=r"params\['w'\] has been deleted"):
    step(params, state, batch, other)


def test_parameters_and_state_may_be_without_arrays():
  step = make_train_step(
    lambda params, x: jnp.mean(x), optax.sgd(0.1), num_microbatches=2
  )
  for _ in range(2):
    params, _, metrics = step({}, optax.sgd(0.1).init({}), X)
    assert (params, float(metrics["loss"])) == ({}, 1.5)


def test_arguments_that_change_places_after_a_call_are_refused():
  tx = optax.sgd(0.1)  # whose state has no leaves
  step = make_train_step(loss_fn, tx, num_microbatches=2)
  params, state, _ = step(init_params(), tx.init({}), {"x": X}, offset())
  with pytest.raises(
    TypeError, match="is in the place of the parameters: the order is"
  ):
    step(state, params, {"x": X}, offset())


def test_a_call_that_failed_or_was_only_lowered_is_not_the_last():
  mesh = make_mesh(8, kind=EXPLICIT)
  step = make_train_step(loss_fn, TX, num_microbatches=2, mesh=mesh)
  args = {"x": X}, offset()
  params, state, _ = step(init_params(), TX.init(init_params()), *args)
  sharded = devices.put(init_params(), mesh, {"w": P(), "b": P()})
  step.lower(sharded, TX.init(sharded), *args)
  with pytest.raises(ValueError, match="rows"):
    step(params, state, {"x": X[:3]}, offset())
  alone = make_train_step(loss_fn, TX, num_microbatches=2)
  expected = alone(
    *alone(init_params(), TX.init(init_params()), *args)[:2], *args
  )
  trees.assert_close(
    jax.device_get(step(params, state, *args)), jax.device_get(expected), 1e-5
  )
