"""Parameters and rows sharded over automatic axes, and no `mesh=`: all is left to the compiler.

It gathers each layer where it is used, and reduces in every microbatch.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.compiled import compilations
from support.devices import AUTO, EXPLICIT
from support.optimizers import clipped_adamw, relaxed
from support.samples import more

from optax_accum import count_collectives, make_train_step, microbatch_value_and_grad
from optax_accum.flax import nnx_train_step

LAYERS, ROWS = 8, 64
COLUMNS = P(None, None, "fsdp")
OPTIONS = {"num_microbatches": 4, "weight_fn": lambda batch: jnp.sum(batch["w"])}


def make_mesh():
  return devices.make_mesh(8, axes=("fsdp",))


def init_params(width=16, dtype=np.float64):
  rng = np.random.default_rng(0)
  return np.asarray(rng.normal(size=(LAYERS, width, width)) / width, dtype)


def make_batch(width=16, dtype=np.float64):
  """Rows of which some count far more than others, so that microbatches differ."""
  rng = np.random.default_rng(1)
  x, w = rng.normal(size=(ROWS, width)), rng.random(ROWS) ** 8
  return {"x": np.asarray(x, dtype), "w": np.asarray(w, dtype)}


def loss_fn(params, batch):
  @jax.checkpoint
  def layer(h, w):
    return h + jnp.tanh(h @ w), None

  h, _ = jax.lax.scan(layer, batch["x"], params["layers"])
  return jnp.sum(jnp.mean(h**2, 1) * batch["w"]) / jnp.sum(batch["w"])


class Nnx(nnx.Module):
  def __init__(self, layers):
    self.layers = nnx.Param(layers)

  def __call__(self, batch):
    return loss_fn({"layers": self.layers[...]}, batch)


def of_step(layers, shardings):
  """How to take a step with these parameters, how to lower it, and how to read the parameters."""
  held = [{"layers": jax.device_put(layers, shardings)}]
  tx = clipped_adamw()
  held += [trees.strong(tx.init(held[0]))]
  step = make_train_step(loss_fn, tx, **OPTIONS)

  def take(batch):
    held[0], held[1], _ = step(*held, batch)

  return take, lambda batch: step.lower(*held, batch), lambda: held[0]["layers"]


def of_gradient(layers, shardings):
  """The same of gradients alone: `jax.jit` must be told how to shard them, else they are whole."""
  tx, cycle = clipped_adamw(), microbatch_value_and_grad(loss_fn, **OPTIONS)
  cycle = jax.jit(cycle, out_shardings=(None, {"layers": shardings}))
  held = [{"layers": jax.device_put(layers, shardings)}]
  held += [tx.init(held[0])]
  update = jax.jit(tx.update)

  def take(batch):
    updates, held[1] = update(cycle(held[0], batch)[1], held[1], held[0])
    held[0] = optax.apply_updates(held[0], updates)

  return take, lambda batch: cycle.lower(held[0], batch), lambda: held[0]["layers"]


def of_nnx(layers, shardings):
  model = Nnx(jax.device_put(layers, shardings))
  state = nnx.Optimizer(model, clipped_adamw(), wrt=nnx.Param)
  step = nnx_train_step(lambda model, batch: model(batch), **OPTIONS)
  lower = lambda batch: step.lower(model, state, batch)  # noqa: E731
  return lambda batch: step(model, state, batch), lower, lambda: model.layers[...]


@functools.cache
def whole_batch():
  step, tx = oracle.whole_batch_step(loss_fn, clipped_adamw()), clipped_adamw()
  params, _, _ = oracle.take_steps(step, tx, {"layers": init_params()}, [make_batch()] * 3)
  start, parts = {"layers": init_params()}, trees.strided(make_batch(), 4)
  of_parts = [jax.jit(loss_fn)(start, part) for part in parts]
  # A mean of means would be told apart.
  assert abs(np.mean(of_parts) - jax.jit(loss_fn)(start, make_batch())) > 1e-3
  return params["layers"]


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize("way", [of_step, more(of_gradient), of_nnx])
def test_sharded_parameters_and_rows_need_no_mesh(way):
  mesh = make_mesh()
  with jax.enable_x64(True):
    take, _, parameters = way(init_params(), jax.NamedSharding(mesh, COLUMNS))
    for _ in range(3):
      take(devices.put(make_batch(), mesh, P("fsdp")))
    assert parameters().sharding.is_equivalent_to(jax.NamedSharding(mesh, COLUMNS), 3)
    trees.assert_close(jax.device_get(parameters()), whole_batch(), 1e-10)
  if way is of_nnx:  # whose program is that of a step
    return

  width = 256  # so that layers are larger than what a microbatch computes of them
  layers = init_params(width, np.float32)
  _, lower, _ = way(layers, jax.NamedSharding(mesh, COLUMNS))
  compiled = lower(devices.put(make_batch(width, np.float32), mesh, P("fsdp"))).compile()
  found = count_collectives(compiled).operations
  layer = layers.nbytes // LAYERS
  gathers = {op.bytes for op in found if op.kind == "all-gather" and op.bytes > 2048}
  # one at a time, in the loop over layers, and no rows
  assert gathers == {layer}
  assert not [op for op in found if op.loop is None and op.bytes > 64]
  assert compiled.memory_analysis().temp_size_in_bytes < 0.6 * layers.nbytes


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize(("kind", "donate"), [(AUTO, False), (EXPLICIT, True), ("two meshes", True)])  # fmt: skip
def test_what_is_updated_comes_back_sharded_as_it_went_in(kind, donate):
  """Else XLA shards the parameters as their state, and the second call compiles again."""
  over_rows = devices.make_mesh(8, axes=("fsdp",), kind=AUTO if kind == "two meshes" else kind)
  other = devices.make_mesh(4, 2) if kind == "two meshes" else over_rows
  loss, tx = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), relaxed(optax.adam(0.1))
  start, x = init_params(dtype=np.float32)[0], make_batch(dtype=np.float32)["x"]
  state = trees.strong(tx.init(start))
  specs = jax.tree.map(lambda leaf: P("fsdp") if leaf.ndim else P(), state)
  held = devices.put(start, other), devices.put(state, over_rows, specs)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, held)
  step = make_train_step(loss, tx, num_microbatches=4, donate=donate)
  rows = devices.put(x, over_rows, P("fsdp"))
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), held)
  with compilations() as programs:
    assert step.lower(*shapes, rows).compile().output_shardings[:2] == shardings
    for _ in range(3):
      *held, _ = step(*held, rows)
      assert jax.tree.map(lambda leaf: leaf.sharding, tuple(held)) == shardings
  assert sum("train_step" in line for line in programs) == 1
  expected, _, _ = oracle.take_steps(oracle.whole_batch_step(loss, tx), tx, start, [x] * 3)
  trees.assert_close(jax.device_get(held[0]), expected, 1e-5)
  outer = jax.jit(lambda *args: step(*args))(*held, rows)  # decides by itself
  trees.assert_close(jax.device_get(outer[0]), jax.device_get(step(*held, rows)[0]), 1e-5)


@pytest.mark.usefixtures("usual_promotion")
def test_arrays_of_numpy_and_of_one_device_are_one_program():
  params, tx = init_params(dtype=np.float32), optax.adam(0.1)
  step = make_train_step(loss_fn, tx, num_microbatches=4)
  held, batch = ({"layers": params}, tx.init({"layers": params})), make_batch(dtype=np.float32)
  with compilations() as programs:
    for _ in range(3):
      *held, _ = step(*held, batch)
  assert sum("train_step" in line for line in programs) == 1
