"""Rows over further automatic axes than `data_axis`: the step is the same.

Gradients are reduced over `data_axis` once per cycle. Over the other axes the compiler gathers
parameters where they are used, and reduces in every microbatch.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices, trees
from support.compiled import groups_of
from support.devices import AUTO, EXPLICIT
from support.layered import (
  AXES,
  BOTH,
  init_params,
  loss_fn,
  losses_of,
  make_batch,
  over_fsdp,
  ROWS,
  valid,
  whole_batch,
  without_gathers,
)
from support.optimizers import clipped_adamw
from support.samples import more

from optax_accum import _versions, count_collectives, make_train_step


def where_empty(gathers, params, batch):
  """The same loss, which is 0 and not 0/0 where all is padding."""
  losses = losses_of(params, batch, gathers) * batch["mask"]
  return jnp.sum(losses) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def over_replicas(tree, mesh):
  """Each parameter over the data axis, so that it is gathered and its gradient scattered once."""
  return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "replica"), tree)


def over_all(tree, mesh):
  """The last dimension over both; it is gathered for the step."""
  return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), AXES[:2]), tree)


def beside_replicas(tree, mesh):
  """The dimension before the last over the data axis too, and the last as in `over_fsdp`."""
  dims = lambda spec: [*[None] * (3 - len(spec)), *spec]  # noqa: E731

  def spec(x, own):
    *first, before, last = dims(own)
    before = ("replica",) if before is None else (before, "replica")
    return P(*[*first, before if x.ndim > 1 and x.shape[-2] % 4 == 0 else None, last][-x.ndim :])

  return jax.tree.map(spec, tree, over_fsdp(tree, mesh))


def three_steps(shape, loss, *, batch=None, rows=None, specs=over_fsdp, state=None, **options):
  """Parameters after three steps and the metrics of the last, in NumPy."""
  mesh = devices.make_mesh(*shape, axes=AXES)
  params, tx = init_params(), clipped_adamw()
  params = devices.put(params, mesh, specs(params, mesh))
  opt_state = trees.strong(tx.init(params))
  if state is not None:  # ZeRO-1
    to = devices.shardings(params, mesh, state(params, mesh))
    opt_state = optax.tree_utils.tree_map_params(tx, jax.device_put, opt_state, to)
  batch = devices.put(batch or make_batch(), mesh, rows or P(AXES[: len(shape)][:2]))
  step = make_train_step(loss, tx, mesh=mesh, data_axis="replica", **options)
  shardings = jax.tree.map(lambda x: x.sharding, (params, optax.tree.get(opt_state, "nu")))
  for _ in range(3):
    params, opt_state, metrics = step(params, opt_state, batch)
  now = jax.tree.map(lambda x: x.sharding, (params, optax.tree.get(opt_state, "nu")))
  assert now == shardings
  return jax.device_get((params, metrics))


SHAPES = [(2, 4), (4, 2), (1, 8), (2, 2, 2)]
TIMES = {"num_microbatches": 4, "weight_fn": valid}


@pytest.mark.parametrize(
  "shape", [x if len(x) == 3 or x == SHAPES[0] else more(x) for x in SHAPES], ids=str
)
def test_three_steps_are_those_of_the_whole_batch(shape):
  loss_of = loss_fn if len(shape) == 2 else without_gathers
  with jax.enable_x64(True):
    expected, loss = whole_batch()
    params, metrics = three_steps(shape, loss_of, **TIMES)
    trees.assert_close(params, expected, 1e-10)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-10)
    if shape == SHAPES[0]:  # a mean of means is another step
      naive, _ = three_steps(shape, loss_of, num_microbatches=4)
      assert np.abs(naive["head"] - expected["head"]).max() > 1e-4


EMPTY = range(1, ROWS // 2, 4)  # of 4 microbatches one, on half of the replicas
WAYS = {
  "some are empty": {"batch": make_batch(EMPTY)},
  "FSDP over replicas": {"specs": over_replicas},
  "over both": {"specs": beside_replicas},
  "over both on one dimension": {"specs": over_all},
  "ZeRO-1": {"state": beside_replicas},
}
if _versions.ADDS_TO_REFERENCES:
  WAYS["in_place"] = {"in_place": True, "batch": make_batch(EMPTY)}


# Each way on a mesh, each mesh with a way or two.
ON_SHAPES = [(way, SHAPES[i % 4]) for i, way in enumerate(WAYS)]


@pytest.mark.parametrize(
  ("way", "shape"),
  [case if case[0] in ("ZeRO-1", "in_place") else more(*case) for case in ON_SHAPES],
)
def test_however_it_is_held_and_sent_the_step_is_that_of_the_whole_batch(way, shape):
  with jax.enable_x64(True):
    loss_of = loss_fn if len(shape) == 2 else without_gathers
    # where others run a microbatch, one that is empty runs too
    if way == "in_place":
      loss_of = functools.partial(where_empty, len(shape) == 2)
    params, _ = three_steps(shape, loss_of, **TIMES, **WAYS[way])
    expected, _ = whole_batch(EMPTY if "batch" in WAYS[way] else ())
    trees.assert_close(params, expected, 1e-10)


def test_leaves_of_a_batch_need_not_be_sharded_alike():
  rows = {"words": BOTH, "mask": P("replica")}
  with jax.enable_x64(True):
    params, _ = three_steps((2, 4), loss_fn, rows=rows, **TIMES)
    trees.assert_close(params, whole_batch()[0], 1e-10)


# What the devices of one replica exchange: over "fsdp", and over "model".
WITHIN = {
  (2, 4): {((0, 1, 2, 3), (4, 5, 6, 7))},
  (2, 2, 2): {((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 1), (2, 3), (4, 5), (6, 7))},
}


@pytest.mark.parametrize("shape", [(2, 4), more((2, 2, 2))], ids=str)
def test_replicas_reduce_once_a_cycle(shape):
  mesh, tx = devices.make_mesh(*shape, axes=AXES), optax.sgd(0.1)
  params = jax.tree.map(np.float32, init_params())
  specs = over_fsdp(params, mesh)
  params = devices.abstract(params, mesh, specs)
  batch = devices.abstract(jax.tree.map(jnp.asarray, make_batch()), mesh, BOTH)
  batch["mask"] = batch["mask"].update(dtype=jnp.float32)
  loss_of = loss_fn if len(shape) == 2 else without_gathers
  options = {"mesh": mesh, "data_axis": "replica"}
  step = make_train_step(loss_of, tx, num_microbatches=4, **options)
  found = count_collectives(step.lower(params, tx.init(params), batch).compile()).operations
  shards = (x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params))
  gradients = sum(4 * math.prod(shard) for shard in shards)
  replicas = ((0, 4), (1, 5), (2, 6), (3, 7))
  between = [c for c in found if groups_of(c) == replicas and c.bytes > 64]
  assert {c.executions for c in between} == {1}
  assert sum(c.bytes for c in between) == pytest.approx(gradients, rel=0.02)
  in_loops = {groups_of(c) for c in found if c.loop and c.bytes > 64}
  assert in_loops - {replicas, ()} == WITHIN[shape]


def test_an_axis_of_one_device_shards_nothing():
  mesh, tx = devices.make_mesh(8, 1, axes=AXES), optax.sgd(0.1)
  step = make_train_step(loss_fn, tx, mesh=mesh, data_axis="replica", num_microbatches=4)
  params = jax.tree.map(np.float32, init_params())
  batch = jax.tree.map(jnp.asarray, make_batch())
  batch["mask"] = jnp.ones_like(batch["mask"], jnp.float32)
  metrics = step(params, tx.init(params), devices.put(batch, mesh, P("fsdp")))[-1]
  assert np.isfinite(metrics["loss"])


def test_an_explicit_data_axis_of_one_device_is_among_those_of_the_rows():
  axes, kinds = ("replica", "data", "fsdp"), (EXPLICIT, EXPLICIT, AUTO)
  mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), axes, axis_types=kinds)
  rows = np.arange(32, dtype=np.float32).reshape(16, 2)
  step = make_train_step(
    lambda w, x: jnp.mean((x @ w) ** 2),
    optax.sgd(0.1),
    num_microbatches=2,
    mesh=mesh,
    data_axis=axes[:2],
  )
  w = jnp.ones(2)
  metrics = step(w, optax.sgd(0.1).init(w), devices.put(rows, mesh, P(axes)))[-1]
  assert metrics["loss"] == np.mean(rows.sum(1) ** 2)
