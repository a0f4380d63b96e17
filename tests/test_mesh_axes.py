"""Rows over several axes of a mesh: the global batch's step, reduced once over all of them."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.devices import AUTO, EXPLICIT
from support.optimizers import loss_elsewhere, relaxed

from optax_accum import count_collectives, make_train_step

AXES = ("data", "fsdp")
kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
when = pytest.mark.parametrize("reduce_gradients", ["per_cycle", "per_microbatch"])


def make_mesh(*types):
  return Mesh(np.array(jax.devices()).reshape(4, 2), AXES, axis_types=types)


def init_params(dtype=np.float64):
  rng = np.random.default_rng(0)
  return {"w": np.asarray(rng.normal(size=(16, 8)), dtype), "b": np.asarray(np.ones(8), dtype)}


def make_batch(dtype=np.float64, rows=32):
  """Padded rows: the last ones, and so the last devices, hold far fewer valid numbers."""
  rng = np.random.default_rng(1)
  valid = rng.random((rows, 8)) < np.linspace(1.0, 0.2, rows)[:, None]
  x = rng.normal(size=(rows, 16))
  return {"x": np.asarray(x, dtype), "valid": np.asarray(valid, dtype)}


def loss_fn(params, batch):
  out = (batch["x"] @ params["w"] + params["b"][None]) ** 2
  return jnp.sum(out * batch["valid"]) / jnp.sum(batch["valid"])


def valid(batch):
  return jnp.sum(batch["valid"])


def optimizer():
  return relaxed(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


@functools.cache
def whole_batch_step():
  with jax.enable_x64(True):
    params, batch, tx = jax.tree.map(jnp.asarray, init_params()), make_batch(), optimizer()
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params)
    return jax.device_get((optax.apply_updates(params, updates), loss))


SPECS = {
  "whole": {"w": P(), "b": P()},
  "over one": {"w": P("data"), "b": P()},
  "over the other": {"w": P(None, "fsdp"), "b": P("fsdp")},
  "one dimension over both": {"w": P(AXES), "b": P(AXES)},
  "in another order": {"w": P(None, ("fsdp", "data")), "b": P(("fsdp", "data"))},
  "two dimensions": {"w": P("fsdp", "data"), "b": P("data")},
}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
  ("kind", "reduce_gradients"), [(AUTO, "per_cycle"), (EXPLICIT, "per_microbatch")]
)
def test_parameters_sharded_over_some_of_the_data_axes(kind, specs, reduce_gradients):
  with jax.enable_x64(True):
    mesh, tx = make_mesh(kind, kind), optimizer()
    step = make_train_step(
      loss_fn,
      tx,
      num_microbatches=2,
      weight_fn=valid,
      mesh=mesh,
      data_axis=AXES,
      reduce_gradients=reduce_gradients,
      donate=False,
    )
    params = devices.put(init_params(), mesh, specs)
    new, state, metrics = step(params, tx.init(params), make_batch())
    expected = whole_batch_step()
    trees.assert_close(jax.device_get((new, metrics["loss"])), expected, 1e-12)
    for name, x in new.items():
      sharding = NamedSharding(mesh, specs[name])
      assert x.sharding.is_equivalent_to(sharding, x.ndim)
      assert state[1][0].mu[name].sharding.is_equivalent_to(sharding, x.ndim)
    # A mean over the devices' own means would be told apart.
    parts = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), make_batch())
    wrong = np.mean([loss_fn(init_params(), trees.index(parts, i)) for i in range(8)])
    assert abs(wrong - expected[1]) > 1e-3


@pytest.mark.parametrize("data_kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
  "options",
  [{}, {"reduce_gradients": "per_microbatch"}, {"microbatch_size": 20}],
  ids=["plain", "per microbatch", "ragged"],
)
def test_explicit_and_automatic_axes_beside_the_data_axis(options, data_kind):
  with jax.enable_x64(True):
    mesh = Mesh(
      np.array(jax.devices()).reshape(2, 2, 2),
      ("data", "explicit", "auto"),
      axis_types=(data_kind, EXPLICIT, AUTO),
    )
    tx, count = optimizer(), None if "microbatch_size" in options else 4

    def fun(params, batch):
      assert jax.typeof(params["w"]).sharding.spec == P(None, "explicit")  # on each device
      return loss_fn(params, batch)

    step = make_train_step(
      fun, tx, num_microbatches=count, weight_fn=valid, mesh=mesh, donate=False, **options
    )
    specs = {"w": P("data" if "reduce_gradients" in options else None, "explicit"), "b": P()}
    params = devices.put(init_params(), mesh, specs)
    new, _, metrics = step(params, tx.init(params), make_batch())
    trees.assert_close(jax.device_get((new, metrics["loss"])), whole_batch_step(), 1e-12)
    assert jax.tree.map(lambda x: x.sharding.spec, new) == specs


@when
def test_value_fn_gathers_over_both_axes(reduce_gradients):
  with jax.enable_x64(True):
    mesh, tx = make_mesh(AUTO, EXPLICIT), loss_elsewhere()
    step = make_train_step(
      loss_fn,
      tx,
      num_microbatches=2,
      weight_fn=valid,
      mesh=mesh,
      data_axis=AXES,
      reduce_gradients=reduce_gradients,
    )
    params = devices.put(init_params(), mesh, SPECS["two dimensions"])
    _, elsewhere, _ = step(params, tx.init(params), make_batch())
    twice = jax.tree.map(lambda x: 2 * x, init_params())
    np.testing.assert_allclose(elsewhere, loss_fn(twice, make_batch()), rtol=1e-12)


@pytest.mark.parametrize("rows", [48, 56])
@kinds
def test_microbatches_that_do_not_divide_the_batch(kind, rows):
  with jax.enable_x64(True):
    mesh, tx, batch = make_mesh(kind, kind), optax.sgd(0.1), make_batch(rows=rows)
    step = make_train_step(
      loss_fn, tx, microbatch_size=32, weight_fn=valid, mesh=mesh, data_axis=AXES
    )
    batch = devices.put(batch, mesh, P("data"))  # rows over one of the two are moved to both
    _, _, metrics = step(init_params(), tx.init(init_params()), batch)
    np.testing.assert_allclose(metrics["loss"], loss_fn(init_params(), make_batch(rows=rows)))


@kinds
def test_aux_keys_and_carries_over_two_axes(kind):
  def fun(params, x, count, key):
    aux = {"row": x, "noise": jax.random.uniform(key), "first": x[0], "last": x[-1]}
    return jnp.mean(params * x), ({"seen": count["seen"] * 0 + jnp.max(x)}, aux)

  step = make_train_step(
    fun,
    optax.sgd(1.0),
    num_microbatches=2,
    carry_argnum=2,
    rng_argnums=3,
    aux_reduction={"row": "concat", "noise": "stack", "first": "stack", "last": "last"},
    mesh=make_mesh(kind, kind),
    data_axis=AXES,
  )
  x = np.arange(32, dtype=np.float32)
  count = {"seen": np.float32(0)}
  params, _, carry, metrics = step(
    np.float32(2), optax.sgd(1.0).init(0.0), x, count, jax.random.key(0)
  )
  aux = metrics["aux"]
  np.testing.assert_allclose([params, metrics["loss"]], [2 - x.mean(), 2 * x.mean()])
  np.testing.assert_array_equal(aux["row"], x)
  # Device by device, the second axis faster; on each its microbatches in turn.
  np.testing.assert_array_equal(aux["first"], np.stack([x[::4], x[1::4]], 1).ravel())
  assert np.unique(aux["noise"]).size == 16
  assert float(aux["last"]) == 31
  # Of each device's last microbatch the largest, on average.
  np.testing.assert_allclose(carry["seen"], x[3::4].mean())


def compiled_step(specs, kind=AUTO, count=4, data_axis=AXES, **options):
  mesh, tx = make_mesh(kind, kind), optax.adam(0.1)
  step = make_train_step(
    loss_fn, relaxed(tx), num_microbatches=count, mesh=mesh, data_axis=data_axis, **options
  )
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), init_params())
  params = devices.abstract(shapes, mesh, specs)
  opt_state = tx.init(devices.put(init_params(np.float32), mesh, specs))
  return step.lower(params, opt_state, make_batch(np.float32)).compile()


@kinds
def test_one_reduction_over_both_axes(kind):
  report = count_collectives(compiled_step(SPECS["whole"], kind))
  assert report.inside == {}
  assert set(report.outside) == {"all-reduce"}
  assert report.outside["all-reduce"].operations == 1
  one = count_collectives(compiled_step(SPECS["whole"], kind, data_axis="data"))
  assert one.outside == report.outside  # as over one axis


@when
def test_a_shard_is_reduced_over_the_axis_that_it_is_not_sharded_over(reduce_gradients):
  compiled = compiled_step(SPECS["over one"], reduce_gradients=reduce_gradients)
  report = count_collectives(compiled)
  times = 1 if reduce_gradients == "per_cycle" else 4
  where = report.outside if times == 1 else report.inside
  size = 4 * 16 * 8
  assert where["all-gather"] == where["reduce-scatter"] == (times, times * size)
  assert where["all-reduce"].bytes < times * (size / 4 + 4 * 8 + 64)  # a shard, a bias, scalars
  compiled = compiled_step(SPECS["one dimension over both"], reduce_gradients=reduce_gradients)
  report = count_collectives(compiled)
  where = report.outside if times == 1 else report.inside
  assert where["reduce-scatter"] == (2 * times, times * (size + 4 * 8))
  reduced = [op for op in report.operations if op.kind == "all-reduce"]
  assert sum(op.bytes for op in reduced) <= 64  # scalars


def test_one_name_in_a_tuple_is_that_axis():
  def text(data_axis):
    mesh, tx = make_mesh(AUTO, AUTO), optax.sgd(0.1)
    step = make_train_step(
      loss_fn, tx, num_microbatches=2, mesh=mesh, data_axis=data_axis, rng_argnums=()
    )
    return step.lower(init_params(np.float32), tx.init({}), make_batch(np.float32)).as_text()

  assert text("data") == text(("data",)) == text(["data"])
  assert text("data") != text(AXES)


def test_axes_that_cannot_be():
  make = functools.partial(
    make_train_step, loss_fn, optax.sgd(0.1), num_microbatches=2, mesh=make_mesh(AUTO, AUTO)
  )
  with pytest.raises(ValueError, match=r"data_axis='model' is no axis of the mesh.*'data', 'fsdp'"):
    make(data_axis=("data", "model"))
  for axes in ((), ("data", "data")):
    with pytest.raises(ValueError, match=r"must name one axis or more, each once"):
      make(data_axis=axes)
  step = make(data_axis=AXES, donate=False)
  params = init_params(np.float32)
  match = r"28 rows, which the 8 devices of axes \('data', 'fsdp'\) do not divide: use 24 or 32"
  with pytest.raises(ValueError, match=match):
    step(params, optax.sgd(0.1).init(params), make_batch(np.float32, rows=28))
