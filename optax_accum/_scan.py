"""The loop: a function run microbatch by microbatch in a scan, and its outputs reduced."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _across_devices, _carry, _reduction_trees, _validate, _weighted_mean
from optax_accum._split import Call
from optax_accum._weighted_mean import Weight, WeightSum


class MicrobatchStats(NamedTuple):
  """What was counted over the microbatches of one batch.

  Attributes:
    total_weight: float32 scalar (float64 where x64 is enabled), the sum of the weights that
      went into the mean, rounded once: counts of tokens are added up exactly.
    skipped_microbatches: int32 scalar, how many were left out because they were not finite.
  """

  total_weight: jax.Array
  skipped_microbatches: jax.Array


class Reduced(NamedTuple):
  """What all microbatches gave together."""

  carry: tuple[Any, ...]  # the threaded argument at the end; empty where there is none
  outputs: Any
  stats: Any  # a MicrobatchStats
  weights: Any = None  # of each microbatch of this device, where some may be left out


class _Held(NamedTuple):
  """What the scan carries from one microbatch to the next."""

  carry: tuple[Any, ...]
  outputs: list[Any]  # what the reductions hold
  weights: WeightSum | None  # None where weights are known when tracing
  skipped: Any  # how many were left out, or None


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
  start = _carry.on_device(call.carry, axis_name)
  like = jax.eval_shape(lambda: call.run(0, start, take(0), call.size))
  # Leaves and not trees, because what is static in a tree may be another object in every trace.
  each, leaves, treedef = _matched(reductions, like.outputs, root, call)
  if tail_rows:
    smaller = jax.eval_shape(lambda: call.run(0, start, tail, tail_rows)).outputs
    names = [name for name, _ in _validate.named_leaves(root, like.outputs)]
    for r, name, x, y in zip(each, names, leaves, jax.tree.leaves(smaller), strict=True):
      r.check_tail(name, x, y)

  def add(held: _Held, index: ArrayLike, batch: Any, rows: int) -> tuple[_Held, Any]:
    new = call.run(index, held.carry, batch, rows)
    outputs = jax.tree.leaves(new.outputs)
    # A weight that is known when tracing is counted in microbatches, so that most are 1.
    weight: Weight = rows / call.size
    weights = held.weights
    with jax.named_scope("accumulate"):
      if weights is not None:
        weights, weight = weights.add(new.weight)
      both = zip(each, held.outputs, outputs, strict=True)
      reduced = [r.add(h, x, weight) for r, h, x in both]
      keep = functools.partial(_weighted_mean.select, _weighted_mean.counts(weight))
      carry = jax.tree.map(keep, new.carry, held.carry)
      skipped = jax.tree.map(jnp.add, held.skipped, new.skipped)
    collected = [x if r.collected else None for r, x in zip(each, outputs, strict=True)]
    recorded = None if new.skipped is None else new.weight
    return _Held(carry, reduced, weights, skipped), (collected, recorded)

  zero = functools.partial(_across_devices.full_like, value=0)
  held = _Held(
    start,
    [r.start(x, split.accumulator_dtype) for r, x in zip(each, leaves, strict=True)],
    None if like.weight is None else WeightSum(zero(like.weight), zero(like.weight)),
    jax.tree.map(zero, like.skipped),
  )
  # The smaller microbatch goes first where the order does not matter: its backward pass then
  # needs no memory beside that of a sum of gradients.
  tail_first = not call.carry and not any(r.ordered for r in each)
  of_tail: Any = [None] * len(each), None
  with jax.named_scope("microbatches"):
    if tail_rows and tail_first:
      held, of_tail = add(held, full, tail, tail_rows)
    held, (collected, recorded) = lax.scan(
      lambda held, index: add(held, index, take(index), call.size),
      held,
      jnp.arange(full, dtype=jnp.int32),
      unroll=split.unroll,
    )
    if tail_rows and not tail_first:
      held, of_tail = add(held, full, tail, tail_rows)

  parts = zip(each, held.outputs, collected, of_tail[0], strict=True)
  reduced = [r.join(h, c, t) for r, h, c, t in parts]
  recorded = _join_weights(recorded, of_tail[1])
  carry, rows, skipped = held.carry, call.rows, held.skipped
  weight: Any = full + tail_rows / call.size if held.weights is None else held.weights.total
  if axis_name is not None:
    counted, local = _weighted_mean.counts(weight), weight
    if held.weights is not None:
      weight = held.weights.over_devices(axis_name)
      skipped = jax.tree.map(lambda x: lax.psum(x, axis_name), skipped)
    else:
      weight, rows = (x * lax.axis_size(axis_name) for x in (weight, rows))
    carry = _carry.over_devices(split.carry_reduction, carry, call.carry, local, weight, axis_name)
    reduced = [r.across_devices(h, axis_name, counted) for r, h in zip(each, reduced, strict=True)]
  final = zip(each, reduced, leaves, strict=True)
  outputs = treedef.unflatten([r.finish(h, weight, x.dtype) for r, h, x in final])
  stats = _stats(rows if held.weights is None else weight, skipped)
  return Reduced(carry, outputs, stats, recorded)


def _join_weights(recorded: jax.Array | None, tail: jax.Array | None) -> jax.Array | None:
  """The weights of all microbatches, in the order of their indices."""
  if recorded is None or tail is None:
    return recorded
  return jnp.concatenate([recorded, tail[None]])


def _matched(reductions: Any, outputs: Any, root: str, call: Call) -> tuple[list[Any], Any, Any]:
  """A reduction for each leaf of the outputs, which can reduce it; the leaves, and their tree."""
  each = jax.tree.leaves(_reduction_trees.match("reduction", reductions, outputs))
  named = _validate.named_leaves(root, outputs)
  for reduction, (name, leaf) in zip(each, named, strict=True):
    reduction.check(name, leaf, call.size, call.split.accumulator_dtype)
  return each, [leaf for _, leaf in named], jax.tree.structure(outputs)


def _stats(weight: Weight, skipped: jax.Array | None = None) -> MicrobatchStats:
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(0 if skipped is None else skipped, jnp.int32),
  )
