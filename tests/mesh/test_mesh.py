"""Several devices: the global batch's step, one gradient reduction a cycle, no extra work."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.compiled import compilations
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import clipped_adamw, with_loss_elsewhere
from support.samples import more

from optax_accum import count_collectives, make_train_step, microbatch_value_and_grad

WIDTH, LAYERS, ROWS = 16, 8, 64


def init_params(dtype=np.float64, width=WIDTH):
  rng = np.random.default_rng(0)
  return {
    "embedding": np.asarray(rng.normal(size=(32, width)), dtype),
    "layers": np.asarray(rng.normal(size=(LAYERS, width, width)) / 4, dtype),
    "bias": np.asarray(rng.normal(size=(width,)), dtype),
  }


def make_batch(rows=ROWS, dtype=np.float64):
  """Padded text: the last rows, and so the last devices, hold far fewer valid tokens."""
  rng = np.random.default_rng(1)
  length = 4
  keep = np.linspace(1.0, 0.1, rows)[:, None]
  return {
    "token": rng.integers(0, 32, (rows, length)),
    "y": np.asarray(rng.normal(size=(rows, length)), dtype),
    "valid": np.asarray(rng.random((rows, length)) < keep, dtype),
  }


def forward(params, batch):
  def layer(x, w):
    return jnp.tanh(x @ w), None

  x = params["embedding"][batch["token"]]
  x, _ = lax.scan(layer, x, params["layers"])
  return jnp.mean(x + params["bias"][None, None], axis=-1)


def loss_fn(params, batch):
  error = (forward(params, batch).astype(batch["y"].dtype) - batch["y"]) ** 2
  return jnp.sum(error * batch["valid"]) / jnp.sum(batch["valid"])


def valid_tokens(batch):
  return jnp.sum(batch["valid"])


@functools.cache
def expected_steps():
  """Three steps on one device with the whole batch at once."""
  with jax.enable_x64(True):
    params, tx = jax.tree.map(jnp.asarray, init_params()), with_loss_elsewhere(clipped_adamw(0.05))
    step = oracle.whole_batch_step(loss_fn, tx)
    return oracle.take_steps(step, tx, params, [make_batch()] * 3)


@functools.cache
def expected_gradients():
  """The loss and the gradients of the whole batch."""
  with jax.enable_x64(True):
    params, batch = jax.tree.map(jnp.asarray, (init_params(), make_batch()))
    return jax.device_get(jax.jit(jax.value_and_grad(loss_fn))(params, batch))


@functools.cache
def expected_elsewhere():
  """The loss at twice the first parameters."""
  with jax.enable_x64(True):
    return float(jax.jit(loss_fn)(jax.tree.map(lambda x: 2 * x, init_params()), make_batch()))


def assert_one_reduction(compiled, params):
  """All-reduces gradients like the parameters in one operation, after the loop."""
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  report = count_collectives(compiled)
  assert report.at_least(1024).inside == {}
  reductions = report.at_least(1024).outside
  assert set(reductions) == {"all-reduce"}
  # Scalars (loss, weights) may ride along.
  assert size <= reductions["all-reduce"].bytes <= size + 64
  assert reductions["all-reduce"].operations == 1


def with_aux(params, batch):
  return loss_fn(params, batch), {"loss": loss_fn(params, batch)}


@pytest.mark.parametrize(("count", "options", "kind"), [
  more(1, {"num_microbatches": 4}, AUTO),
  (4, {"microbatch_size": 24, "skip_nonfinite": True}, AUTO),
  (8, {"num_microbatches": 8, "has_aux": True}, EXPLICIT),
])  # fmt: skip
def test_three_steps_equal_one_devices_whole_batch(count, options, kind):
  """Compiled once, with one reduction of the gradients, for arrays of the host too."""
  with jax.enable_x64(True):
    mesh, tx, made = make_mesh(count, kind=kind), clipped_adamw(0.05), []
    fun = with_aux if "has_aux" in options else loss_fn
    step = make_train_step(fun, tx, mesh=mesh, weight_fn=valid_tokens, **options)

    def counted(*args):
      out = step(*args)
      made.append(len(programs))
      return out

    with compilations() as programs:
      params, state, loss = oracle.take_steps(counted, tx, init_params(), [make_batch()] * 3)
    expected, (expected_state, _), expected_loss = expected_steps()
    trees.assert_close((params, state, loss), (expected, expected_state, expected_loss), 1e-9)
    assert made[0] == made[-1] > 0
    if count > 1:
      placed = devices.put((params, state), mesh)
      assert_one_reduction(step.lower(*placed, make_batch()).compile(), params)


SHARDED = {"embedding": P("data"), "layers": P("data"), "bias": P()}
SHARDED_2D = {
  "embedding": P("data", "model"),
  "layers": P(None, "model", "data"),
  "bias": P(("data", "model")),  # one dimension over two axes: falls back
}
TENSOR_PARALLEL = {
  "embedding": P(None, "model"),
  "layers": P(None, None, "model"),
  "bias": P("model"),
}


def assert_steps_as_the_whole_batch(step, tx, mesh, specs):
  """Three steps from parameters that are sharded so; how to lower the first."""
  shardings = devices.shardings(init_params(), mesh, specs)
  params = jax.device_put(init_params(), shardings)
  opt_state, batch = trees.strong(tx.init(params)), devices.put(make_batch(), mesh, P("data"))
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.ndim else None),
    (params, opt_state, batch),
  )
  for i in range(3):
    held = params, opt_state
    params, opt_state, metrics = step(*held, batch)
    if i == 0:
      elsewhere = expected_elsewhere()
      np.testing.assert_allclose(opt_state[1], elsewhere, rtol=1e-12)
      assert abs(elsewhere - metrics["loss"]) > 1e-2
    # The first state is on the mesh but for its numbers.
    given = held if i else [x for x in jax.tree.leaves(held) if x.ndim]
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
  assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
  actual = jax.device_get((params, opt_state, metrics["loss"]))
  trees.assert_close(actual, expected_steps(), 1e-9)
  for name, x in params.items():
    assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
    assert opt_state[0][1][0].mu[name].sharding.is_equivalent_to(shardings[name], x.ndim)
  return functools.partial(step.lower, *shapes)


@pytest.mark.parametrize("kind", [AUTO, more(EXPLICIT)], ids=["auto", "explicit"])
def test_one_step_takes_replicated_and_sharded_parameters(kind):
  with jax.enable_x64(True):
    mesh, tx = make_mesh(8, kind=kind), with_loss_elsewhere(clipped_adamw(0.05))
    step = make_train_step(loss_fn, tx, mesh=mesh, num_microbatches=4, weight_fn=valid_tokens)
    compiled = assert_steps_as_the_whole_batch(step, tx, mesh, P())().compile()
    assert_steps_as_the_whole_batch(step, tx, mesh, SHARDED)
    assert_steps_as_the_whole_batch(step, tx, mesh, P())
    assert_one_reduction(compiled, init_params())


@pytest.mark.parametrize(("specs", "kind"), [more(SHARDED_2D, AUTO), (TENSOR_PARALLEL, EXPLICIT)])
def test_parameters_may_be_sharded_over_two_axes(specs, kind):
  def fun(params, batch):
    if kind == EXPLICIT:  # explicit axes want to be told where a product goes
      params = jax.tree.map(lambda x: jax.reshard(x, P()), params)
    return loss_fn(params, batch)

  with jax.enable_x64(True):
    mesh, tx = make_mesh(4, 2, kind=kind), with_loss_elsewhere(clipped_adamw(0.05))
    step = make_train_step(fun, tx, mesh=mesh, num_microbatches=4, weight_fn=valid_tokens)
    assert_steps_as_the_whole_batch(step, tx, mesh, specs)


@pytest.mark.parametrize(("size", "on_each", "kind"), [(40, [5, 1], EXPLICIT), (96, [6], AUTO)])
def test_microbatch_size_counts_the_rows_on_all_devices(size, on_each, kind):
  def fun(params, x):
    return jnp.mean(params * x), jnp.asarray(len(x))

  tx, mesh = optax.sgd(0.1), make_mesh(8, kind=kind)
  step = make_train_step(
    fun, tx, mesh=mesh, microbatch_size=size, has_aux=True, aux_reduction="stack"
  )
  _, _, metrics = step(np.float32(1), tx.init(1.0), np.ones(48, np.float32))
  assert metrics["aux"].tolist() == on_each * 8


def test_a_batch_from_numpy_is_placed_by_its_rows():
  def fun(params, batch, scale):
    return jnp.mean(params * batch["x"]) * jnp.sum(scale)

  mesh, tx = make_mesh(8), optax.sgd(0.1)
  step = make_train_step(fun, tx, mesh=mesh, num_microbatches=1)
  batch = {"x": np.ones((16, 16), np.float32)}
  params, scale = np.float32(1), np.ones(8, np.float32)
  rows = NamedSharding(mesh, P("data"))
  lowered = step.lower(params, tx.init(params), batch, scale)
  args, _ = lowered.compile().input_shardings
  assert args[2]["x"].is_equivalent_to(rows, 2)
  assert args[0].is_fully_replicated
  assert args[3].is_fully_replicated
  lowered = step.lower(params, tx.init(params), batch=batch, scale=scale)
  _, named = lowered.compile().input_shardings
  assert named["batch"]["x"].is_equivalent_to(rows, 2)
  assert named["scale"].is_fully_replicated


def test_one_step_takes_parameters_of_several_trees():
  def fun(params, x):
    return jnp.mean(sum(jax.tree.leaves(params)) * x)

  tx = optax.sgd(0.25)
  step = make_train_step(fun, tx, mesh=make_mesh(8), num_microbatches=2)
  for params in ({"a": 1.0, "b": 2.0}, (1.0, 2.0), {"c": 1.0, "d": 2.0}):
    params = jax.tree.map(jnp.asarray, params)
    new, _, _ = step(params, tx.init(params), np.full(16, 4, np.float32))
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert [float(w) for w in jax.tree.leaves(new)] == [0, 1]


def compiled_step(mesh, fun=loss_fn, width=64, dtype=np.float32, specs=None, rows=256, **options):
  """The step compiled for float32 gradients large enough to tell from the metrics."""
  tx = clipped_adamw(0.05)
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), init_params(width=width))
  on_mesh = devices.abstract(params, mesh, specs or P())
  batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch(rows, np.float32)))
  step = make_train_step(fun, tx, mesh=mesh, **options)
  opt_state = jax.eval_shape(tx.init, params)
  shards = {x.shape: x.sharding for x in jax.tree.leaves(on_mesh)}
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shards.get(x.shape)), opt_state
  )
  return step.lower(on_mesh, opt_state, batch).compile(), params


def test_one_gradient_reduction_a_cycle_in_the_dtype_of_the_accumulators():
  mesh = make_mesh(8)
  compiled, params = compiled_step(mesh, num_microbatches=32, dtype=jnp.bfloat16)
  accumulators = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
  assert_one_reduction(compiled, accumulators)


def test_one_gradient_reduction_a_cycle_on_tpus():
  mesh = make_mesh(64, platform="tpu")
  compiled, params = compiled_step(
    mesh, rows=1024, num_microbatches=8, weight_fn=valid_tokens, width=128
  )
  assert_one_reduction(compiled, params)


def test_fsdp_gathers_and_scatters_once():
  sharded = [name for name, spec in SHARDED.items() if spec]
  compiled, params = compiled_step(
    make_mesh(8), width=256, specs=SHARDED, num_microbatches=8, rows=64
  )
  report = count_collectives(compiled).at_least(1024)
  size = sum(4 * params[name].size for name in sharded)
  assert report.outside["all-gather"] == (len(sharded), size)
  assert report.outside["reduce-scatter"] == (len(sharded), size)
  assert not {"all-gather", "reduce-scatter"} & set(report.inside)


def flops_of(program):
  """Of one device; what is in a loop counts once."""
  return program.cost_analysis()["flops"]


def test_every_device_computes_its_share():
  mesh, n = make_mesh(8), 8
  params, batch = init_params(np.float32, 64), make_batch(256, np.float32)
  part = trees.index(batch, slice(0, 256 // (8 * n)))  # of a device
  step_of = lambda fun, *args: jax.jit(fun).lower(*args).compile()  # noqa: E731
  share = flops_of(step_of(jax.value_and_grad(loss_fn), params, part))
  placed = devices.put(params, mesh), devices.put(batch, mesh, P("data"))
  ours = microbatch_value_and_grad(loss_fn, num_microbatches=n)
  assert flops_of(step_of(ours, *placed)) < 1.5 * share
  # blocks of rows: parallelism is lost
  by_hand = oracle.hand_written(loss_fn, n)
  assert flops_of(step_of(by_hand, *placed)) > 2 * share


def test_plain_jit_on_an_explicit_mesh_keeps_rows_where_they_are():
  mesh = make_mesh(8, kind=EXPLICIT)
  params = devices.put(init_params(np.float32), mesh)
  batch = devices.put(make_batch(ROWS, np.float32), mesh, P("data"))

  def mean_square(params, batch):
    return jnp.mean((batch["y"] @ params["layers"][0, :4]) ** 2)

  cycle = jax.jit(microbatch_value_and_grad(mean_square, num_microbatches=4))
  compiled = cycle.lower(params, batch).compile()
  assert set(count_collectives(compiled).inside) <= {"all-reduce"}
  expected = jax.jit(jax.value_and_grad(mean_square))(*jax.device_get((params, batch)))
  trees.assert_close(jax.device_get(compiled(params, batch)), expected, 1e-5)


@pytest.mark.parametrize(
  ("axis_name", "check_vma"), [more("data", False), (("data", "model"), True)]
)
def test_in_shard_map_axis_name_gives_the_whole_batchs_gradient_reduced_once(axis_name, check_vma):
  with jax.enable_x64(True):
    mesh = make_mesh(8) if axis_name == "data" else make_mesh(4, 2)
    cycle = microbatch_value_and_grad(
      loss_fn, microbatch_size=3, weight_fn=valid_tokens, axis_name=axis_name
    )
    mapped = jax.shard_map(
      cycle, mesh=mesh, in_specs=(P(), P(axis_name)), out_specs=P(), check_vma=check_vma
    )
    params, batch = jax.tree.map(jnp.asarray, (init_params(), make_batch()))
    compiled = jax.jit(mapped).lower(params, batch).compile()
    assert count_collectives(compiled).inside == {}
    trees.assert_close(compiled(params, batch), expected_gradients(), 1e-10)


def test_accumulators_take_the_shardings_of_the_parameters():
  mesh = make_mesh(8, kind=EXPLICIT)
  params = devices.put(np.ones((16, 4), np.float32), mesh, P("data"))

  def fun(params, x):
    return jnp.mean(params**2) * jnp.mean(x)

  cycle = jax.jit(microbatch_value_and_grad(fun, num_microbatches=2))
  assert cycle(params, jnp.ones(4))[1].sharding.is_equivalent_to(params.sharding, 2)
