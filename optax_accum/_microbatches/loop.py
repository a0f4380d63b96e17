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
from optax_accum._arithmetic import (
  across_devices,
  hoisting,
  in_order,
  weighted_mean,
)
from optax_accum._arithmetic.conditional import update_if
from optax_accum._arithmetic.trees import Carry, Leaf, Tree
from optax_accum._arithmetic.weighted_mean import (
  in_first_units,
  Weight,
  WeightSum,
)
from optax_accum._microbatches import carry as carries
from optax_accum._microbatches.call import Microbatches, Take
from optax_accum._microbatches.collectives import (
  axes_sent_over,
  refuse_real_devices,
)
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
    batch = call.devices.apart(lambda _: take(), call.batch)
    weight = None
    factor = None
    if split.weighs:
      weight = call.weight(index, batch, rows)
    if weighs_loss:
      factor = _in_unit(weight, unit, rows / call.size)[1]
    new, told, outputs = one(factor, *call.inputs(index, batch, carry))
    new_carry = (new,) if call.carry else ()
    results = jax.tree.map(jnp.asarray, (new_carry, told, outputs))
    # What depends on no argument that varies is the same on all devices, also in its type.
    new_carry, told, outputs = call.devices.varying(results)
    if weight is None:
      weight = told
    for before, after in zip(carry, new_carry, strict=True):
      carries.check(split.name(*call.roles.carry), before, after)
    return Microbatch(new_carry, *settle(outputs, weight))

  return run


def _in_unit(weight, unit, known: float) -> tuple[Leaf, Weight]:
  """The unit of weights, and a weight in it: the `known` one where none is traced."""
  if weight is None:
    return unit, known
  return in_first_units(unit, weight)


