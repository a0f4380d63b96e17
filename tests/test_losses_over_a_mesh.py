"""Losses with constants of their own, over a mesh: the step is one device's whole batch's."""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, mesh_zoo, oracle, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.mesh_zoo import ZOO

from optax_accum import _versions, make_train_step

TX = optax.sgd(1.0)
TOLERANCE = 1e-12
# What iterates until it is near enough, in as many steps as the rows that it gets together need.
ROUNDED = {"odeint": 1e-8, "conjugate gradients": 1e-10}


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


@contextlib.contextmanager
def promotion_of(specimen):
  with contextlib.ExitStack() as stack:
    if specimen.usual_promotion:
      stack.enter_context(jax.numpy_dtype_promotion("standard"))
      stack.enter_context(jax.numpy_rank_promotion("allow"))
    yield


def gradient_and_loss(step, params, batch):
  """What a step of size 1 goes along."""
  new, _, metrics = step(params, TX.init(params), batch)
  gradient = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, new)
  return gradient, np.asarray(metrics["loss"])


def whole_batch(specimen):
  """Gradient and loss on one device, where padding counts not at all, a little, and in full."""
  params, batch = specimen.params(), mesh_zoo.make_batch()
  step = oracle.whole_batch_step(mesh_zoo.loss_of(specimen.each), TX)
  masks = batch, mesh_zoo.partly_valid(batch), mesh_zoo.all_valid(batch)
  return [gradient_and_loss(step, params, rows) for rows in masks]


@pytest.mark.parametrize("name", ZOO)
def test_a_loss_over_eight_devices_is_the_whole_batchs(name):
  specimen, mesh = ZOO[name], make_mesh(8)
  with promotion_of(specimen):
    params, batch = specimen.params(), mesh_zoo.make_batch()
    loss_fn, tolerance = mesh_zoo.loss_of(specimen.each), ROUNDED.get(name, TOLERANCE)
    of_valid, of_some, of_all = whole_batch(specimen)
    assert trees.largest_difference(of_valid, of_all) > 1e-3

    options = {"mesh": mesh, "num_microbatches": 2, "donate": False}
    weighs = make_train_step(loss_fn, TX, weight_fn=mesh_zoo.valid_rows, **options)
    trees.assert_close(gradient_and_loss(weighs, params, batch), of_valid, tolerance)

    # The mean of means is exact only where all count the same.
    plain = make_train_step(loss_fn, TX, **options)
    rows = mesh_zoo.all_valid(batch)
    trees.assert_close(gradient_and_loss(plain, params, rows), of_all, tolerance)
    wrong = gradient_and_loss(plain, params, mesh_zoo.partly_valid(batch))
    for part, whole in zip(wrong, of_some, strict=True):
      assert trees.largest_difference(part, whole) > 1e-3


FSDP = {"w": P("data"), "u": P(None, "data"), "b": P("data"), "v": P()}
TENSOR = {"w": P(None, "model"), "u": P("model"), "b": P(), "v": P("model")}
# A mesh, how parameters and the momentum are sharded, and options.
PLACES = {
  "one device": ((1,), AUTO, P(), P(), {"num_microbatches": 2}),
  "explicit": ((8,), EXPLICIT, P(), P(), {"num_microbatches": 4}),
  "ragged": ((8,), AUTO, P(), P(), {"microbatch_size": 24, "skip_nonfinite": True}),
  "automatic axis": ((4, 2), AUTO, TENSOR, TENSOR, {"num_microbatches": 4}),
  "FSDP": ((8,), AUTO, FSDP, FSDP, {"num_microbatches": 2}),
  "FSDP in the loop": (
    *((8,), AUTO, FSDP, FSDP),
    {"num_microbatches": 2, "reduce_gradients": "per_microbatch"},
  ),
  "ZeRO-1": ((8,), AUTO, P(), FSDP, {"microbatch_size": 24}),
}
if _versions.ADDS_TO_REFERENCES:
  PLACES["in place"] = (8,), AUTO, P(), P(), {"num_microbatches": 2, "in_place": True}
LOSSES = ("scan from zeros", "while_loop", "cond with a constant", "custom_vjp of zeros")
LOSSES += ("gradient penalty", "Pallas kernel", "checkpointed scan", "Equinox, bounded while")
MOMENTUM = optax.sgd(1.0, momentum=0.9)


@functools.cache
def momentum_of(name):
  """Parameters, momentum and loss after two steps of the whole batch on one device."""
  with promotion_of(ZOO[name]):
    step = oracle.whole_batch_step(mesh_zoo.loss_of(ZOO[name].each), MOMENTUM)
    params = jax.tree.map(jnp.asarray, mesh_zoo.plain_params())
    return oracle.take_steps(step, MOMENTUM, params, [mesh_zoo.make_batch()] * 2)


@pytest.mark.parametrize(("place", "name"), [*zip(PLACES, LOSSES, strict=False)])
def test_where_parameters_are_and_how_the_step_runs(place, name):
  shape, kind, held, state, options = PLACES[place]
  mesh = make_mesh(*shape, kind=kind)
  with promotion_of(ZOO[name]):
    step = make_train_step(
      mesh_zoo.loss_of(ZOO[name].each),
      MOMENTUM,
      weight_fn=mesh_zoo.valid_rows,
      mesh=mesh,
      donate=False,
      **options,
    )
    params = devices.put(mesh_zoo.plain_params(), mesh, held)
    momentum, rest = MOMENTUM.init(mesh_zoo.plain_params())
    opt_state = devices.put(momentum, mesh, optax.TraceState(trace=state)), rest
    for _ in range(2):
      params, opt_state, metrics = step(params, opt_state, mesh_zoo.make_batch())
    actual = jax.device_get((params, opt_state, metrics["loss"]))
    trees.assert_close(actual, momentum_of(name), 10 * TOLERANCE)
