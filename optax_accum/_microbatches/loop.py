"""The loop: a function run microbatch by microbatch in a scan, and its outputs reduced."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, hoisting, reduction_words, weighted_mean
from optax_accum._arithmetic.conditional import update_if
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.skip import leave_out
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum
from optax_accum._microbatches import keys_and_carry
from optax_accum._microbatches.cut import Microbatches, Take
from optax_accum._microbatches.roles import refuse_aux_rows


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


class Microbatch(NamedTuple):
  """What one microbatch gave."""

  carry: tuple[Any, ...]  # the threaded argument; empty where there is none
  outputs: Any
  weight: Any  # None where it is known when tracing
  skipped: Any  # 1 if it was left out, None where none can be


class _Held(NamedTuple):
  """What the scan carries from one microbatch to the next."""

  carry: tuple[Any, ...]
  outputs: list[Any]  # what the reductions hold
  weights: WeightSum | None  # None where weights are known when tracing
  unit: Any  # what the weights of the outputs are counted in
  skipped: Any  # how many were left out, or None


# What runs: it takes the call's microbatches, a factor for the gradients, which is None where they
# are weighed later, and a microbatch's inputs. It returns ``(new_carry, outputs)``.
RunFn: TypeAlias = Callable[..., tuple[Any, Any]]
# A `Runner`, or what is called as one.
Run: TypeAlias = Callable[..., Microbatch]


class Runner:
  """Runs the function of a call on one microbatch. It is traced once for each size of them."""

  def __init__(self, call: Microbatches, run_fn: RunFn):
    self._call = call
    self._run_fn = functools.partial(run_fn, call)
    self._functions: dict[float | None, Any] = {}

  def __call__(
    self, index: ArrayLike, carry: Any, take: Take, rows: int, unit: Any = None
  ) -> Microbatch:
    """The function on the microbatch that `take` cuts out of the batch, of `rows` rows."""
    call, split = self._call, self._call.split
    batch = take()
    weight: Any = call.weight(index, batch, rows) if split.weighs else None
    factor: Weight | None = None
    if split.in_place:
      factor = _in_units(weight if unit is None else unit, weight, rows / call.size)[1]
    known = None if isinstance(factor, jax.Array) else factor
    run_fn = self._run_fn if factor is not known else functools.partial(self._run_fn, known)
    if not call.is_whole:
      run_fn = self._functions.setdefault(known, jax.jit(run_fn, inline=True))
    given = () if factor is known else (factor,)
    new_carry, outputs = run_fn(*given, *call.inputs(index, batch, carry))
    new_carry = (new_carry,) if call.carry else ()
    new_carry, outputs = jax.tree.map(jnp.asarray, (new_carry, outputs))
    # What depends on no argument that varies is the same on all devices, also in its type.
    new_carry, outputs = across_devices.varying((new_carry, outputs), split.axis_name)
    keys_and_carry.check(carry, new_carry)
    if not split.skip_nonfinite or call.weights is not None:
      return Microbatch(new_carry, outputs, weight, None)
    return Microbatch(new_carry, outputs, *leave_out(weight, (outputs.loss, outputs.grads)))


def run_in_microbatches(
  call: Microbatches, run: Run, reductions: Any, root: str = "output"
) -> Reduced:
  """Runs a call's function on one microbatch after the other, and reduces what they give.

  `reductions` is a prefix tree over the outputs, which messages call `root`.
  """
  if call.is_whole:
    whole = run(0, call.carry, lambda: call.batch, call.rows)
    each, leaves, treedef = _matched(reductions, whole.outputs, root, call)
    only = [r.only(x) for r, x in zip(each, leaves, strict=True)]
    return Reduced(whole.carry, treedef.unflatten(only), _stats(call.rows))

  start = keys_and_carry.on_device(call.carry, call.split.axis_name)
  take, tail = call.cut
  parts = {call.size: lambda: take(0), call.tail_rows: lambda: tail}
  traced = {}
  for rows in filter(None, parts):
    one = functools.partial(run, 0, start, parts[rows], rows)
    closed, shapes = jax.make_jaxpr(one, return_shape=True)()
    # Of `shapes`, an explicit sharding is left out where other axes of the mesh are automatic.
    traced[rows] = closed.jaxpr, jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)
  jaxpr, like = traced[call.size]
  # Leaves and not trees, because what is static in a tree may be another object in every trace.
  each, leaves, treedef = _matched(reductions, like.outputs, root, call)
  outputs = {rows: jax.tree.leaves(smaller.outputs) for rows, (_, smaller) in traced.items()}
  if call.tail_rows:
    names = [name for name, _ in _validate.named_leaves(root, like.outputs)]
    for r, *named in zip(each, names, leaves, outputs[call.tail_rows], strict=True):
      r.check_tail(*named)
  loop = _Loop(call, run, start, each, outputs, like, hoisting.shapes_in(jaxpr))
  held, weights = loop.all()
  carry, finished, stats = _finish(call, held, each, leaves)
  return Reduced(carry, treedef.unflatten(finished), stats, weights)


@dataclasses.dataclass(eq=False, repr=False)
class _Loop:
  """The microbatches of a call, run and added up one after the other."""

  call: Microbatches
  run: Run
  start: tuple[Any, ...]  # the carry of the first
  reductions: list[Reduction]
  outputs: dict[int, list[Any]]  # the types of what a microbatch of so many rows gives
  like: Microbatch  # the types of what a full one gives
  gathered: hoisting.Shapes

  def all(self) -> tuple[_Held, Any]:
    """What is held after all microbatches, and the weight of each where some may be left out."""
    call, held, (take, tail) = self.call, self._empty(), self.call.cut
    add = self._add
    if call.split.leaves_out:
      add = functools.partial(self._add_unless_empty, self._communicates())
    # The smaller microbatch goes first where the order does not matter: its backward pass then
    # needs no memory beside that of a sum of gradients.
    tail_first = not call.carry and not any(r.ordered for r in self.reductions)
    of_tail: Any = [None] * len(self.reductions), None
    with jax.named_scope("microbatches"):
      if call.tail_rows and tail_first:
        held, of_tail = add(held, call.full, lambda: tail, call.tail_rows)
      held, (collected, recorded) = lax.scan(
        lambda held, index: add(held, index, lambda: take(index), call.size),
        held,
        jnp.arange(call.full, dtype=jnp.int32),
        unroll=call.split.unroll,
      )
      if call.tail_rows and not tail_first:
        held, of_tail = add(held, call.full, lambda: tail, call.tail_rows)
    parts = zip(self.reductions, held.outputs, collected, of_tail[0], strict=True)
    held = held._replace(outputs=[r.join(h, c, t) for r, h, c, t in parts])
    weight = of_tail[1]
    if recorded is not None and weight is not None:
      recorded = jnp.concatenate([recorded, weight[None]])
    return held, recorded

  def _empty(self) -> _Held:
    """What is held before the first microbatch."""
    zero = functools.partial(across_devices.full_like, value=0)
    weight, dtype = self.like.weight, self.call.split.accumulator_dtype
    unit = 0 if self.call.split.axis_name is None else 1  # devices that are added up share theirs
    leaves = self.outputs[self.call.size]
    return _Held(
      self.start,
      [r.start(x, dtype) for r, x in zip(self.reductions, leaves, strict=True)],
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
    new = self.run(index, held.carry, take, rows, held.unit)
    outputs = jax.tree.leaves(new.outputs)
    with jax.named_scope("accumulate"):
      weights = held.weights and held.weights.add(new.weight)
      unit, weight = _in_units(held.unit, new.weight, rows / self.call.size)
      both = zip(self.reductions, held.outputs, outputs, strict=True)
      reduced = [r.add(h, x, weight) for r, h, x in both]
      keep = functools.partial(weighted_mean.select, weighted_mean.counts(weight))
      carry = jax.tree.map(keep, new.carry, held.carry)
      skipped = jax.tree.map(jnp.add, held.skipped, new.skipped)
    each = zip(self.reductions, outputs, strict=True)
    collected = [x if r.collected else None for r, x in each]
    recorded = None if new.skipped is None else new.weight
    return _Held(carry, reduced, weights, unit, skipped), (collected, recorded)

  def _add_unless_empty(
    self, agree: bool, held: _Held, index: ArrayLike, take: Take, rows: int
  ) -> tuple[_Held, Any]:
    """What `_add` gives, which does not run where the weight is zero (on all, if they `agree`)."""
    counted: Any = weighted_mean.counts(self.call.weight(index, take(), rows))
    if agree:
      counted = lax.pmax(counted.astype(jnp.int32), self.call.split.axis_name) > 0
    both = zip(self.reductions, self.outputs[rows], strict=True)
    zeros = [across_devices.full_like(x, 0) if r.collected else None for r, x in both]
    skipped, weight = self.like.skipped, self.like.weight
    nothing = zeros, None if skipped is None else across_devices.full_like(weight, 0)
    return update_if(counted, lambda both: self._add(both[0], index, take, rows), (held, nothing))

  def _communicates(self) -> bool:
    """Whether a microbatch sends anything to other devices, for which all of them must run it."""
    call = self.call
    add = jax.make_jaxpr(lambda: self._add(self._empty(), 0, lambda: call.cut[0](0), call.size))()
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


def _finish(
  call: Microbatches, held: _Held, reductions: list[Reduction], leaves: list[Any]
) -> tuple[Any, list[Any], MicrobatchStats]:
  """The carry, the outputs and the counts of all microbatches of all devices together."""
  axis_name = call.split.axis_name
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
    both = zip(reductions, reduced, strict=True)
    reduced = [r.across_devices(h, axis_name, counted) for r, h in both]
  stats = _stats(rows if weights is None else weight, skipped)
  if weights is not None and axis_name is None:
    weight = weighted_mean.in_units(weight, unit)
  final = zip(reductions, reduced, leaves, strict=True)
  return carry, [r.finish(h, weight, x.dtype) for r, h, x in final], stats


def _in_units(unit: Any, weight: Any, known: float) -> tuple[Any, Weight]:
  """The unit that weights are counted in, and a microbatch's weight in it.

  One that is `known` when tracing is counted in microbatches, so that most are 1.
  """
  if weight is None:
    return unit, known
  unit = weighted_mean.first_unit(unit, weight)
  return unit, weighted_mean.still_counting(weighted_mean.in_units(weight, unit), weight)


def _matched(
  reductions: Any, outputs: Any, root: str, call: Microbatches
) -> tuple[list[Any], Any, Any]:
  """A reduction for each leaf of the outputs, which can reduce it; the leaves, and their tree."""
  each = jax.tree.leaves(reduction_words.match("reduction", reductions, outputs))
  named = _validate.named_leaves(root, outputs)
  for reduction, (name, leaf) in zip(each, named, strict=True):
    if reduction.default and call.count > 1:
      refuse_aux_rows(call.roles, name, leaf, call.size)
    reduction.check(name, leaf, call.size, call.split.accumulator_dtype)
  return each, [leaf for _, leaf in named], jax.tree.structure(outputs)


def _stats(weight: Weight, skipped: jax.Array | None = None) -> MicrobatchStats:
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(0 if skipped is None else skipped, jnp.int32),
  )