class Progress(NamedTuple):
  """What the loop carries from one microbatch to the next, and a cycle from call to call."""

  carry: tuple[Carry, ...]
  outputs: Tree  # what the reductions hold
  weights: WeightSum | None  # None where weights are known when tracing
  unit: Leaf  # what the weights of the outputs are counted in
  skipped: Leaf  # how many were left out, or None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loop:
  """The loop over a call's microbatches."""

  call: Microbatches
  run: Run
  reductions: Reductions
  jaxpr: Any  # of a microbatch of full size
  full: Microbatch  # the types of its results
  tail: Microbatch  # those of the smaller last one, or again `full`

  def reduced(self) -> Reduced:
    """The combined results of all microbatches."""
    call = self.call
    known = call.rows, call.size
    ending = Ending(call.split, self.reductions, call.carry, known)

    def of_lane(lane):
      return self.run_all(self.empty(lane), lane)

    return ending.of_all(of_lane)

  def begin(self, lane: Leaf) -> Progress:
    """What a cycle holds of a lane that has no microbatch yet."""
    progress = self.empty(lane)
    collected = self.reductions.collected(self.full.outputs)
    joined = self.reductions.join(progress.outputs, collected, None)
    return progress._replace(outputs=joined)

  def add(self, progress: Progress, lane: Leaf) -> Progress:
    """What a cycle holds of a lane after its microbatches of this call, of what it held before."""
    try:
      outputs = self.reductions.resumed(progress.outputs)
    except ValueError:
      refuse_cycle("cycle.outputs has other leaves")
    progress = progress._replace(outputs=outputs)
    different = _validate.difference(
      "cycle", progress, self.empty(), "type", _validate.type_of
    )
    refuse_cycle(different)
    return self.run_all(progress, lane)

  def run_all(self, progress: Progress, lane: Leaf = 0) -> Progress:
    """What is held after all microbatches of a lane, of what is held before."""
    call = self.call
    split = call.split
    add = self._add
    # What is added in place cannot be left out once it has run.
    if split.skip_empty or (split.in_place and split.weight_fn is not None):
      self._refuse_waiting()
      add = functools.partial(self._add_unless_empty, self._communicates())

    def add_full(progress, index):
      return add(progress, index, call.size)

    last = call.full  # the index of the smaller one, if there is one
    # That goes first where the order does not matter: its backward pass then needs no memory on
    # top of that of a sum of gradients.
    has_carry = bool(jax.tree.leaves(progress.carry))
    is_ordered = has_carry or self.reductions.are_ordered
    tail = None
    with jax.named_scope("microbatches"):
      if call.tail_rows and not is_ordered:
        progress, tail = add(progress, last, call.tail_rows)
      indices = jnp.arange(call.full, dtype=jnp.int32)
      if call.devices.lanes > 1:
        indices = lane * call.full + indices
      if split.virtual_devices is not None and call.full == 1:
        progress, collected = self._add_apart(add_full, progress, indices)
      else:
        progress, collected = lax.scan(add_full, progress, indices)
      if call.tail_rows and is_ordered:
        progress, tail = add(progress, last, call.tail_rows)
    joined = self.reductions.join(progress.outputs, collected, tail)
    return progress._replace(outputs=joined)

  def empty(self, lane: Leaf = 0) -> Progress:
    """What is held before the first microbatch of a lane."""
    like = self.full
    devices = self.call.devices
    outputs = self.reductions.start()
    carry = devices.with_own_noise(self.call.carry, lane)
    weights = None
    unit = None
    if like.weight is not None:
      zeros = across_devices.zeros_like((like.weight, like.weight))
      weights = WeightSum(*zeros)
      first = devices.first_unit
      if self.call.split.has_weight:
        first = 1  # in which totals are
      unit = across_devices.full_like(like.weight, first)
    skipped = across_devices.zeros_like(like.skipped)
    return Progress(carry, outputs, weights, unit, skipped)

  def _add(
    self, progress: Progress, index: ArrayLike, rows: int
  ) -> tuple[Progress, Tree]:
    """What is held after one more microbatch, and what is collected of this one."""
    gathered = hoisting.shapes_in(self.jaxpr)
    outputs = self.reductions.unhoisted(progress.outputs, gathered)
    carry = hoisting.unhoisted(progress.carry, gathered)
    take = self.call.taken(index, rows)
    new = self.run(index, carry, take, rows, progress.unit)
    with jax.named_scope("accumulate"):
      weights = progress.weights
      if weights is not None:
        weights = weights.add(new.weight)
      known = rows / self.call.size  # in full microbatches
      unit, weight = _in_unit(new.weight, progress.unit, known)
      outputs = self.reductions.add(outputs, new.outputs, weight)
      counted = weighted_mean.counts(weight)
      keep = functools.partial(weighted_mean.select, counted)
      carry = jax.tree.map(keep, new.carry, carry)
      skipped = jax.tree.map(jnp.add, progress.skipped, new.skipped)
    progress = Progress(carry, outputs, weights, unit, skipped)
    return progress, self.reductions.collected(new.outputs)

  def _add_apart(
    self, add: Callable[..., Any], progress: Progress, indices: jax.Array
  ) -> tuple[Progress, Tree]:
    """As a scan of one microbatch, which XLA would unroll and fuse with what is around it."""
    zeros = across_devices.zeros_like(
      self.reductions.collected(self.full.outputs)
    )

    def run(operand):
      # Tied to what the loop carries, or XLA would move all of it out of the loop.
      (progress, _), index = lax.optimization_barrier((operand, indices[0]))
      return add(progress, index)

    unknown = in_order.true_of(self.call.batch)
    progress, collected = update_if(unknown, run, (progress, zeros), "alone")
    return progress, jax.tree.map(lambda x: x[None], collected)

  def _add_unless_empty(
    self, agree: bool, progress: Progress, index: ArrayLike, rows: int
  ) -> tuple[Progress, Tree]:
    """What `_add` gives, which does not run where the weight is zero (on all, if they `agree`)."""
    call = self.call
    take = call.taken(index, rows)
    weight = call.weight(index, take(), rows)
    here = weighted_mean.counts(weight)
    runs = here
    if agree:
      runs = call.devices.any(here)
    like = self.full if rows == call.size else self.tail
    # What is collected of a microbatch that does not run.
    collected = self.reductions.collected(like.outputs)
    zeros = across_devices.zeros_like(collected)

    def add(operand):
      progress, _ = operand
      return self._add(progress, index, rows)

    operand = progress, zeros
    progress, collected = update_if(runs, add, operand, "skip_empty")
    if not agree:
      return progress, collected
    # A device that ran it only because others count collects zeros.
    keep = functools.partial(weighted_mean.select, here)
    return progress, jax.tree.map(keep, collected, zeros)

  def _refuse_waiting(self) -> None:
    """Refuses a function that sends something, where devices do not know who runs it."""
    over_axis = self.call.split.axis_name is not None
    if not over_axis and axes_sent_over(self.jaxpr):
      raise ValueError(
        "Microbatches of weight zero are not run, because of skip_empty=True, or of in_place=True"
        " with weight_fn, and the function sends something to other devices, which would wait for"
        " it: give axis_name, so that all devices run it or none."
      )

  def _communicates(self) -> bool:
    """Whether a microbatch sends anything to other devices, for which all of them must run it."""
    if self.reductions.communicate or axes_sent_over(self.jaxpr):
      return True
    # What the compiler sends may wait for devices that do not run it.
    over_axis = self.call.split.axis_name is not None
    return over_axis and across_devices.shares_mesh()


def refuse_cycle(different: str) -> None:
  """Refuses a cycle that is `different` from what a call goes on with; "" is not."""
  if different:
    raise ValueError(
      f"{different}: the cycle is of another step, of other parameters, or of batches that give"
      " other results. Add to one cycle what is alike but for its rows, and begin another for the"
      " rest."
    )


