"""Arrays that a step is donated, and given a second time: on a mesh that ended the process."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.compiled import compilations
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed

from optax_accum import make_train_step
from optax_accum._train_step import donation

MESHES = {
  "alone": None,
  "mesh1": make_mesh(1),
  "mesh8": make_mesh(8),
  "explicit": make_mesh(4, 2, kind=EXPLICIT),
}


def everywhere(name, *values):
  """Every mesh, with each of the `values`: the first is all that there is without one."""
  cases = [
    (at, value)
    for at, mesh in MESHES.items()
    for value in values[: 3 if mesh else 1]
  ]
  return pytest.mark.parametrize(("at", name), cases)


def init_params():
  return {"w": jnp.arange(1.0, 5.0), "b": jnp.float32(0.5)}


def towards(params, x, teacher):
  gap = jax.tree.map(lambda p, t: jnp.sum((p - 2 * t) ** 2), params, teacher)
  return jnp.mean(x) * (gap["w"] + gap["b"])


def remember():
  """A transformation whose state is the parameters that it was made with."""

  def update(updates, state, params=None):
    return jax.tree.map(lambda u, s: 0.1 * s - 0.1 * u, updates, state), state

  return optax.GradientTransformation(lambda params: params, update)


def copy_of(tree):
  return jax.tree.map(lambda x: jnp.asarray(np.array(x)), tree)


X = np.linspace(1, 2, 16, dtype=np.float32)


def steps(step, params, state, *others):
  for _ in range(2):
    params, state, metrics = step(params, state, X, *others)
  return jax.device_get((params, state, metrics["loss"]))


MOMENTUM = optax.sgd(0.1, momentum=0.9)


@functools.cache
def expected(tx, fun=towards):
  step = make_train_step(fun, tx, num_microbatches=2, donate=False)
  others = (init_params(),) if fun is towards else ()
  return steps(step, init_params(), tx.init(init_params()), *others)


@functools.cache
def moved_along():
  """What a teacher that is the parameters comes to: no gradient but that of the first step."""
  moved = make_train_step(
    lambda p, x: towards(p, x, jax.lax.stop_gradient(p)),
    MOMENTUM,
    num_microbatches=2,
  )
  return steps(moved, init_params(), MOMENTUM.init(init_params()))


@everywhere("on_mesh", "neither", "params", "both")
def test_a_teacher_that_starts_as_the_parameters(at, on_mesh):
  tx, mesh = MOMENTUM, MESHES[at]
  step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
  # which jit would not move
  params = teacher = jax.device_put(init_params(), jax.devices()[0])
  if mesh and on_mesh != "neither":
    params = devices.put(teacher, mesh)
  # each shares the buffer that `teacher` has on the first device
  if mesh and on_mesh == "both":
    teacher = devices.put(teacher, mesh)
  actual = steps(step, params, tx.init(params), teacher)
  trees.assert_close(actual, expected(tx), 1e-6)
  trees.assert_close(jax.device_get(teacher), jax.device_get(init_params()), 0)
  assert trees.largest_difference(actual[0], moved_along()[0]) > 0.1


REMEMBER = remember()


def grows(params, x):
  return jnp.mean(x) * jnp.sum(params["w"] ** 2) + params["b"]


@everywhere("put", False, True)
def test_a_state_that_holds_the_parameters_as_they_were_before_they_were_placed(
  at, put
):
  mesh, tx, fun = MESHES[at], REMEMBER, grows
  params = init_params()
  state = tx.init(params)
  if mesh and put:
    params = devices.put(params, mesh)
  step = make_train_step(fun, tx, num_microbatches=2, mesh=mesh)
  trees.assert_close(steps(step, params, state), expected(tx, fun), 1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_copies_are_sharded_as_the_array_and_compile_nothing_anew(kind):
  mesh, tx = make_mesh(4, kind=kind), optax.sgd(0.1)
  step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
  params = teacher = {
    "w": devices.put(
      jnp.arange(1.0, 5.0), mesh, jax.sharding.PartitionSpec("data")
    ),
    "b": devices.put(jnp.float32(0.5), mesh),
  }
  params, state, _ = step(params, tx.init(params), X, teacher)
  assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(
    lambda x: x.sharding, teacher
  )
  with compilations() as programs:
    step(params, state, X, teacher)
  assert programs == []


def test_what_stands_once_is_donated_and_not_copied():
  mesh, tx = make_mesh(4), optax.sgd(0.1, momentum=0.9)
  step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
  params, teacher = (
    devices.put(init_params(), mesh),
    devices.put(copy_of(init_params()), mesh),
  )
  state = devices.put(tx.init(params), mesh)
  step(params, state, X, teacher)
  assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
  assert not any(x.is_deleted() for x in jax.tree.leaves(teacher))


@pytest.mark.parametrize("at", ["mesh1", "mesh8", "explicit"])
def test_a_teacher_on_one_device_that_shares_its_part_of_the_parameters(at):
  tx, mesh, results = optax.sgd(0.1, momentum=0.9), MESHES[at], []
  for one_device in (
    lambda p: p.addressable_data(0),
    lambda p: jnp.asarray(np.array(p)),
  ):
    step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
    params = devices.put(init_params(), mesh)
    state = tx.init(params)
    for _ in range(3):  # the first call alone looks at all arrays
      teacher = jax.tree.map(one_device, params)
      params, state, _ = step(params, state, X, teacher)
    results.append(jax.device_get(params))
  np.testing.assert_array_equal(results[0]["w"], results[1]["w"])


def test_a_batch_that_is_spread_is_not_looked_for_among_the_parameters(
  monkeypatch,
):
  looked_at, buffers = [], donation._buffers
  monkeypatch.setattr(
    donation, "_buffers", lambda x: looked_at.append(x) or buffers(x)
  )
  mesh, params = make_mesh(8), init_params()
  step = make_train_step(towards, optax.sgd(0.1), num_microbatches=2, mesh=mesh)
  state = optax.sgd(0.1).init(params)
  for _ in range(2):
    looked_at.clear()
    params, state, _ = step(params, state, jnp.asarray(X), init_params())
  assert {x.shape for x in looked_at} == {(4,), ()}
  teacher = init_params()
  for _ in range(2):
    looked_at.clear()
    params, state, _ = step(params, state, jnp.asarray(X), teacher)
  assert looked_at == []


def test_a_shard_of_the_parameters_without_a_mesh(monkeypatch):
  copied, copy = [], donation._copied
  monkeypatch.setattr(
    donation, "_copied", lambda x: copied.append(x.shape) or copy(x)
  )
  mesh, tx = make_mesh(4), optax.sgd(0.1)
  fun = lambda p, x, t: jnp.mean(x) * jnp.sum((p.reshape(4, 2) - t[None]) ** 2)  # noqa: E731
  step = make_train_step(fun, tx, num_microbatches=2)
  params = devices.put(jnp.ones(8), mesh, P("data"))
  params, state, _ = step(
    params, tx.init(params), X, devices.put(jnp.zeros(2), mesh)
  )
  # alike on all devices
  parts = [shard.data for shard in params.addressable_shards]
  teacher = jax.make_array_from_single_device_arrays((2,), whole(mesh), parts)
  held = jax.device_get(teacher)
  step.lower(params, state, X, teacher)
  # else XLA is donated what it also reads, and ends the process
  assert copied == [(8,)]
  step(params, state, X, teacher)
  np.testing.assert_array_equal(teacher, held)


def test_a_batch_that_shares_a_buffer_with_the_state_lives_on():
  mesh, tx = make_mesh(4), optax.sgd(0.1, momentum=0.9)

  def fun(params, batch):
    return jnp.mean(batch["x"]) * jnp.sum(params**2)

  step = make_train_step(fun, tx, num_microbatches=2, mesh=mesh)
  x = jax.device_put(jnp.arange(8.0), jax.devices()[0])
  # whose part on the first device may be the buffer of x
  trace = devices.put(x, mesh)
  state = tx.init(jnp.ones(8))
  state = jax.tree.map(lambda s: trace if s.shape == (8,) else s, state)
  step(jnp.ones(8), state, {"x": x})
  np.testing.assert_array_equal(x, np.arange(8.0))


REVERSED = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))


@pytest.mark.parametrize("inside", ["teacher", "state", "lbfgs"])
def test_a_mesh_whose_first_device_is_not_where_arrays_start(inside):
  tx = {"teacher": optax.sgd(0.1), "state": remember()}.get(
    inside, optax.lbfgs(linesearch=None)
  )
  fun = (
    towards
    if inside == "teacher"
    else lambda p, x: towards(p, x, jax.tree.map(jnp.ones_like, p))
  )
  results = []
  for mesh in (None, REVERSED):
    params = init_params()
    step = relaxed_step(fun, tx, mesh)
    others = (params,) if inside == "teacher" else ()
    results.append(jax.device_get(step(params, tx.init(params), X, *others)[0]))
  trees.assert_close(*results, 1e-5)


def relaxed_step(fun, tx, mesh):
  return make_train_step(fun, relaxed(tx), num_microbatches=2, mesh=mesh)


AGAIN = {
  "spelt otherwise": lambda p, sharding: jax.device_put(p, sharding),
  "from parts": lambda p, _: jax.make_array_from_single_device_arrays(
    p.shape, p.sharding, [shard.data for shard in p.addressable_shards]
  ),
  "one device's": lambda p, _: p.addressable_shards[-1].data,
  "identity": lambda p, _: jax.jit(lambda p: p)(p),
}


@pytest.mark.parametrize(
  ("mesh", "again", "when"),
  [
    # each way on each mesh, and all at once or later
    (
      mesh,
      again,
      2 * ((i + j) % 2),
    )
    for i, mesh in enumerate((None, make_mesh(8), REVERSED))
    for j, again in enumerate(AGAIN)
  ],
)
def test_a_teacher_that_is_made_anew_of_the_same_buffers(mesh, again, when):
  tx, x = optax.sgd(0.1, momentum=0.9), X
  step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
  params = (
    init_params()
    if mesh is None
    else jax.device_put(init_params(), whole(mesh))
  )
  state, teacher = tx.init(params), copy_of(params)
  for i in range(4):
    if i == when:
      held = jax.device_get(params)
      teacher = jax.tree.map(
        lambda p: AGAIN[again](p, mesh and whole(mesh, p.ndim)), params
      )
    params, state, _ = step(params, state, x, teacher)
  trees.assert_close(jax.device_get(teacher), held, 0)


def whole(mesh, ndim=0):
  return jax.sharding.NamedSharding(mesh, P(*[None] * ndim))


def test_two_arrays_of_one_buffer_that_were_arguments_before():
  tx, mesh = optax.sgd(0.1), make_mesh(8)
  step = make_train_step(
    lambda p, x, a, b: towards(p, x, a), tx, num_microbatches=2, mesh=mesh
  )
  params = jax.device_put(init_params(), whole(mesh))
  first = jax.device_put(copy_of(params), whole(mesh))
  second = jax.tree.map(lambda p: jax.device_put(p, whole(mesh, p.ndim)), first)
  params, state, _ = step(params, tx.init(params), X, first, second)
  step(first, state, X, params, second)
  trees.assert_close(jax.device_get(second), init_params(), 0)
