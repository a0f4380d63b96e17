"""What ends a cycle, of `accumulate` and of `add` and `finish`, compiled for TPUs and GPUs. Run as test_forgotten_sums.py."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices
from test_forgotten_sums import mesh, PLATFORMS

from optax_accum import accumulate, accumulate_specs, count_collectives, make_train_step

PARAMS = {"w": np.zeros((64, 128), np.float32), "v": np.zeros((128, 8), np.float32)}
GRADIENTS = 4 * (64 * 128 + 128 * 8)


def loss_fn(params, batch):
  return jnp.mean(jnp.tanh(batch @ params["w"]) @ params["v"])


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("in_a_scan", [False, True])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_gradients_are_summed_where_a_cycle_ends(platform, in_a_scan, reduces):
  """Of what it combines, XLA for GPU leaves no names: that of the conditional is left."""
  tx = accumulate(optax.sgd(0.1, momentum=0.9), 4, axis_name="data")
  specs = P(), accumulate_specs(jax.eval_shape(tx.init, PARAMS), "data")

  def call(held, batch):
    # of own rows: there are no types, check_vma=False
    grads = jax.grad(loss_fn)(held[0], batch)
    grads = lax.pmean(grads, "data") if reduces else grads
    return tx.apply(grads, held[1], held[0]), None

  def calls(held, batch):
    return lax.scan(call, held, batch.reshape(4, -1, 64))[0] if in_a_scan else call(held, batch)[0]

  def mapped(fun, in_specs, out_specs):
    return jax.shard_map(
      fun, mesh=mesh(platform), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  held = PARAMS, jax.eval_shape(mapped(tx.init, P(), specs[1]), PARAMS)
  rows = specs, P("data")
  args = devices.abstract((held, np.zeros((256, 64), np.float32)), mesh(platform), rows)
  report = count_collectives(jax.jit(mapped(calls, rows, specs)).lower(*args).compile())
  # XLA for TPU prints no trips, and then a loop counts once.
  times = 4 if in_a_scan and not report.unknown_trip_counts else 1
  assert report.at_cycle_end == {"all-reduce": (times, times * GRADIENTS)}
  if reduces:
    with pytest.raises(AssertionError, match=f"{times} a call: all-reduce"):
      report.assert_once_per_cycle()
  else:
    assert report.inside == report.outside == {}
    report.assert_once_per_cycle()


def large(program):
  """The collectives of a gradient's size, and the loops that they are in."""
  found = count_collectives(program).at_least(1024).operations
  return {(op.kind, op.loop) for op in found}


@pytest.mark.parametrize("spec", [P(), P("data")], ids=["whole", "shards"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_microbatches_that_arrive_send_gradients_where_they_end(platform, spec):
  chips = mesh(platform)
  tx = optax.sgd(0.1, momentum=0.9)

  def compiled(call, *args):
    return call.lower(*args).compile()

  def step_in(parts):
    return make_train_step(loss_fn, tx, num_microbatches=parts, mesh=chips)

  params = devices.abstract(PARAMS, chips, spec)
  like = jax.eval_shape(tx.init, PARAMS)
  held = jax.tree.map(lambda x: spec if x.ndim else P(), like)
  opt_state = devices.abstract(like, chips, held)
  rows = devices.abstract(np.zeros((256, 64), np.float32), chips, P("data"))
  batch = rows.update(shape=(64, 64))
  step = step_in(1)
  cycle = step.add.eval_shape(step.begin(params), params, batch)
  add = compiled(step.add, cycle, params, batch)
  finish = compiled(step.finish, params, opt_state, cycle)
  whole = compiled(step_in(4), params, opt_state, rows)
  gathered, reduced, both = map(large, (add, finish, whole))
  assert gathered == ({("all-gather", None)} if spec else set())
  # XLA for TPU scatters what is as small by an all-reduce.
  assert reduced in ({("all-reduce", None)}, {("reduce-scatter", None)})
  assert both == gathered | reduced
  found, expected = (x.memory_analysis() for x in (add, whole))
  own = GRADIENTS // 8 if spec else GRADIENTS
  sums = found.alias_size_in_bytes
  # Added to in place, and no state is there: parameters, sums and the rows of a device.
  assert GRADIENTS <= sums < GRADIENTS + 4096
  assert found.argument_size_in_bytes < own + sums + 64 * 64 * 4 // 8 + 8192
  assert found.temp_size_in_bytes <= expected.temp_size_in_bytes + 1024
