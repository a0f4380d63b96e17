"""Arrays that a step is donated, and given a second time: on a mesh that ended the process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import devices, trees
from support.compiled import compilations
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed
from support.samples import more

from optax_accum import make_train_step

MESHES = {
  "alone": None,
  "mesh1": make_mesh(1),
  "mesh8": make_mesh(8),
  "explicit": make_mesh(4, 2, kind=EXPLICIT),
}


def everywhere(name, *values):
  """Every mesh, with each of the `values`: the first is all that there is without one."""
  cases = [(at, value) for at, mesh in MESHES.items() for value in values[: 2 if mesh else 1]]
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


def steps(step, params, state, *others, **named):
  for _ in range(2):
    params, state, metrics = step(params, state, X, *others, **named)
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
    lambda p, x: towards(p, x, jax.lax.stop_gradient(p)), MOMENTUM, num_microbatches=2
  )
  return steps(moved, init_params(), MOMENTUM.init(init_params()))


@pytest.mark.parametrize("by_name", [more(False), True])
@everywhere("on_mesh", "neither")
def test_a_teacher_that_starts_as_the_parameters(at, on_mesh, by_name):
  tx, mesh = MOMENTUM, MESHES[at]
  step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
  # which jit would not move
  params = teacher = jax.device_put(init_params(), jax.devices()[0])
  if mesh and on_mesh != "neither":
    params = devices.put(teacher, mesh)
  others, named = ((), {"teacher": teacher}) if by_name else ((teacher,), {})
  actual = steps(step, params, tx.init(params), *others, **named)
  trees.assert_close(actual, expected(tx), 1e-6)
  trees.assert_close(jax.device_get(teacher), jax.device_get(init_params()), 0)
  assert trees.largest_difference(actual[0], moved_along()[0]) > 0.1


REMEMBER = remember()


def grows(params, x):
  return jnp.mean(x) * jnp.sum(params["w"] ** 2) + params["b"]


@everywhere("put", False, True)
def test_a_state_that_holds_the_parameters_as_they_were_before_they_were_placed(at, put):
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
    "w": devices.put(jnp.arange(1.0, 5.0), mesh, jax.sharding.PartitionSpec("data")),
    "b": devices.put(jnp.float32(0.5), mesh),
  }
  params, state, _ = step(params, tx.init(params), X, teacher)
  assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, teacher)
  with compilations() as programs:
    step(params, state, X, teacher)
  assert programs == []


def test_copies_are_on_no_device_in_particular_where_the_array_is_not():
  tx = MOMENTUM
  step = make_train_step(towards, tx, num_microbatches=2)
  params = teacher = init_params()
  params, state, _ = step(params, tx.init(params), X, teacher)
  with compilations() as programs:
    step(params, state, X, teacher)
  assert programs == []


def test_what_stands_once_is_donated_and_not_copied():
  mesh, tx = make_mesh(4), optax.sgd(0.1, momentum=0.9)
  step = make_train_step(towards, tx, num_microbatches=2, mesh=mesh)
  params, teacher = devices.put(init_params(), mesh), devices.put(copy_of(init_params()), mesh)
  state = devices.put(tx.init(params), mesh)
  step(params, state, X, teacher)
  assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
  assert not any(x.is_deleted() for x in jax.tree.leaves(teacher))


def test_what_was_returned_and_then_deleted_elsewhere_is_named():
  """On several devices a call would end the process, in JAX 0.10."""
  mesh = make_mesh(8)
  params, teacher = devices.put((init_params(), copy_of(init_params())), mesh)
  state = devices.put(MOMENTUM.init(params), mesh)
  step = make_train_step(towards, MOMENTUM, num_microbatches=2)
  batch = devices.put(X, mesh, jax.sharding.PartitionSpec("data"))
  params, state, _ = step(params, state, batch, teacher)
  jax.block_until_ready(jax.jit(lambda x: 2 * x, donate_argnums=0)(params["w"]))
  with pytest.raises(RuntimeError, match=r"params\['w'\] has been deleted"):
    step(params, state, batch, teacher)


REVERSED = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))


@pytest.mark.parametrize("inside", ["teacher", "state", more("lbfgs")])
def test_a_mesh_whose_first_device_is_not_where_arrays_start(inside):
  tx = {"teacher": optax.sgd(0.1), "state": remember()}.get(inside, optax.lbfgs(linesearch=None))
  fun = (
    towards if inside == "teacher" else lambda p, x: towards(p, x, jax.tree.map(jnp.ones_like, p))
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
