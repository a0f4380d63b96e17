"""Rows over several axes of a mesh: the global batch's step, reduced once over all of them."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, oracle, trees
from support.devices import AUTO, EXPLICIT
from support.optimizers import clipped_adamw, with_loss_elsewhere
from support.padded import init_params, loss_fn, make_batch, valid
from support.samples import more

from optax_accum import count_collectives, make_train_step

AXES = ("data", "fsdp")
kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


def make_mesh(*types):
  return Mesh(np.array(jax.devices()).reshape(4, 2), AXES, axis_types=types)


@functools.cache
def whole_batch_step():
  """The parameters after a step, the loss, and the loss at twice the first parameters."""
  with jax.enable_x64(True):
    tx = with_loss_elsewhere(clipped_adamw())
    step = oracle.whole_batch_step(loss_fn, tx)
    params, (_, elsewhere), loss = oracle.take_steps(step, tx, init_params(), [make_batch()])
    # A mean over the devices' own means would be told apart.
    parts = trees.blocks(make_batch(), 8)
    of_parts = jax.jit(jax.vmap(loss_fn, in_axes=(None, 0)))(init_params(), parts)
    assert abs(np.mean(of_parts) - loss) > 1e-3
    assert abs(elsewhere - loss) > 1
    return params, loss, elsewhere


SPECS = {
  "whole": {"w": P(), "b": P(), "three": P()},
  "over one": {"w": P("data"), "b": P(), "three": P()},
  "over the other": {"w": P(None, "fsdp"), "b": P("fsdp"), "three": P()},
  "one dimension over both": {"w": P(AXES), "b": P(AXES), "three": P()},
  "in another order": {"w": P(None, ("fsdp", "data")), "b": P(("fsdp", "data")), "three": P()},
  "two dimensions": {"w": P("fsdp", "data"), "b": P("data"), "three": P()},
}


@pytest.mark.parametrize(("name", "types"), [
  ("whole", (AUTO, AUTO)),
  ("over one", (EXPLICIT, EXPLICIT)),
  more("over the other", (AUTO, AUTO)),
  ("one dimension over both", (AUTO, AUTO)),
  more("in another order", (EXPLICIT, EXPLICIT)),
  ("two dimensions", (AUTO, EXPLICIT)),
])  # fmt: skip
def test_parameters_may_be_sharded_over_some_of_the_data_axes(name, types):
  specs, tx = SPECS[name], clipped_adamw()
  if name == "two dimensions":  # `value_fn` gathers them too
    tx = with_loss_elsewhere(tx)
  with jax.enable_x64(True):
    mesh = make_mesh(*types)
    step = make_train_step(
      loss_fn, tx, num_microbatches=2, weight_fn=valid, mesh=mesh, data_axis=AXES, donate=False
    )
    params = devices.put(init_params(), mesh, specs)
    args = params, tx.init(params), make_batch()
    new, state, metrics = step(*args)
    expected, loss, elsewhere = whole_batch_step()
    trees.assert_close(jax.device_get((new, metrics["loss"])), (expected, loss), 1e-12)
    if name == "two dimensions":
      np.testing.assert_allclose(state[1], elsewhere, rtol=1e-12)
    for leaf, x in new.items():
      sharding = NamedSharding(mesh, specs[leaf])
      assert x.sharding.is_equivalent_to(sharding, x.ndim)
      assert optax.tree.get(state, "mu")[leaf].sharding.is_equivalent_to(sharding, x.ndim)
    report = count_collectives(step.lower(*args).compile())
  w, b = 8 * 16 * 8, 8 * 8
  if name == "whole":  # one reduction over both axes
    assert report.inside == {}
    assert set(report.outside) == {"all-reduce"}
    assert report.outside["all-reduce"].operations == 1
    assert w + b <= report.outside["all-reduce"].bytes <= w + b + 64
  # a shard is reduced over the axis that it is not sharded over
  sent = report.outside
  if name == "over one":
    assert sent["all-gather"] == sent["reduce-scatter"] == (1, w)
    # a shard, a bias, scalars
    assert sent["all-reduce"].bytes < w / 4 + b + 128
  if name == "one dimension over both":
    assert sent["reduce-scatter"] == (2, w + b)
    reduced = [op for op in report.operations if op.kind == "all-reduce"]
    assert sum(op.bytes for op in reduced) <= 128  # scalars


@pytest.mark.parametrize(
  ("data_kind", "options"),
  [more(EXPLICIT, {"num_microbatches": 4}), (AUTO, {"microbatch_size": 20})],
)
def test_explicit_and_automatic_axes_may_be_beside_the_data_axis(options, data_kind):
  with jax.enable_x64(True):
    mesh = Mesh(
      np.array(jax.devices()).reshape(2, 2, 2),
      ("data", "explicit", "auto"),
      axis_types=(data_kind, EXPLICIT, AUTO),
    )
    tx = clipped_adamw()

    def fun(params, batch):
      # on each device
      assert jax.typeof(params["w"]).sharding.spec == P(None, "explicit")
      return loss_fn(params, batch)

    step = make_train_step(fun, tx, weight_fn=valid, mesh=mesh, donate=False, **options)
    specs = {
      "w": P("data" if "num_microbatches" in options else None, "explicit"),
      "b": P(),
      "three": P(),
    }
    params = devices.put(init_params(), mesh, specs)
    new, _, metrics = step(params, tx.init(params), make_batch())
    expected = whole_batch_step()[:2]
    trees.assert_close(jax.device_get((new, metrics["loss"])), expected, 1e-12)
    assert jax.tree.map(lambda x: x.sharding.spec, new) == specs


@kinds
def test_over_two_axes_aux_keys_and_carries_are_as_over_one(kind):
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
