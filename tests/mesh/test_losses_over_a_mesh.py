"""Losses with constants of their own, over a mesh: the step is one device's whole batch's."""

import contextlib
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, mesh_zoo, oracle, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.mesh_zoo import ZOO
from support.samples import more

from optax_accum import _versions, make_train_step

TX = optax.sgd(1.0)
TOLERANCE = 1e-12
# What iterates until it is near enough, in as many steps as the rows that it gets together need.
ROUNDED = {"odeint": 1e-8}


pytestmark = pytest.mark.usefixtures("x64")


@contextlib.contextmanager
def promotion(usual):
  """That of JAX as it comes, for the libraries that need it."""
  with contextlib.ExitStack() as stack:
    if usual:
      stack.enter_context(jax.numpy_dtype_promotion("standard"))
      stack.enter_context(jax.numpy_rank_promotion("allow"))
    yield


def gradient_and_loss(step, params, batch):
  """What a step of size 1 goes along."""
  new, _, metrics = step(params, TX.init(params), batch)
  gradient = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, new)
  return gradient, np.asarray(metrics["loss"])


SAMPLE = ("scan from zeros", "cond with a constant", "custom_vjp of zeros", "Pallas kernel")
OTHERS = [name for name, x in ZOO.items() if not x.usual_promotion and name not in SAMPLE]
USUAL = [name for name, x in ZOO.items() if x.usual_promotion]


@pytest.mark.parametrize("names", [SAMPLE, more(OTHERS), more(USUAL)], ids=", ".join)
def test_losses_over_eight_devices_are_those_of_the_whole_batch(names):
  """The sum of several, each of its own parameters: their gradients are compared one by one."""

  def each(params, batch):
    return sum(ZOO[name].each(params[name], batch) for name in names)

  def assert_all_close(found, expected):
    tolerances = [ROUNDED.get(name, TOLERANCE) for name in names]
    for name, tolerance in zip(names, tolerances, strict=True):
      trees.assert_close(found[0][name], expected[0][name], tolerance)
    trees.assert_close(found[1], expected[1], max(tolerances))

  with promotion(names is USUAL):
    params = {name: ZOO[name].params() for name in names}
    batch, loss_fn = mesh_zoo.make_batch(), mesh_zoo.loss_of(each)
    once = oracle.whole_batch_step(loss_fn, TX)
    # Where padding counts not at all, a little, and in full.
    of_valid, of_some, of_all = (
      gradient_and_loss(once, params, rows)
      for rows in (batch, mesh_zoo.partly_valid(batch), mesh_zoo.all_valid(batch))
    )
    for name in names:
      moved = trees.largest_difference(of_valid[0][name], of_all[0][name])
      assert moved > 1e-3, name

    options = {"mesh": make_mesh(8), "num_microbatches": 2, "donate": False}
    weighs = make_train_step(loss_fn, TX, weight_fn=mesh_zoo.valid_rows, **options)
    assert_all_close(gradient_and_loss(weighs, params, batch), of_valid)

    if names is not SAMPLE:
      return
    # The mean of means is exact only where all count the same.
    plain = make_train_step(loss_fn, TX, **options)
    rows = mesh_zoo.all_valid(batch)
    assert_all_close(gradient_and_loss(plain, params, rows), of_all)
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
  "FSDP, explicit": ((8,), EXPLICIT, FSDP, FSDP, {"num_microbatches": 2}),
  "ZeRO-1": ((8,), AUTO, P(), FSDP, {"microbatch_size": 24}),
}
if _versions.ADDS_TO_REFERENCES:
  PLACES["in place"] = ((8,), AUTO, P(), P(), {"num_microbatches": 2, "in_place": True})
LOSSES = ("dropout in a scan", "while_loop", "Equinox, bounded while", "custom_vjp of zeros")
LOSSES += ("scan from zeros", "gradient penalty", "Pallas kernel", "cond with a constant")
MOMENTUM = optax.sgd(1.0, momentum=0.9)


@functools.cache
def momentum_of(name):
  """Parameters, momentum and loss after two steps of the whole batch on one device."""
  with promotion(ZOO[name].usual_promotion):
    step = oracle.whole_batch_step(mesh_zoo.loss_of(ZOO[name].each), MOMENTUM)
    params = jax.tree.map(jnp.asarray, mesh_zoo.plain_params())
    return oracle.take_steps(step, MOMENTUM, params, [mesh_zoo.make_batch()] * 2)


@pytest.mark.parametrize(
  ("place", "name"),
  [
    more(*case) if case[0] in ("one device", "explicit", "FSDP, explicit", "ragged") else case
    for case in zip(PLACES, LOSSES, strict=False)
  ],
)
def test_wherever_parameters_are_two_steps_are_those_of_the_whole_batch(place, name):
  shape, kind, held, state, options = PLACES[place]
  mesh = make_mesh(*shape, kind=kind)
  with promotion(ZOO[name].usual_promotion):
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


KINDS = [AUTO, EXPLICIT]


def step_with(loss_fn, mesh, *further, **options):
  """The gradient of a step of size 1, and its metrics."""
  rng = np.random.default_rng(0)
  params, x = {"w": rng.normal(size=(4, 8))}, rng.normal(size=(32, 4))
  step = make_train_step(loss_fn, TX, num_microbatches=2, mesh=mesh, donate=False, **options)
  new, _, metrics = step(params, TX.init(params), {"x": x, "i": np.arange(32) % 16}, *further)
  return params["w"] - np.asarray(new["w"]), metrics


def tanh_loss(between=lambda h: h):
  """Of what is between a layer and the loss."""
  return lambda params, batch: jnp.mean(between(jnp.tanh(batch["x"] @ params["w"])) ** 2)


@functools.cache
def of_one_device():
  """The gradient of `tanh_loss`."""
  return step_with(tanh_loss(), None)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_over_further_axes_arrays_are_whole_and_may_be_sharded(kind):
  mesh = make_mesh(4, 2, kind=kind)
  shard = jax.reshard if kind == EXPLICIT else lax.with_sharding_constraint
  specs = [P(None, "model")]
  if kind == AUTO:
    specs += [NamedSharding(mesh, P(None, "model"))]
  for spec in specs:
    loss_fn = tanh_loss(lambda h, spec=spec: shard(h, spec))
    trees.assert_close(step_with(loss_fn, mesh)[0], of_one_device(), TOLERANCE)
  exact, _ = step_with(tanh_loss(lambda h: jnp.sum(h, 1)), None)
  found, _ = step_with(tanh_loss(lambda h: jnp.sum(h, 1)), mesh)
  trees.assert_close(found, exact, TOLERANCE)


def calling_back(h):
  # threads of callbacks have no float64
  like = jax.ShapeDtypeStruct(h.shape, jnp.float32)
  ones = lambda h: np.ones(h.shape, np.float32)  # noqa: E731
  return h + jax.pure_callback(ones, like, lax.stop_gradient(h)).astype(h.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_work_over_all_axes(kind):
  mesh = make_mesh(4, 2, kind=kind)
  exact, _ = step_with(tanh_loss(calling_back), None)
  found, _ = step_with(tanh_loss(calling_back), mesh, data_axis=("data", "model"))
  trees.assert_close(found, exact, TOLERANCE)
