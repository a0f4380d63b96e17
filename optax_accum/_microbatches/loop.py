"""The loop: runs a function on each microbatch in a scan, and combines the outputs.

Weights are counted in units of the first of them: see `weighted_mean`. The smaller last microbatch,
where there is one, runs before the scan or after it.

Known weaknesses: that the scan copies nothing rests on XLA (`Reduction.add` and `hoisting` say
where). A function is traced before the loop, to know the types of its results, and again in it.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, hoisting, weighted_mean
from optax_accum._arithmetic.conditional import update_if
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.reductions import Held
from optax_accum._arithmetic.trees import Batch, Carry, Leaf, Tree
from optax_accum._arithmetic.weighted_mean import (
  in_first_units,
  Weight,
  WeightSum,
)
from optax_accum._microbatches import carry as carries
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.collectives import axes_sent_over
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.outputs import Reductions


class MicrobatchStats(NamedTuple):
  """Counts over the microbatches of one batch.

  Attributes:
    total_weight: float32 scalar (float64 with x64), the sum of the weights; exact for whole counts.
    skipped_microbatches: int32 scalar, how many were left out because they were not finite.
  """

  total_weight: jax.Array
  skipped_microbatches: jax.Array


class Reduced(NamedTuple):
  """The combined results of all microbatches."""

  # The carried argument at the end; empty where there is none.
  carry: tuple[Carry, ...]
  outputs: Tree
  stats: Tree  # a MicrobatchStats, or the specs of one


class Microbatch(NamedTuple):
  """The results of one microbatch."""

  carry: tuple[Carry, ...]
  outputs: Tree
  weight: Leaf = None  # None where it is known when tracing
  skipped: Leaf = None  # 1 if it was left out, None where none can be


# Cuts the rows of a microbatch: where they are used, and not before.
Take: TypeAlias = Callable[[], tuple[Batch, ...]]
# What is left of the outputs and the weight of a microbatch that has run, and whether it was
# skipped.
Settle: TypeAlias = Callable[[Tree, Leaf], tuple[Tree, Leaf, Leaf]]


class Run(Protocol):
  """Runs one microbatch, by its index: the carry, its rows, how many, and the unit of weights."""

  def __call__(
    self, index: ArrayLike, carry, take: Take, rows: int, unit=1.0, /
  ) -> Microbatch: ...


def runner(
  call: Microbatches,
  run_fn: Callable[..., tuple[Carry, Leaf, Tree]],
  settle: Settle = lambda outputs, weight: (outputs, weight, None),
  weighs_loss: bool = False,
) -> Run:
  """Makes the function that runs one microbatch, from ``run_fn(factor, *inputs)``.

  That returns ``(new_carry, weight, outputs)``; the weight is None where it does not tell. If it
  `weighs_loss`, the factor is what gradients are multiplied by; it is None if they are weighed
  later.
  """
  split = call.split
  one = run_fn
  if not call.is_whole:  # a factor that is known when tracing is a constant
    is_traced = split.weighs and weighs_loss
    known = () if is_traced else 0
    one = jax.jit(run_fn, inline=True, static_argnums=known)

  def run(index, carry, take, rows, unit=1.0):
    batch = take()
    weight = None
    factor = None
    if split.weighs:
      weight = call.weight(index, batch, rows)
    if weighs_loss:
      factor = _in_unit(weight, unit, rows / call.size)[1]
    new, own, outputs = one(factor, *call.inputs(index, batch, carry))
    new_carry = (new,) if call.carry else ()
    results = jax.tree.map(jnp.asarray, (new_carry, own, outputs))
    # What depends on no argument that varies is the same on all devices, also in its type.
    new_carry, own, outputs = call.devices.varying(results)
    if weight is None:
      weight = own
    for before, after in zip(carry, new_carry, strict=True):
      carries.check(split.name(*call.roles.carry), before, after)
    return Microbatch(new_carry, *settle(outputs, weight))

  return run


def _in_unit(weight, unit, known: float) -> tuple[Leaf, Weight]:
  """The unit of weights, and a weight in it: the `known` one where none is traced."""
  if weight is None:
    return unit, known
  return in_first_units(unit, weight)


def run_in_microbatches(
  call: Microbatches, run: Run, words, root: str = "output"
) -> Reduced:
  """Runs each microbatch and combines the outputs, which messages call `root`.

  `words` is a prefix tree of reductions.
  """
  if call.is_whole:
    dtype = call.split.accumulator_dtype
    whole = run(0, call.carry, lambda: call.batch, call.rows)
    reductions = Reductions(words, whole.outputs, dtype)
    reductions.check(root, call, whole.outputs)
    outputs = reductions.only(whole.outputs)
    return Reduced(whole.carry, outputs, _stats(call.rows, None))

  loop = Loop.of(call, run, words, root)
  return loop.reduced(loop.run_all(loop.empty()))


class _Traced(NamedTuple):
  """What is known of a microbatch of one size before it runs."""

  like: Microbatch  # the types of its results
  jaxpr: Any

  @classmethod
  def of(cls, traced: tuple[Any, Microbatch]) -> "_Traced":
    return cls(across_devices.types(traced), traced[0].jaxpr)


def _taken(call: Microbatches, index: ArrayLike, rows: int) -> Take:
  """Cuts the rows of one microbatch."""
  take, tail = call.cut
  if rows == call.size:
    return lambda: take(index)
  return lambda: tail


class Progress(NamedTuple):
  """What the loop carries from one microbatch to the next, and a cycle from call to call."""

  carry: tuple[Carry, ...]
  outputs: Held  # what the reductions hold
  weights: WeightSum | None  # None where weights are known when tracing
  unit: Leaf  # what the weights of the outputs are counted in
  skipped: Leaf  # how many were left out, or None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loop:
  """The loop over a call's microbatches."""

  call: Microbatches
  run: Run
  reductions: Reductions
  full: _Traced  # a microbatch of full size
  tail: _Traced  # the smaller last one, or again one of full size

  @classmethod
  def of(cls, call: Microbatches, run: Run, words, root: str) -> "Loop":
    """The loop that `run_in_microbatches` runs, of what a microbatch of each size is traced to."""
    start = call.devices.with_own_noise(call.carry)
    sizes = [call.size]
    if call.tail_rows:
      sizes.append(call.tail_rows)
    traced: list[_Traced] = []
    for rows in sizes:
      one = functools.partial(run, 0, start, _taken(call, 0, rows), rows)
      traced.append(_Traced.of(jax.make_jaxpr(one, return_shape=True)()))
    full = traced[0]
    tail = traced[-1]
    dtype = call.split.accumulator_dtype
    reductions = Reductions(words, full.like.outputs, dtype)
    reductions.check(root, call, tail.like.outputs)
    return cls(call, run, reductions, full, tail)

  @property
  def devices(self) -> Devices:
    """The devices that the rows are spread over."""
    return self.call.devices

  def begin(self) -> Progress:
    """What a cycle holds that has no microbatch yet."""
    held = self.empty()
    collected = self.reductions.collected(self.full.like.outputs)
    joined = self.reductions.join(held.outputs, collected, None)
    return held._replace(outputs=joined)

  def add(self, held: Progress) -> Progress:
    """What a cycle holds after all microbatches of this call, of what it held before."""
    outputs = self.reductions.resumed(held.outputs)
    held = held._replace(outputs=outputs)
    different = _validate.difference(
      "cycle", held, self.empty(), "type", _validate.type_of
    )
    if different:
      raise ValueError(
        f"{different}: the cycle is of another step, of other parameters, or of batches that give"
        " other results. Add to one cycle what is alike but for its rows, and begin another for"
        " the rest."
      )
    return self.run_all(held)

  def run_all(self, held: Progress) -> Progress:
    """What is held after all microbatches, of what is held before."""
    call = self.call
    split = call.split
    add = self._add
    # What is added in place cannot be left out once it has run.
    if split.skip_empty or (split.in_place and split.weight_fn is not None):
      self._refuse_waiting()
      add = functools.partial(self._add_unless_empty, self._communicates())
    last = call.full  # the index of the smaller one
    # The smaller microbatch goes first where the order does not matter: its backward pass then
    # needs no memory on top of that of a sum of gradients.
    has_carry = bool(jax.tree.leaves(held.carry))
    is_ordered = has_carry or self.reductions.are_ordered
    tail = None
    with jax.named_scope("microbatches"):
      if call.tail_rows and not is_ordered:
        held, tail = add(held, last, call.tail_rows)
      held, collected = lax.scan(
        lambda held, index: add(held, index, call.size),
        held,
        jnp.arange(call.full, dtype=jnp.int32),
      )
      if call.tail_rows and is_ordered:
        held, tail = add(held, last, call.tail_rows)
    joined = self.reductions.join(held.outputs, collected, tail)
    return held._replace(outputs=joined)

  def empty(self) -> Progress:
    """What is held before the first microbatch."""
    like = self.full.like
    outputs = self.reductions.start()
    carry = self.devices.with_own_noise(self.call.carry)
    weights = None
    unit = None
    if like.weight is not None:
      zeros = across_devices.zeros_like((like.weight, like.weight))
      weights = WeightSum(*zeros)
      first = self.devices.first_unit
      if self.call.split.has_weight:
        first = 1  # in which totals are
      unit = across_devices.full_like(like.weight, first)
    skipped = across_devices.zeros_like(like.skipped)
    return Progress(carry, outputs, weights, unit, skipped)

  def _add(
    self, held: Progress, index: ArrayLike, rows: int
  ) -> tuple[Progress, Tree]:
    """What is held after one more microbatch, and what is collected of this one."""
    gathered = hoisting.shapes_in(self.full.jaxpr)
    outputs = self.reductions.unhoisted(held.outputs, gathered)
    carry = hoisting.unhoisted(held.carry, gathered)
    take = _taken(self.call, index, rows)
    new = self.run(index, carry, take, rows, held.unit)
    with jax.named_scope("accumulate"):
      weights = held.weights
      if weights is not None:
        weights = weights.add(new.weight)
      known = rows / self.call.size  # in full microbatches
      unit, weight = _in_unit(new.weight, held.unit, known)
      outputs = self.reductions.add(outputs, new.outputs, weight)
      counted = weighted_mean.counts(weight)
      keep = functools.partial(weighted_mean.select, counted)
      carry = jax.tree.map(keep, new.carry, carry)
      skipped = jax.tree.map(jnp.add, held.skipped, new.skipped)
    held = Progress(carry, outputs, weights, unit, skipped)
    return held, self.reductions.collected(new.outputs)

  def _add_unless_empty(
    self, agree: bool, held: Progress, index: ArrayLike, rows: int
  ) -> tuple[Progress, Tree]:
    """What `_add` gives, which does not run where the weight is zero (on all, if they `agree`)."""
    take = _taken(self.call, index, rows)
    weight = self.call.weight(index, take(), rows)
    here = runs = weighted_mean.counts(weight)
    if agree:
      runs = self.devices.any(here)
    of_size = self.full if rows == self.call.size else self.tail
    collected = self.reductions.collected(of_size.like.outputs)
    zeros = across_devices.zeros_like(collected)

    def add(both):
      return self._add(both[0], index, rows)

    held, collected = update_if(runs, add, (held, zeros), "skip_empty")
    if not agree:
      return held, collected
    # A device that ran it only because others count collects zeros.
    keep = functools.partial(weighted_mean.select, here)
    return held, jax.tree.map(keep, collected, zeros)

  def _refuse_waiting(self) -> None:
    """Refuses a function that sends something, where devices do not know who runs it."""
    over_axis = self.call.split.axis_name is not None
    if not over_axis and axes_sent_over(self.full.jaxpr):
      raise ValueError(
        "Microbatches of weight zero are not run, because of skip_empty=True, or of in_place=True"
        " with weight_fn, and the function sends something to other devices, which would wait for"
        " it: give axis_name, so that all devices run it or none."
      )

  def _communicates(self) -> bool:
    """Whether a microbatch sends anything to other devices, for which all of them must run it."""
    if self.reductions.communicate or axes_sent_over(self.full.jaxpr):
      return True
    # What the compiler sends may wait for devices that do not run it.
    over_axis = self.call.split.axis_name is not None
    return over_axis and across_devices.shares_mesh()

  def reduced(self, held: Progress) -> Reduced:
    """What is held, of all devices together."""
    call = self.call
    known = call.rows, call.size
    return over_devices(call.split, self.reductions, held, call.carry, known)


