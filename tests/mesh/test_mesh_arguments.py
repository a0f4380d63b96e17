"""What a step over a mesh takes: numbers, shapes and tracers, and meshes of two kinds of axes."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import loss_elsewhere, relaxed

from optax_accum import (
  accumulate,
  count_collectives,
  make_train_step,
  microbatch_value_and_grad,
)

kinds = pytest.mark.parametrize(
  "kind", [AUTO, EXPLICIT], ids=["auto", "explicit"]
)
everywhere = pytest.mark.parametrize(
  "mesh",
  [None, make_mesh(8), make_mesh(8, kind=EXPLICIT)],
  ids=["alone", "auto", "explicit"],
)


def init_params(dtype=np.float32):
  rng = np.random.default_rng(0)
  return {
    "w": np.asarray(rng.normal(size=(16, 8)), dtype),
    "b": np.zeros(8, dtype),
  }


def make_batch(dtype=np.float32):
  rng = np.random.default_rng(1)
  return np.asarray(rng.normal(size=(32, 16)), dtype)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


@everywhere
def test_python_numbers_may_be_arguments_carries_and_state(mesh):
  def fun(params, x, scale, carry):
    return scale * loss_fn(params, x), (
      {"decayed": 0.5 * carry["decayed"]},
      None,
    )

  tx = relaxed(optax.adam(0.1))
  make = functools.partial(make_train_step, fun, tx, mesh=mesh, carry_argnum=3)
  step = make(num_microbatches=2)
  params, x = jax.tree.map(jnp.asarray, init_params()), make_batch()
  fresh = tx.init(params)
  opt_state = (fresh[0]._replace(count=0), *fresh[1:])
  expected = 0.5 * float(jax.jit(loss_fn)(params, x))
  for count in (1, 2):
    params, opt_state, carry, metrics = step(
      params, opt_state, x, 0.5, {"decayed": 8.0}
    )
    assert (int(opt_state[0].count), float(carry["decayed"])) == (count, 2)
    assert carry["decayed"].dtype == jnp.float32
    if count == 1:
      np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


@kinds
def test_a_step_lowers_with_what_eval_shape_returns(kind):
  mesh, tx = make_mesh(8, kind=kind), relaxed(optax.adam(0.1))
  specs = {"w": P("data"), "b": P()}
  params = devices.put(init_params(), mesh, specs)
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh)
  opt_state = jax.eval_shape(tx.init, params)
  compiled = step.lower(params, opt_state, make_batch()).compile()
  sharded = NamedSharding(mesh, P("data"))
  assert compiled.output_shardings[0]["w"].is_equivalent_to(sharded, 2)
  shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: x + x, params))
  compiled = step.lower(shapes, opt_state, make_batch()).compile()
  # Over explicit axes a shape says how it is sharded, over automatic ones it does not.
  actual = compiled.output_shardings[0]["w"]
  assert actual.is_equivalent_to(sharded, 2) == (kind == EXPLICIT)
  shapes = jax.eval_shape(step, params, opt_state, make_batch())
  assert shapes[0]["w"].shape == (16, 8)
  # Shapes that are nowhere are put where arrays are that come from elsewhere.
  arrays = init_params(), tx.init(init_params()), make_batch()
  shapes = jax.eval_shape(lambda: arrays)
  texts = {step.lower(*args).as_text() for args in (arrays, shapes)}
  assert len(texts) == 1


@functools.cache
def expected_step_of_adam():
  """Parameters and loss of one step on one device, in float64."""
  with jax.enable_x64(True):
    tx, start = relaxed(optax.adam(0.1)), init_params(np.float64)
    step = oracle.whole_batch_step(loss_fn, tx)
    params, _, loss = oracle.take_steps(
      step, tx, start, [make_batch(np.float64)]
    )
    return params, loss


@pytest.mark.parametrize(
  "axis_types", [(EXPLICIT, AUTO), (AUTO, EXPLICIT), (EXPLICIT, EXPLICIT)]
)
def test_axes_may_be_of_two_kinds(axis_types):
  mesh = Mesh(
    np.array(jax.devices()).reshape(4, 2),
    ("data", "model"),
    axis_types=axis_types,
  )
  tx = relaxed(optax.adam(0.1))

  def fun(params, x):
    if axis_types[1] == EXPLICIT:
      params = jax.tree.map(lambda p: jax.reshard(p, P()), params)
    return loss_fn(params, x)

  step = make_train_step(fun, tx, num_microbatches=2, mesh=mesh, donate=False)
  with jax.enable_x64(True):
    specs = {"w": P("data", "model"), "b": P("model")}
    params, x = (
      devices.put(init_params(np.float64), mesh, specs),
      make_batch(np.float64),
    )
    new, _, metrics = step(params, tx.init(params), x)
    trees.assert_close(
      jax.device_get((new, metrics["loss"])), expected_step_of_adam(), 1e-10
    )
    for name, array in new.items():
      assert array.sharding.is_equivalent_to(params[name].sharding, array.ndim)


@pytest.mark.parametrize("mesh", [None, make_mesh(8)], ids=["alone", "mesh"])
def test_a_step_inside_shard_map_or_pmap_is_refused(mesh):
  """Where every device would take one for itself, and `mesh` maps over them already."""
  tx = optax.sgd(0.1)
  step = make_train_step(
    loss_fn, tx, num_microbatches=1, mesh=mesh, donate=False
  )
  params = jax.tree.map(jnp.asarray, init_params())
  match = (
    r"inside pmap or shard_map over .*'data'.*"
    r"microbatch_value_and_grad.*axis_name=.*accumulate.*axis_name="
  )
  x = jnp.ones((64, 16))  # enough rows for all on each device
  inside = jax.shard_map(
    step,
    mesh=make_mesh(8),
    in_specs=(P(), P(), P("data")),
    out_specs=P(),
    check_vma=False,
  )
  with pytest.raises(ValueError, match=match):
    inside(params, tx.init(params), x)
  mapped = jax.pmap(step, axis_name="data", in_axes=(None, None, 0))
  with pytest.raises(ValueError, match=match):
    mapped(params, tx.init(params), x.reshape(8, -1, 16))


def compiled_costs(lowered):
  compiled = lowered.compile()
  report = count_collectives(compiled).at_least(256)
  return (
    report.inside,
    report.outside,
    compiled.memory_analysis().temp_size_in_bytes,
  )


def test_sharded_parameters_stay_so_under_an_outer_jit():
  mesh, tx = make_mesh(8, kind=EXPLICIT), relaxed(optax.adam(0.1))
  step = make_train_step(
    loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False
  )
  params = devices.put(init_params(), mesh, {"w": P("data"), "b": P()})
  args = (params, tx.init(params), devices.put(make_batch(), mesh, P("data")))
  outer = jax.jit(lambda *args: step(*args)).lower(*args)
  inside, outside, temp = compiled_costs(step.lower(*args))
  assert compiled_costs(outer) == (inside, outside, temp)
  assert set(outside) == {"all-gather", "reduce-scatter"}
  new, state, metrics = jax.jit(lambda *args: step(*args))(*args)
  trees.assert_close(
    jax.device_get((new, state, metrics)), jax.device_get(step(*args)), 1e-6
  )
  assert new["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def test_sharded_parameters_stay_so_in_a_scan_over_steps():
  mesh, tx = make_mesh(8, kind=EXPLICIT), relaxed(optax.adam(0.1))
  step = make_train_step(
    loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False
  )
  x = devices.put(
    np.stack([make_batch(), 2 * make_batch()]), mesh, P(None, "data")
  )
  params = devices.put(init_params(), mesh, {"w": P("data"), "b": P()})
  opt_state = trees.strong(tx.init(params))

  @jax.jit
  def train(params, opt_state, x):
    def body(held, x):
      params, opt_state, metrics = step(*held, x)
      return (params, opt_state), metrics["loss"]

    return lax.scan(body, (params, opt_state), x)

  report = count_collectives(
    train.lower(params, opt_state, x).compile()
  ).at_least(256)
  assert (
    report.inside["all-gather"].operations
    == report.inside["reduce-scatter"].operations
    == 2
  )
  (actual, _), losses = train(params, opt_state, x)
  for i in range(2):
    params, opt_state, metrics = step(params, opt_state, np.asarray(x[i]))
    np.testing.assert_allclose(losses[i], metrics["loss"], rtol=1e-6)
  trees.assert_close(jax.device_get(actual), jax.device_get(params), 1e-6)


@kinds
def test_an_outer_jit_gives_the_same_numbers_on_any_mesh(kind):
  mesh, tx = make_mesh(4, 2, kind=kind), loss_elsewhere()
  step = make_train_step(
    loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False
  )
  params = devices.put(init_params(), mesh, {"w": P("data"), "b": P()})
  args = (params, tx.init(params), make_batch())
  actual = jax.jit(lambda *args: step(*args))(*args)
  trees.assert_close(jax.device_get(actual), jax.device_get(step(*args)), 1e-6)


def test_an_automatic_axis_beside_an_explicit_one_is_left_to_the_compiler():
  """Under an outer jit no type says how parameters are sharded over it."""
  mesh = Mesh(
    np.array(jax.devices()).reshape(4, 2),
    ("data", "model"),
    axis_types=(EXPLICIT, AUTO),
  )
  tx = relaxed(optax.sgd(0.1, momentum=0.9))
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh)
  params = devices.put(init_params(), mesh, {"w": P(None, "model"), "b": P()})
  specs = jax.tree.map(
    lambda x: P("data", "model") if x.ndim == 2 else P(), tx.init(params)
  )
  args = params, devices.put(tx.init(params), mesh, specs), make_batch()
  compiled = jax.jit(lambda *args: step(*args)).lower(*args).compile()
  assert compiled.output_shardings[0]["w"].is_equivalent_to(
    params["w"].sharding, 2
  )


@pytest.mark.parametrize("tx", ["adam", "chain"])
def test_a_state_stays_sharded_where_its_parameters_are_not(tx):
  tx = {
    "adam": relaxed(optax.adam(0.1)),
    "chain": optax.chain(
      accumulate(relaxed(optax.adam(0.1)), 2), optax.scale(1.0)
    ),
  }[tx]
  mesh = make_mesh(8, kind=EXPLICIT)
  params, batch = devices.put(jnp.ones(16), mesh), np.ones((16, 16), np.float32)
  state = trees.strong(tx.init(jnp.ones(16)))
  state = devices.put(
    state, mesh, jax.tree.map(lambda x: P("data") if x.ndim else P(), state)
  )

  def loss_fn(params, batch):
    return jnp.mean((batch @ params) ** 2)

  results = []
  # without and with a conditional around the step
  for options in (
    {},
    {"weight_fn": jnp.sum},
  ):
    step = make_train_step(
      loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False, **options
    )
    moved, new, _ = step(params, state, batch)
    for x, y in zip(
      jax.tree.leaves((moved, new)),
      jax.tree.leaves((params, state)),
      strict=True,
    ):
      assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    results.append(jax.device_get(step(moved, new, batch)[0]))
  np.testing.assert_allclose(*results, rtol=1e-6)
  assert abs(results[0][0] - 1) > 0.05


@pytest.mark.parametrize(("spec", "kind"), [(P(), AUTO), (P("data"), EXPLICIT)])
def test_a_loss_that_devices_reduced_is_that_of_the_whole_batch(kind, spec):
  """A mean of means, and a ratio of sums whose counts differ between devices."""
  mesh = make_mesh(4, kind=kind)
  tx = optax.sgd(1.0)

  def mean(params, x):
    return lax.pmean(loss_fn(params, x), "data")

  def ratio(summed):
    def fun(params, x):
      errors = jnp.sum((x @ params["w"] + params["b"][None]) ** 2, 1)
      # None of the last device's rows count, and all of the first one's.
      counted = jnp.where(x[:, 0] > x[:, 1] + x[:, 2], 1, 0).astype(x.dtype)
      return summed(jnp.sum(errors * counted)) / summed(jnp.sum(counted))

    return fun

  def over_devices(x):
    return lax.psum(x, "data")

  with jax.enable_x64(True):
    x = make_batch(np.float64)
    x[24:, 0] = -9
    x[:8, 0] = 9
    for reduced, fun in (
      (mean, loss_fn),
      (ratio(over_devices), ratio(lambda x: x)),
    ):
      loss, exact = jax.jit(jax.value_and_grad(fun))(init_params(np.float64), x)
      step = make_train_step(
        reduced, tx, num_microbatches=1, mesh=mesh, donate=False
      )
      params = devices.put(init_params(np.float64), mesh, {"w": spec, "b": P()})
      new, _, metrics = step(params, tx.init(params), x)
      grads = jax.tree.map(
        jnp.subtract, init_params(np.float64), jax.device_get(new)
      )
      trees.assert_close((metrics["loss"], grads), (loss, exact), 1e-12)


def test_in_a_users_shard_map_a_reduced_loss_is_that_of_the_whole_batch():
  params, x, mesh = init_params(), make_batch(), make_mesh(4)
  exact = jax.jit(jax.grad(loss_fn))(params, x)
  for reduced in (True, False):
    fun = (
      (lambda p, x: lax.pmean(loss_fn(p, x), "data")) if reduced else loss_fn
    )
    split = microbatch_value_and_grad(fun, num_microbatches=2, axis_name="data")
    for check_vma in (True, False):
      mapped = jax.shard_map(
        split,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
      )
      trees.assert_close(jax.jit(mapped)(params, x)[1], exact, 1e-5)
