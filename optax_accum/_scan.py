"""The loop: a function run microbatch by microbatch in a scan, and its outputs reduced."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _across_devices, _reduction_trees, _validate, _weighted_mean
from optax_accum._across_devices import AxisName
from optax_accum._split import Call, Microbatch
from optax_accum._weighted_mean import Weight


class MicrobatchStats(NamedTuple):
  """What was counted over the microbatches of one batch.

  Attributes:
    total_weight: float32 scalar, the sum of the weights that went into the mean.
    skipped_microbatches: int32 scalar, how many were left out because they were not finite.
  """

  total_weight: jax.Array
  skipped_microbatches: jax.Array


class Reduced(NamedTuple):
  """What all microbatches gave together."""

  carry: tuple[Any, ...]  # the threaded argument at the end; empty where there is none
  outputs: Any
  stats: Any  # a MicrobatchStats


def run(call: Call, reductions: Any, root: str = "output") -> Reduced:
  """Runs a call's function on one microbatch after the other.

  `reductions` is a prefix tree over the outputs, of `Reduction`; messages call the outputs `root`.
  """
  split, axis_name = call.split, call.split.axis_name
  if call.rows == call.size and not split.weighs and axis_name is None:
    whole = call.run(0, call.carry, call.batch, call.rows)
    each, leaves, treedef = _matched(reductions, whole.outputs, root, call)
    only = [r.only(x) for r, x in zip(each, leaves, strict=True)]
    return Reduced(whole.carry, treedef.unflatten(only), _stats(call.rows))

  full, tail_rows = divmod(call.rows, call.size)
  take, tail = call.cut(full)
  like = jax.eval_shape(lambda: call.run(0, call.carry, take(0), call.size))
  # Leaves and not trees, because what is static in a tree may be another object in every trace.
  each, leaves, treedef = _matched(reductions, like.outputs, root, call)
  if tail_rows:
    smaller = jax.eval_shape(lambda: call.run(0, call.carry, tail, tail_rows)).outputs
    names = [name for name, _ in _validate.named_leaves(root, like.outputs)]
    for r, name, x, y in zip(each, names, leaves, jax.tree.leaves(smaller), strict=True):
      r.check_tail(name, x, y)

  def add(held: Microbatch, index: ArrayLike, batch: Any, rows: int) -> tuple[Microbatch, Any]:
    new = call.run(index, held.carry, batch, rows)
    outputs = jax.tree.leaves(new.outputs)
    # A weight that is known when tracing is counted in microbatches, so that most are 1.
    weight = new.counted[0] if split.weighs else rows / call.size
    keep = functools.partial(_weighted_mean.select, _weighted_mean.counts(weight))
    with jax.named_scope("accumulate"):
      both = zip(each, held.outputs, outputs, strict=True)
      reduced = [r.add(h, x, weight) for r, h, x in both]
      carry = jax.tree.map(keep, new.carry, held.carry)
      counted = jax.tree.map(jnp.add, held.counted, new.counted)
    collected = [x if r.collected else None for r, x in zip(each, outputs, strict=True)]
    return Microbatch(carry, reduced, counted), collected

  held = Microbatch(
    call.carry,
    [r.start(x, split.accumulator_dtype) for r, x in zip(each, leaves, strict=True)],
    jax.tree.map(lambda x: _across_devices.full_like(x, 0), like.counted),
  )
  # The smaller microbatch goes first where the order does not matter: its backward pass then
  # needs no memory beside that of a sum of gradients.
  tail_first = not call.carry and not any(r.ordered for r in each)
  collected_tail = [None] * len(each)
  with jax.named_scope("microbatches"):
    if tail_rows and tail_first:
      held, collected_tail = add(held, full, tail, tail_rows)
    held, collected = lax.scan(
      lambda held, index: add(held, index, take(index), call.size),
      held,
      jnp.arange(full, dtype=jnp.int32),
      unroll=split.unroll,
    )
    if tail_rows and not tail_first:
      held, collected_tail = add(held, full, tail, tail_rows)

  parts = zip(each, held.outputs, collected, collected_tail, strict=True)
  reduced = [r.join(h, c, t) for r, h, c, t in parts]
  carry, rows = held.carry, call.rows
  totals: Any = held.counted or (full + tail_rows / call.size,)
  weight, *skipped = totals
  if axis_name is not None:
    counted = _weighted_mean.counts(weight)
    if split.weighs:
      weight, skipped = lax.psum((weight, skipped), axis_name)
    else:
      weight, rows = (x * lax.axis_size(axis_name) for x in (weight, rows))
    carry = jax.tree.map(lambda x: _device_mean(x, axis_name), carry)
    reduced = [r.across_devices(h, axis_name, counted) for r, h in zip(each, reduced, strict=True)]
  final = zip(each, reduced, leaves, strict=True)
  outputs = treedef.unflatten([r.finish(h, weight, x.dtype) for r, h, x in final])
  return Reduced(carry, outputs, _stats(weight if split.weighs else rows, *skipped))


def _matched(reductions: Any, outputs: Any, root: str, call: Call) -> tuple[list[Any], Any, Any]:
  """A reduction for each leaf of the outputs, which can reduce it; the leaves, and their tree."""
  each = jax.tree.leaves(_reduction_trees.match("reduction", reductions, outputs))
  named = _validate.named_leaves(root, outputs)
  for reduction, (name, leaf) in zip(each, named, strict=True):
    reduction.check(name, leaf, call.size, call.split.accumulator_dtype)
  return each, [leaf for _, leaf in named], jax.tree.structure(outputs)


def _device_mean(x: jax.Array, axis_name: AxisName) -> jax.Array:
  """The mean over devices of a threaded value; of integers (step counts) the largest."""
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return lax.pmax(x, axis_name)
  wide = x.astype(_weighted_mean.accumulator_dtype(x.dtype))
  total, devices = _across_devices.summed(wide, axis_name), lax.axis_size(axis_name)
  return _weighted_mean.mean(total, devices, x.dtype)


def _stats(weight: Weight, skipped: int | jax.Array = 0) -> MicrobatchStats:
  return MicrobatchStats(jnp.asarray(weight, jnp.float32), jnp.asarray(skipped, jnp.int32))
