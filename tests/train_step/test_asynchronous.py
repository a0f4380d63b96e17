"""A step is dispatched and no more: the host neither waits for it nor moves data, metrics too."""

import threading

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed

from optax_accum import make_train_step

TX = relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
MESHES = pytest.mark.parametrize(
  "mesh", [None, (8, AUTO), (8, EXPLICIT)], ids=["alone", "automatic", "explicit"]
)
ROWS, WIDTH = 16, 4


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def host_batch():
  rng = np.random.default_rng(0)
  return {
    "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "y": rng.normal(size=ROWS).astype(np.float32),
  }


def placed(tree, mesh, *specs):
  return jax.device_put(tree) if mesh is None else devices.put(tree, mesh, *specs)


def train_step(mesh, loss_fn=loss_fn):
  """A step, and its arguments but for the batch."""
  params = {"w": jnp.zeros(WIDTH)}
  args = placed((params, TX.init(params)), mesh)
  step = make_train_step(loss_fn, TX, num_microbatches=2, mesh=mesh)
  return step, args


@MESHES
def test_nothing_is_moved_to_the_host_or_back(mesh):
  mesh = mesh and make_mesh(mesh[0], kind=mesh[1])
  step, args = train_step(mesh)
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
