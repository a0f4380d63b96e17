"""The loop: a function run microbatch by microbatch in a scan, and its outputs reduced."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, hoisting, reduction_words, weighted_mean
from optax_accum._arithmetic.conditional import update_if
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum
from optax_accum._microbatches import keys_and_carry
from optax_accum._microbatches.options import Call, Microbatch, Take


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
  unit: Any  # what the weights of the outputs are counted in
  skipped: Any  # how many were left out, or None


def run_in_microbatches(call: Call, reductions: Any, root: str = "output") -> Reduced:
  """Runs a call's function on one microbatch after the other.

  `reductions` is a prefix tree over the outputs, of `Reduction`; messages call the outputs `root`.
  """
  if call.is_whole:
    whole = call.run(0, call.carry, lambda: call.batch, call.rows)
    each, leaves, treedef = _matched(reductions, whole.outputs, root, call)
    only = [r.only(x) for r, x in zip(each, leaves, strict=True)]
    return Reduced(whole.carry, treedef.unflatten(only), _stats(call.rows))

  return _Loop(call, reductions, root).run()


class _Loop:
  """The microbatches of a call, run and added up one after the other."""

  def __init__(self, call: Call, reductions: Any, root: str):
    self.call = call
    self.full, self.tail_rows = divmod(call.rows, call.size)
    self.take, self.tail = call.cut(self.full)
    self.start = keys_and_carry.on_device(call.carry, call.split.axis_name)
    self.like = self._like(lambda: self.take(0), call.size)
    # Leaves and not trees, because what is static in a tree may be another object in every trace.
    matched = _matched(reductions, self.like.outputs, root, call)
    self.reductions, self.leaves, self.treedef = matched
    if self.tail_rows:
      smaller = self._like(lambda: self.tail, self.tail_rows)
      names = [name for name, _ in _validate.named_leaves(root, self.like.outputs)]
      self.tail_leaves = jax.tree.leaves(smaller.outputs)
      both = zip(names, self.leaves, self.tail_leaves, strict=True)
      for reduction, (name, x, y) in zip(self.reductions, both, strict=True):
        reduction.check_tail(name, x, y)

    one = functools.partial(self._one, lambda: self.take(0), call.size)
    self.gathered = hoisting.gathered_shapes(one)
    self.agrees = call.split.leaves_out and self._communicates()

  def _like(self, take: Take, rows: int) -> Microbatch:
    """What a microbatch gives, in shapes and dtypes."""
    return across_devices.types(lambda: self._one(take, rows))

  def _one(self, take: Take, rows: int) -> Microbatch:
    """The first microbatch."""
    weight = self._weight_before(0, take, rows)
    factor = rows / self.call.size if weight is None and self.call.split.in_place else weight
    return self.call.run(0, self.start, take, rows, factor)

  def run(self) -> Reduced:
    """All microbatches."""
    call, held = self.call, self._empty()
    add = self._add_unless_empty if call.split.leaves_out else self._add
    # The smaller microbatch goes first where the order does not matter: its backward pass then
    # needs no memory beside that of a sum of gradients.
    tail_first = not call.carry and not any(r.ordered for r in self.reductions)
    of_tail: Any = [None] * len(self.reductions), None
    with jax.named_scope("microbatches"):
      if self.tail_rows and tail_first:
        held, of_tail = add(held, self.full, lambda: self.tail, self.tail_rows)
      held, (collected, recorded) = lax.scan(
        lambda held, index: add(held, index, lambda: self.take(index), call.size),
        held,
        jnp.arange(self.full, dtype=jnp.int32),
        unroll=call.split.unroll,
      )
      if self.tail_rows and not tail_first:
        held, of_tail = add(held, self.full, lambda: self.tail, self.tail_rows)
    parts = zip(self.reductions, held.outputs, collected, of_tail[0], strict=True)
    held = held._replace(outputs=[r.join(h, c, t) for r, h, c, t in parts])
    return self._finish(held)._replace(weights=_join_weights(recorded, of_tail[1]))

  def _empty(self) -> _Held:
    """What is held before the first microbatch."""
    zero = functools.partial(across_devices.full_like, value=0)
    weight, dtype = self.like.weight, self.call.split.accumulator_dtype
    unit = 0 if self.call.split.axis_name is None else 1  # devices that are added up share theirs
    return _Held(
      self.start,
      [r.start(x, dtype) for r, x in zip(self.reductions, self.leaves, strict=True)],
      None if weight is None else WeightSum(zero(weight), zero(weight)),
      None if weight is None else across_devices.full_like(weight, unit),
      jax.tree.map(zero, self.like.skipped),
    )

  def _add(self, held: _Held, index: ArrayLike, take: Take, rows: int) -> tuple[_Held, Any]:
    """What is held after one more microbatch, and what is kept of each."""
    sums = zip(self.reductions, held.outputs, strict=True)
    held = held._replace(
      outputs=[r.unhoisted(h, self.gathered) for r, h in sums],
      carry=hoisting.unhoisted(held.carry, self.gathered),
    )
    factor: Weight | None = None
    if self.call.split.in_place:
      _, factor = self._in_units(held.unit, self._weight_before(index, take, rows), rows)
    new = self.call.run(index, held.carry, take, rows, factor)
    outputs = jax.tree.leaves(new.outputs)
    with jax.named_scope("accumulate"):
      weights = held.weights and held.weights.add(new.weight)
      unit, weight = self._in_units(held.unit, new.weight, rows)
      both = zip(self.reductions, held.outputs, outputs, strict=True)
      reduced = [r.add(h, x, weight) for r, h, x in both]
      keep = functools.partial(weighted_mean.select, weighted_mean.counts(weight))
      carry = jax.tree.map(keep, new.carry, held.carry)
      skipped = jax.tree.map(jnp.add, held.skipped, new.skipped)
    each = zip(self.reductions, outputs, strict=True)
    collected = [x if r.collected else None for r, x in each]
    recorded = None if new.skipped is None else new.weight
    return _Held(carry, reduced, weights, unit, skipped), (collected, recorded)

  def _weight_before(self, index: ArrayLike, take: Take, rows: int) -> jax.Array | None:
    """A microbatch's weight before it has run, where it is asked for and not known when tracing."""
    split = self.call.split
    return self.call.weight(index, take(), rows) if split.in_place and split.weighs else None

  def _in_units(self, unit: Any, weight: Any, rows: int) -> tuple[Any, Weight]:
    """The unit that weights are counted in, and a microbatch's weight in it."""
    if weight is None:  # known when tracing, and counted in microbatches, so that most are 1
      return unit, rows / self.call.size
    unit = weighted_mean.first_unit(unit, weight)
    return unit, weighted_mean.still_counting(weighted_mean.in_units(weight, unit), weight)

  def _add_unless_empty(
    self, held: _Held, index: ArrayLike, take: Take, rows: int
  ) -> tuple[_Held, Any]:
    """What `_add` gives, which does not run where the weight is zero."""
    counted: Any = weighted_mean.counts(self.call.weight(index, take(), rows))
    if self.agrees:
      counted = lax.pmax(counted.astype(jnp.int32), self.call.split.axis_name) > 0
    nothing = self._nothing(rows)
    return update_if(counted, lambda both: self._add(both[0], index, take, rows), (held, nothing))

  def _nothing(self, rows: int) -> Any:
    """What is kept of a microbatch that was not run."""
    leaves = self.leaves if rows == self.call.size else self.tail_leaves
    both = zip(self.reductions, leaves, strict=True)
    collected = [across_devices.full_like(x, 0) if r.collected else None for r, x in both]
    weight = self.like.weight
    return collected, None if self.like.skipped is None else across_devices.full_like(weight, 0)

  def _communicates(self) -> bool:
    """Whether a microbatch sends anything to other devices, for which all of them must run it."""
    call = self.call
    add = jax.make_jaxpr(lambda: self._add(self._empty(), 0, lambda: self.take(0), call.size))()
    if not across_devices.communicates(add.jaxpr):
      return False
    option = "in_place=True with weight_fn" if call.split.in_place else "skip_empty=True"
    if call.split.axis_name is None:
      raise ValueError(
        f"{option} lets every device skip microbatches by itself, and the function sends something"
        " to other devices, which would wait for it: give axis_name, and what any device counts is"
        " run by all."
      )
    if call.split.in_place:
      raise ValueError(
        f"{option} leaves microbatches of weight zero out by not running them, and the function"
        " sends something to other devices, which would wait for it: pass in_place=False."
      )
    return True

  def _finish(self, held: _Held) -> Reduced:
    """What all microbatches of all devices gave together."""
    call, axis_name = self.call, self.call.split.axis_name
    carry, reduced, weights, unit, skipped = held
    rows: Any = call.rows
    weight: Any = rows / call.size if weights is None else weights.total
    if axis_name is not None:
      counted, local = weighted_mean.counts(weight), weight
      if weights is None:
        weight, rows = (x * lax.axis_size(axis_name) for x in (weight, rows))
      else:
        weight = weights.over_devices(axis_name)
        skipped = jax.tree.map(lambda x: lax.psum(x, axis_name), skipped)
      words = call.split.carry_reduction
      carry = keys_and_carry.over_devices(words, carry, call.carry, local, weight, axis_name)
      both = zip(self.reductions, reduced, strict=True)
      reduced = [r.across_devices(h, axis_name, counted) for r, h in both]
    stats = _stats(rows if weights is None else weight, skipped)
    if weights is not None and axis_name is None:
      weight = weighted_mean.in_units(weight, unit)
    final = zip(self.reductions, reduced, self.leaves, strict=True)
    outputs = self.treedef.unflatten([r.finish(h, weight, x.dtype) for r, h, x in final])
    return Reduced(carry, outputs, stats)


def _join_weights(recorded: jax.Array | None, tail: jax.Array | None) -> jax.Array | None:
  """The weights of all microbatches, in the order of their indices."""
  if recorded is None or tail is None:
    return recorded
  return jnp.concatenate([recorded, tail[None]])


def _matched(reductions: Any, outputs: Any, root: str, call: Call) -> tuple[list[Any], Any, Any]:
  """A reduction for each leaf of the outputs, which can reduce it; the leaves, and their tree."""
  each = jax.tree.leaves(reduction_words.match("reduction", reductions, outputs))
  named = _validate.named_leaves(root, outputs)
  for reduction, (name, leaf) in zip(each, named, strict=True):
    if reduction.default and call.microbatches > 1:
      call.refuse_aux_rows(name, leaf)
    reduction.check(name, leaf, call.size, call.split.accumulator_dtype)
  return each, [leaf for _, leaf in named], jax.tree.structure(outputs)


def _stats(weight: Weight, skipped: jax.Array | None = None) -> MicrobatchStats:
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(0 if skipped is None else skipped, jnp.int32),
  )