class Ending(NamedTuple):
  """How the results of a call, or of a cycle, are put together of what its devices hold.

  They began with the carry `start`. Where weights are known when tracing, `known` has the rows of a
  device, and those of a full microbatch.
  """

  split: Split
  reductions: Reductions
  start: tuple[Carry, ...]
  known: tuple[int, int] = (0, 1)

  def of_all(self, of_lane: Callable[..., Progress]) -> Reduced:
    """The results of all devices, each of which runs its lanes: most have one."""
    lanes = self.split.devices.lanes

    def part_of(lane):
      part = self._part(of_lane(lane))
      held, collected = self.reductions.apart(part.outputs)
      return part._replace(outputs=held), collected

    if lanes == 1:
      return self._over_devices(self._part(of_lane(0)))
    part, collected = in_order.fold(part_of, lanes, self._both)
    collected = jax.tree.map(lambda x: lax.collapse(x, 0, 2), collected)
    outputs = self.reductions.again(part.outputs, collected)
    return self._over_devices(part._replace(outputs=outputs))

  @property
  def _together(self) -> carries.Together:
    return carries.Together.of(self.split, self.start)

  def _own(self, progress: Progress) -> Weight:
    """What the microbatches of a device, or of a lane, weigh."""
    if progress.weights is not None:
      return progress.weights.total
    rows, size = self.known
    return rows / size

  def _part(self, progress: Progress) -> Progress:
    """What a device, or a lane, gives: of a carry its terms."""
    own = self._own(progress)
    terms = functools.partial(self._together.terms, weight=own)
    carry = self.split.devices.apart(terms, progress.carry)
    return progress._replace(carry=carry)

  def _both(self, first: Progress, second: Progress) -> Progress:
    """What two lanes give."""
    counted = weighted_mean.counts(self._own(second))
    outputs = self.reductions.both(first.outputs, second.outputs, counted)
    weights = None
    if first.weights is not None and second.weights is not None:
      weights = first.weights.both(second.weights)
    skipped = jax.tree.map(jnp.add, first.skipped, second.skipped)
    carry = self._together.both(first.carry, second.carry)
    return Progress(carry, outputs, weights, first.unit, skipped)

  def _over_devices(self, part: Progress) -> Reduced:
    """The results, of what each device gives."""
    devices = self.split.devices
    weights = part.weights
    own = self._own(part)
    counted = devices.has_counted(own)
    # What counted on all devices, and the same in the unit of the outputs.
    if weights is None:
      rows, _ = self.known
      total: Weight = rows * devices.size
      in_unit: Weight = own * devices.size
    else:
      total, in_unit = devices.total(weights, part.unit)
    skipped = devices.sum(part.skipped)
    carry = self._together.over_devices(part.carry, devices, in_unit)
    outputs = self.reductions.over_devices(part.outputs, devices, counted)
    outputs = self.reductions.finish(outputs, in_unit)
    return Reduced(carry, outputs, _stats(total, skipped))


def run_in_microbatches(
  call: Microbatches,
  run: Run,
  words,
  root: str = "output",
  use: Callable[[Loop], Any] = Loop.reduced,
):
  """Runs each microbatch and combines the outputs, which messages call `root`.

  `words` is a prefix tree of reductions. In a cycle, `use` makes something else of the loop.
  """
  dtype = call.split.accumulator_dtype
  if call.is_whole:
    whole = run(0, call.carry, lambda: call.batch, call.rows)
    reductions = Reductions(words, whole.outputs, dtype)
    reductions.check(root, call, whole.outputs)
    outputs = reductions.only(whole.outputs)
    return Reduced(whole.carry, outputs, _stats(call.rows, None))

  start = call.devices.with_own_noise(call.carry)
  programs = []
  for rows in call.sizes:
    one = functools.partial(run, 0, start, call.taken(0, rows), rows)
    # In this frame, so that few stand between a call and the loss.
    programs.append(jax.make_jaxpr(one, return_shape=True)())
  count = call.split.virtual_devices
  if count is not None:
    # Over several devices keys need the index of the device too.
    alone = call.split.axis_name is None
    if axes_sent_over(programs[0][0].jaxpr, with_index=alone):
      refuse_real_devices("The loss, weight_fn or grad_metrics_fn", count)
  full = across_devices.types(programs[0])
  tail = across_devices.types(programs[-1])
  reductions = Reductions(words, full.outputs, dtype)
  reductions.check(root, call, tail.outputs)
  return use(Loop(call, run, reductions, programs[0][0].jaxpr, full, tail))


def _stats(weight: Weight, skipped) -> MicrobatchStats:
  if skipped is None:
    skipped = 0
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(skipped, jnp.int32),
  )