def over_devices(
  split: Split,
  reductions: Reductions,
  held: Progress,
  start: tuple[Carry, ...],
  known: tuple[int, int] = (0, 1),
) -> Reduced:
  """What is held, of all devices together. They began with the carry `start`.

  Where weights are known when tracing, `known` has the rows, and those of a full microbatch.
  """
  devices = split.devices
  # Those of this device, of all devices, and the latter in the unit of the outputs.
  if held.weights is None:
    rows, size = known
    own: Weight = rows / size
    total: Weight = rows * devices.size
    weight: Weight = own * devices.size
    counted = devices.has_counted(own)
  else:
    own = held.weights.total
    counted = devices.has_counted(own)
    total, weight = devices.total(held.weights, held.unit)
  skipped = devices.sum(held.skipped)
  carry = held.carry
  if split.axis_name is not None:
    share = carries.Share(split.axis_name, own, weight)
    of_carry = functools.partial(
      share.over_devices, split, split.name(*split.carry)
    )
    carry = tuple(map(of_carry, carry, start))
  outputs = reductions.over_devices(held.outputs, devices, counted)
  outputs = reductions.finish(outputs, weight)
  return Reduced(carry, outputs, _stats(total, skipped))


def _stats(weight: Weight, skipped) -> MicrobatchStats:
  if skipped is None:
    skipped = 0
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(skipped, jnp.int32),
  )
