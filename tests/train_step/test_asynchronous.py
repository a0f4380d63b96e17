"""A step is dispatched and no more: the host neither waits for it nor moves data, metrics too."""

import threading

from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed

from optax_accum import make_train_step
from optax_accum.flax import linen_train_step

TX = relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
MESHES = pytest.mark.parametrize(
  "mesh",
  [None, (8, AUTO), (8, EXPLICIT)],
  ids=["alone", "automatic", "explicit"],
)
ROWS, WIDTH = 16, 4


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


class TrainState(train_state.TrainState):
  seen: dict


def host_batch():
  rng = np.random.default_rng(0)
  return {
    "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "y": rng.normal(size=ROWS).astype(np.float32),
  }


def placed(tree, mesh, *specs):
  return (
    jax.device_put(tree) if mesh is None else devices.put(tree, mesh, *specs)
  )


def train_step(mesh, loss_fn=loss_fn):
  """A step, and its arguments but for the batch."""
  params = {"w": jnp.zeros(WIDTH)}
  args = placed((params, TX.init(params)), mesh)
  step = make_train_step(loss_fn, TX, num_microbatches=2, mesh=mesh)
  return step, args


def linen_step(mesh, loss_fn=loss_fn):
  """The same of a `TrainState`, with a collection and keys."""

  def linen_loss(variables, batch, rngs):
    noise = jax.random.normal(rngs["noise"], (WIDTH,))
    loss = loss_fn({"w": variables["params"]["w"] + noise}, batch)
    return loss, {"seen": {"rows": variables["seen"]["rows"] + len(batch["x"])}}

  params, seen = {"w": jnp.zeros(WIDTH)}, {"rows": jnp.zeros((), jnp.int32)}
  state = TrainState.create(apply_fn=None, params=params, tx=TX, seen=seen)
  step = linen_train_step(
    linen_loss,
    mutable="seen",
    num_microbatches=2,
    mesh=mesh,
    carry_reduction="sum",
  )
  rngs = placed({"noise": jax.random.key(0)}, mesh)

  def with_rngs(state, batch):
    return step(state, batch, rngs)

  return with_rngs, (placed(state, mesh),)


STEPS = pytest.mark.parametrize("made", [train_step, linen_step])


@MESHES
@STEPS
def test_nothing_is_moved_to_the_host_or_back(made, mesh):
  mesh = mesh and make_mesh(mesh[0], kind=mesh[1])
  step, args = made(mesh)
  batch = placed(host_batch(), mesh, P("data"))
  # constants of the program are moved when it is compiled
  *args, _ = step(*args, batch)
  with jax.transfer_guard("disallow_explicit"):
    for _ in range(2):
      *args, metrics = step(*args, batch)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(metrics))


def test_the_guard_sees_a_batch_that_is_moved():
  step, args = train_step(None)
  batch = host_batch()
  *args, _ = step(*args, batch)
  with (
    jax.transfer_guard("disallow_explicit"),
    pytest.raises(Exception, match="Disallowed host-to-device transfer"),
  ):
    step(*args, batch)


def slow_loss(params, batch):
  """Takes a twentieth of a second or more: many times what two calls are dispatched in."""
  factor = jnp.full((400, 400), 0.01)
  start = jnp.full((400, 400), batch["x"][0, 0])
  x = jax.lax.fori_loop(0, 15, lambda i, x: jnp.tanh(factor @ x), start)
  return loss_fn(params, batch) + jax.lax.stop_gradient(jnp.sum(x))


def plain_step(_, loss_fn=loss_fn):
  params = {"w": jnp.zeros(WIDTH)}
  return oracle.with_optimizer(jax.value_and_grad(loss_fn), TX), (
    params,
    TX.init(params),
  )


def is_ahead(made):
  """Whether two calls return before the first has run."""
  step, args = made(None, slow_loss)
  batch = placed(host_batch(), None)
  *args, metrics = step(*args, batch)
  jax.block_until_ready(metrics)
  *args, first = step(*args, batch)
  *args, second = step(*args, batch)
  ahead = not first["loss"].is_ready()
  assert np.isfinite(second["loss"])
  return ahead


def test_the_host_does_not_wait_for_the_step_before():
  """Nor does it for a hand-written step, but for that of the oldest JAX on CPUs."""
  assert is_ahead(train_step) == is_ahead(linen_step) == is_ahead(plain_step)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_host_does_not_wait_for_devices_that_wait_for_it(kind):
  returned = threading.Event()

  def wait(x):
    return np.float32(returned.wait(timeout=30)) * x

  def waiting_loss(params, batch):
    loss = loss_fn(params, batch)
    like = jax.ShapeDtypeStruct((), loss.dtype)
    return loss + jax.pure_callback(wait, like, jax.lax.stop_gradient(loss))

  mesh = make_mesh(8, kind=kind)
  step, args = train_step(mesh, waiting_loss)
  *_, metrics = step(*args, placed(host_batch(), mesh, P("data")))
  assert not metrics["loss"].is_ready()
  returned.set()
  assert metrics["loss"] > 0
