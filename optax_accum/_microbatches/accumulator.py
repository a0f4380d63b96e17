"""The accumulator: begin, add one microbatch after the other, merge, finish.

`finish` has the only sums over devices, and the only division.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arithmetic import across_devices, hoisting, weighted_mean
from optax_accum._arithmetic.skip import leave_out
from optax_accum._arithmetic.trees import (
  Carry,
  combine,
  Leaf,
  masked_like,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.carry import Carries
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.outputs import Reductions


class MicrobatchStats(NamedTuple):
  """Counts over the microbatches of one batch.

  Attributes:
    total_weight: float32 scalar (float64 with x64), the sum of the weights.
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

  carry: tuple[Carry, ...]  # None in it stands for what came back as it was
  outputs: Tree
  weight: Leaf
  finite: Leaf  # whether loss, gradients and weight are; True: nobody looked


class Accumulated(NamedTuple):
  """What a device has added up: a loop carries it from microbatch to microbatch."""

  carry: tuple[Carry, ...]  # None in it is not carried
  outputs: Tree  # the states of the reductions
  weight: Leaf  # the sum of the weights; None where it is known when tracing
  skipped: Leaf  # how many were left out; None where nobody looks


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulator:
  """Adds up the results of microbatches, which began with the carry `start`.

  `known` is the sum of the weights of a device, where that is known when tracing; a weight of 1
  stands for `rows_in_unit` rows.
  """

  split: Split
  reductions: Reductions
  start: tuple[Carry, ...]
  known: float = 0.0
  rows_in_unit: int = 1

  def begin(self, like: Microbatch) -> Accumulated:
    """Nothing added up yet, of microbatches of these types."""
    devices = self.split.devices
    # None, where the loss hands back what it got; else as it starts, and each device folds its
    # index into the keys in it.
    carry = masked_like(like.carry, self.start)
    carry = devices.with_own_noise(carry)
    if devices.axis_name is not None:
      # Raises where a word is missing, so before the first microbatch of a cycle.
      Carries.of(self.split, self.start, carry)
    # None stands for a sum that is not needed: see `Accumulated`.
    weight: Any = None
    skipped = None
    # Whether the sum of the weights is known only when the program runs.
    if self.split.counts:
      dtype = jnp.result_type(float)
      weight = across_devices.full_like(like.weight, 0, dtype)
    # Then `counts` is true as well, so that the weight is an array.
    if self.split.skip_nonfinite:
      # Devices skip by themselves, so that also known weights come to differ between them.
      weight = across_devices.vary_like(weight, like.finite)
      skipped = across_devices.full_like(like.finite, 0, jnp.int32)
    return Accumulated(carry, self.reductions.start(), weight, skipped)

  def unhoisted(
    self, accumulated: Accumulated, shapes: hoisting.Shapes
  ) -> Accumulated:
    """The same, such that XLA reduces arrays of these shapes over devices in the loop."""
    return accumulated._replace(
      outputs=self.reductions.unhoisted(accumulated.outputs, shapes),
      carry=hoisting.unhoisted(accumulated.carry, shapes),
    )

  @jax.named_scope("accumulate")
  def add(self, accumulated: Accumulated, new: Microbatch) -> Accumulated:
    """With one more microbatch."""
    weight = new.weight
    total = accumulated.weight
    skipped = accumulated.skipped
    # A Python True says that nobody looked. What is left out goes on with a weight of 0.
    if new.finite is not True:
      weight, left_out = leave_out(jnp.asarray(weight), new.finite)
      skipped = skipped + left_out
    if total is not None:
      total = total + weight
    outputs = self.reductions.add(
      accumulated.outputs, new.outputs, weight, new.finite
    )
    # A microbatch of weight 0 does not count, and leaves the carry as it was.
    counted = weighted_mean.counts(weight)
    keep = functools.partial(weighted_mean.select, counted)
    carry = jax.tree.map(keep, new.carry, accumulated.carry)
    return Accumulated(carry, outputs, total, skipped)

  def merge(self, first: Accumulated, second: Accumulated) -> Accumulated:
    """The microbatches of two, which began with one carry."""
    each = Carries.of(self.split, self.start, first.carry)
    terms = each.terms(first.carry, first.weight)
    others = each.terms(second.carry, second.weight)
    # A cycle sums its weights as it runs, so neither is None; a `skipped` of None is an empty tree.
    total = first.weight + second.weight
    return Accumulated(
      each.merge(terms, others, total),
      self.reductions.merge(first.outputs, second.outputs),
      total,
      jax.tree.map(jnp.add, first.skipped, second.skipped),
    )

  def finish(self, accumulated: Accumulated) -> Reduced:
    """The results of all devices."""
    devices = self.split.devices
    carry = accumulated.carry
    # What a device has, and all of them: known when tracing, or summed.
    own: Weight = self.known
    total: Weight = own * devices.size
    if accumulated.weight is not None:
      own = accumulated.weight
      total = devices.sum(own)
    # On one device the carry is already what the last microbatch that counted returned.
    if devices.axis_name is not None:
      each = Carries.of(self.split, self.start, carry)
      terms = each.terms(carry, own)
      carry = each.over_devices(terms, devices, total)
    # Where nobody looked it is None, an empty tree, whose sum is None.
    skipped = devices.sum(accumulated.skipped)
    outputs = self.reductions.over_devices(accumulated.outputs, devices)
    outputs = self.reductions.finish(outputs, total)
    carry = combine(carry, self.start)
    # A weight of 1 may stand for several rows, and the stats count rows.
    counts = stats(total * self.rows_in_unit, skipped)
    return Reduced(carry, outputs, counts)


def stats(weight: Weight, skipped: Leaf = None) -> MicrobatchStats:
  """The counts of all microbatches."""
  # Nobody looked, so none was left out.
  if skipped is None:
    skipped = 0
  return MicrobatchStats(
    jnp.asarray(weight, jnp.result_type(float)),
    jnp.asarray(skipped, jnp.int32),
  )


def refuse_cycle(different: str) -> None:
  """Refuses a cycle if `different` says how it differs from what is expected; "" says nothing."""
  if different:
    raise ValueError(
      f"{different}: the cycle is of another step, of other parameters, or of batches that give"
      " other results. Add to one cycle what is alike but for its rows, and begin another for the"
      " rest."
    )
