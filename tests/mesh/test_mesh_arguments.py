"""What a step over a mesh takes: numbers, shapes and tracers, and meshes of two kinds of axes."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.devices import AUTO, EXPLICIT, make_mesh
from support.optimizers import relaxed
from support.samples import more

from optax_accum import count_collectives, make_train_step

kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
everywhere = pytest.mark.parametrize(
  "mesh", [None, more(make_mesh(8)), make_mesh(8, kind=EXPLICIT)], ids=["alone", "auto", "explicit"]
)


def init_params(dtype=np.float32):
  rng = np.random.default_rng(0)
  return {"w": np.asarray(rng.normal(size=(16, 8)), dtype), "b": np.zeros(8, dtype)}


def make_batch(dtype=np.float32):
  rng = np.random.default_rng(1)
  return np.asarray(rng.normal(size=(32, 16)), dtype)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


@everywhere
def test_python_numbers_may_be_arguments_carries_and_state(mesh):
  def fun(params, x, scale, carry):
    return scale * loss_fn(params, x), ({"decayed": 0.5 * carry["decayed"]}, None)

  tx = relaxed(optax.adam(0.1))
  make = functools.partial(make_train_step, fun, tx, mesh=mesh, carry_argnum=3)
  step = make(num_microbatches=2)
  params, x = jax.tree.map(jnp.asarray, init_params()), make_batch()
  fresh = tx.init(params)
  opt_state = (fresh[0]._replace(count=0), *fresh[1:])
  expected = 0.5 * float(jax.jit(loss_fn)(params, x))
  for count in (1, 2):
    params, opt_state, carry, metrics = step(params, opt_state, x, 0.5, {"decayed": 8.0})
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


@pytest.mark.parametrize("mesh", [None, make_mesh(8)], ids=["alone", "mesh"])
def test_a_step_inside_shard_map_or_pmap_is_refused(mesh):
  """Where every device would take one for itself, and `mesh` maps over them already."""
  tx = optax.sgd(0.1)
  step = make_train_step(loss_fn, tx, num_microbatches=1, mesh=mesh, donate=False)
  params = jax.tree.map(jnp.asarray, init_params())
  match = (
    r"inside pmap or shard_map over .*'data'.*"
    r"microbatch_value_and_grad.*axis_name=.*accumulate.*axis_name="
  )
  x = jnp.ones((64, 16))  # enough rows for all on each device
  inside = jax.shard_map(
    step, mesh=make_mesh(8), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
  )
  with pytest.raises(ValueError, match=match):
    inside(params, tx.init(params), x)
  mapped = jax.pmap(step, axis_name="data", in_axes=(None, None, 0))
  with pytest.raises(ValueError, match=match):
    mapped(params, tx.init(params), x.reshape(8, -1, 16))


def compiled_costs(lowered):
  compiled = lowered.compile()
  report = count_collectives(compiled).at_least(256)
  return report.inside, report.outside, compiled.memory_analysis().temp_size_in_bytes


def test_sharded_parameters_stay_so_under_an_outer_jit():
  mesh, tx = make_mesh(8, kind=EXPLICIT), relaxed(optax.adam(0.1))
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh, donate=False)
  params = devices.put(init_params(), mesh, {"w": P("data"), "b": P()})
  args = (params, tx.init(params), devices.put(make_batch(), mesh, P("data")))
  outer = jax.jit(lambda *args: step(*args)).lower(*args)
  inside, outside, temp = compiled_costs(step.lower(*args))
  assert compiled_costs(outer) == (inside, outside, temp)
  assert set(outside) == {"all-gather", "reduce-scatter"}
  new, state, metrics = jax.jit(lambda *args: step(*args))(*args)
  trees.assert_close(jax.device_get((new, state, metrics)), jax.device_get(step(*args)), 1e-6)
  assert new["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def test_an_automatic_axis_beside_an_explicit_one_is_left_to_the_compiler():
  """Under an outer jit no type says how parameters are sharded over it."""
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(EXPLICIT, AUTO))
  tx = relaxed(optax.sgd(0.1, momentum=0.9))
  step = make_train_step(loss_fn, tx, num_microbatches=2, mesh=mesh)
  params = devices.put(init_params(), mesh, {"w": P(None, "model"), "b": P()})
  specs = jax.tree.map(lambda x: P("data", "model") if x.ndim == 2 else P(), tx.init(params))
  args = params, devices.put(tx.init(params), mesh, specs), make_batch()
  compiled = jax.jit(lambda *args: step(*args)).lower(*args).compile()
  assert compiled.output_shardings[0]["w"].is_equivalent_to(params["w"].sharding, 2)
