"""A batch or a further argument that is no array: each surface says which leaf, and what to write."""

import collections
import dataclasses

from flax import nnx
from flax.training.train_state import TrainState
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.devices import make_mesh
from support.samples import more

from optax_accum import make_train_step, microbatch, microbatch_value_and_grad
from optax_accum.flax import linen_train_step, nnx_train_step

TX = optax.sgd(0.1)
W = jnp.ones((3, 1))
X = np.ones((16, 3), np.float32)


def loss_fn(w, batch, *further):
  return jnp.mean((batch["x"] @ w) ** 2)


def options_on(mesh):
  mesh = None if mesh is None else make_mesh(mesh)
  return {"num_microbatches": 2, "mesh": mesh, "donate": False}


def step(method):
  def call(mesh, batch, *further):
    made = make_train_step(loss_fn, TX, **options_on(mesh))
    if method == "add":
      return made.add(made.begin(W), W, batch, *further)
    run = made.check if method == "check" else made
    if method == "again":  # after a call that succeeded
      run(W, TX.init(W), {"x": X}, *[jnp.ones(())] * len(further))
    return run(W, TX.init(W), batch, *further)

  return call


def linen(adds):
  def loss(variables, batch, rngs, *further):
    return loss_fn(variables["params"]["w"], batch)

  def call(mesh, batch, *further):
    state = TrainState.create(apply_fn=None, params={"w": W}, tx=TX)
    made = linen_train_step(loss, **options_on(mesh))
    if adds:
      return made.add(made.begin(state), state, batch, None, *further)
    return made(state, batch, None, *further)

  return call


def nnx_step(mesh, batch, *further):
  model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  loss = lambda model, batch, *further: jnp.mean(model(batch["x"]))  # noqa: E731
  made = nnx_train_step(loss, **options_on(mesh))
  return made(model, optimizer, batch, *further)


def value_and_grad(mesh, batch):
  return microbatch_value_and_grad(loss_fn, num_microbatches=2)(W, batch)


def function(mesh, batch, *further):
  mesh = None if mesh is None else make_mesh(mesh)
  run = microbatch(loss_fn, reduction="mean", num_microbatches=2, batch_argnums=1, mesh=mesh)
  return run(W, batch, *further)


# A call with a batch, and what messages call the batch, and a further argument.
STEPS = {
  **{method: (step(method), "batch", "argument 3") for method in ("call", "again", "add", "check")},
  "linen": (linen(False), "batch", r"args\[0\]"),
  "linen add": (linen(True), "batch", r"args\[0\]"),
  "nnx": (nnx_step, "batch", r"args\[0\]"),
}
FUNCTIONS = {
  "value_and_grad": (value_and_grad, "argument 1", ""),
  "microbatch": (function, "argument 1", "argument 2"),
}


@dataclasses.dataclass
class Batch:
  x: np.ndarray


class Loader:
  def __iter__(self):
    yield {"x": X}


class Tensor:
  """As one of another framework, which is no array of JAX, and can be made one."""

  def __array__(self, dtype=None, copy=None):
    return X

  def __iter__(self):
    return iter(X)


LEAVE_OUT = "leave it out of the batch"
BATCHES = {
  "strings": ({"x": X, "id": np.array(["a"] * 16)}, r"\['id'\] has no numbers \(.*", LEAVE_OUT),
  "objects": ({"x": X, "id": np.array([None] * 16)}, r"\['id'\] has no numbers \(.*", LEAVE_OUT),
  "string": ({"x": X, "id": "a"}, r"\['id'\] is the string 'a' and no array", LEAVE_OUT),
  "list": ({"x": X, "id": ["a"] * 16}, r"\['id'\]\[0\] is the string", LEAVE_OUT),
  "mapping": (collections.UserDict({"x": X}), " is of type UserDict", r"pass dict\(batch\), or reg"),
  "dataclass": (Batch(X), " is of type Batch", r"pass dict\(batch\), or register the class"),
  "tensor": ({"x": X, "t": Tensor()}, r"\['t'\] is of type Tensor", r"pass np\.asarray\(x\)"),
  "loader": (Loader(), " is of type Loader", "pass one batch a call"),
  "generator": ((x for x in [X]), " is of type generator", "pass one batch a call"),
}  # fmt: skip


# JAX warns of a generator, and is to refuse it.
@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize("mesh", [more(None), 8])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("surface", STEPS | FUNCTIONS)
def test_a_batch_that_is_no_array_is_named(surface, batch, mesh):
  call, name, _ = (STEPS | FUNCTIONS)[surface]
  given, words, fix = BATCHES[batch]
  with pytest.raises(TypeError, match=rf"^{name}{words}.*: {fix}"):
    call(mesh, given)


@pytest.mark.parametrize("mesh", [None, 8])
@pytest.mark.parametrize("surface", STEPS | FUNCTIONS)
def test_a_list_of_batches_is_named(surface, mesh):
  call, _, _ = (STEPS | FUNCTIONS)[surface]
  with pytest.raises(TypeError, match="is a list of 2 batches: pass one batch a"):
    call(mesh, [{"x": X}, {"x": X}])


SETTINGS = {
  "string": ("a", " is the string 'a'"),
  "nested": ({"mode": "a"}, r"\['mode'\] is the string 'a'"),
  "object": (object(), " is of type object"),
  "function": (len, " is of type builtin_function_or_method"),
}


@pytest.mark.parametrize("mesh", [more(None), 8])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("surface", STEPS)
def test_a_further_argument_that_is_no_array_is_named(surface, setting, mesh):
  call, _, name = STEPS[surface]
  given, words = SETTINGS[setting]
  fix = r"or fix it in the loss, functools\.partial\(loss_fn, mode="
  with pytest.raises(TypeError, match=rf"^{name}{words} and no array: .*{fix}"):
    call(mesh, {"x": X}, given)


def test_over_a_mesh_a_function_traces_all_arguments():
  with pytest.raises(TypeError, match=r"^argument 2 is the string 'a'"):
    function(8, {"x": X}, "a")
  assert function(None, {"x": X}, "a") == 9


TABLE = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
TOKENS = np.arange(64).reshape(16, 4) % 7


def looked_up(table, tokens):
  return jnp.mean(table[tokens] ** 2)


def pulled(w, tokens, table):
  return jnp.mean((w[None, None] - table[tokens]) ** 2)


@pytest.mark.parametrize("mesh", [None, 8])
@pytest.mark.parametrize("parts", [more(1), 2])
def test_arrays_of_numpy_that_are_not_split_become_arrays_of_jax(parts, mesh):
  options = {"num_microbatches": parts}
  over = {**options, "mesh": None if mesh is None else make_mesh(mesh)}
  run = microbatch(looked_up, reduction="mean", batch_argnums=1, **over)
  expected = np.mean(TABLE[TOKENS] ** 2, dtype=np.float64)
  np.testing.assert_allclose(run(TABLE, TOKENS), expected, rtol=1e-6)
  w = np.ones(5, np.float32)
  expected = np.mean((w - TABLE[TOKENS]) ** 2, dtype=np.float64)
  made = make_train_step(pulled, TX, batch_argnums=1, donate=False, **over)
  losses = [
    microbatch_value_and_grad(pulled, **options)(w, TOKENS, TABLE)[0],
    made(w, TX.init(w), TOKENS, TABLE)[2]["loss"],
    made.finish(w, TX.init(w), made.add(made.begin(w), w, TOKENS, TABLE))[2]["loss"],
  ]
  np.testing.assert_allclose(losses, expected, rtol=1e-6)
