"""The loop: runs a function on each microbatch of a call in a scan, and adds up the results.

The smaller last microbatch, where there is one, runs before the scan or after it.

Known weaknesses: that the scan copies nothing rests on XLA (`Sum.add` and `hoisting` say where). A
microbatch is traced before the loop, to know the types of its results, and again in it; the user's
function only the first time, as `runner` jits it.
"""

from collections.abc import Callable
import functools
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, hoisting, weighted_mean
from optax_accum._arithmetic.conditional import update_if
from optax_accum._arithmetic.trees import combine, Tree
from optax_accum._microbatches.accumulator import (
  Accumulated,
  Accumulator,
  Microbatch,
  Reduced,
  refuse_cycle,
  stats,
)
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.outputs import Reductions

# Runs one microbatch, by its index, the carry, and how many rows it has.
Run: TypeAlias = Callable[[ArrayLike, Tree, int], Microbatch]


def runner(call: Microbatches, run_fn: Callable[..., Any]) -> Run:
  """Makes the function that runs one microbatch, from ``run_fn(weight, *inputs)``.

  That returns ``(new_carry, weight, finite, outputs)``. Its weight is that of a loss that tells it,
  and else None; `finite` is None where nobody looks.
  """
  one = run_fn
  if not call.is_whole:
    # A loop calls it several times, and traces it once for each type of its arguments.
    # The weight, argument 0, is a constant, unless it is computed in the program.
    constants = [0]
    if call.weighs_in_program:
      constants = []
    one = jax.jit(run_fn, inline=True, static_argnums=constants)

  def run(index, carry, rows):
    batch = call.taken(index, rows)
    weight = call.weight(index, batch, rows)
    # What the loss hands back as it came is None in the carry of the loop: it stays the call's own.
    own = combine(carry, call.own_carry)
    results = one(weight, *call.inputs(index, batch, own))
    # Results that depend on no varying argument are not typed as varying; this types all alike.
    results = call.devices.varying(jax.tree.map(jnp.asarray, results))
    new, own_weight, finite, outputs = results
    # The carry is a tuple of one, or empty where nothing is carried.
    new_carry = (new,) if call.carry else ()
    if weight is None:
      weight = own_weight
    elif own_weight is not None:
      # The loss tells its weight, so `weight` is 1 or 0: whether this microbatch is kept.
      weight = jnp.where(weighted_mean.counts(weight), own_weight, 0)
    if finite is None:  # nobody looked
      finite = True
    return Microbatch(new_carry, outputs, weight, finite)

  return run


class Loop:
  """The loop over a call's microbatches, whose outputs `words`, a prefix tree, says how to reduce.

  Messages call the outputs `root`.
  """

  def __init__(self, call: Microbatches, run: Run, words, root: str) -> None:
    self.call = call
    self.run = run
    programs = []
    for rows in call.sizes:
      # Index 0 stands for any, as only the types of the results are asked for.
      one = functools.partial(run, 0, call.own_carry, rows)
      trace = jax.make_jaxpr(one, return_shape=True)
      # Called in this frame, so that a traceback has few frames between a call and the loss.
      programs.append(trace())
    # The types of the results of a full microbatch, and of the last one, which may be smaller.
    self.full = across_devices.types(programs[0])
    self.tail = across_devices.types(programs[-1])
    # Each of `programs` is a pair: the traced function, and the shapes of its results.
    traced, _ = programs[0]
    self._jaxpr = traced.jaxpr
    dtype = call.split.accumulator_dtype
    reductions = Reductions(words, self.full.outputs, dtype)
    reductions.check(root, call)
    unit = call.rows_in_unit
    # If weights are known when tracing, they sum to the rows of the call, in units of rows.
    self.accumulator = Accumulator(
      call.split, reductions, call.carry, call.rows / unit, unit
    )

  def reduced(self) -> Reduced:
    """The combined results of all microbatches."""
    begun = self.accumulator.begin(self.full)
    return self.accumulator.finish(self.add(begun))

  def begin(self) -> Accumulated:
    """What a cycle has before its first call."""
    begun = self.accumulator.begin(self.full)
    reductions = self.accumulator.reductions
    # Gradients that are added in place stay in references until `join` takes them out.
    collected = reductions.collected(self.full.outputs)
    outputs = reductions.join(begun.outputs, collected)
    return begun._replace(outputs=outputs)

  def resume(self, accumulated: Accumulated) -> Accumulated:
    """What a cycle has after the microbatches of this call, of what it had before."""
    different = _validate.difference(
      "cycle", accumulated, self.begin(), "type", _validate.type_of
    )
    refuse_cycle(different)
    outputs = self.accumulator.reductions.resumed(accumulated.outputs)
    return self.add(accumulated._replace(outputs=outputs))

  def add(self, accumulated: Accumulated) -> Accumulated:
    """What is added up after all microbatches: one scan."""
    call = self.call
    reductions = self.accumulator.reductions
    add = self._add
    # What is added in place cannot be left out once it has run, so weight 0 must not run.
    if call.split.in_place and call.split.weight_fn is not None:
      add = self._add_unless_empty

    def add_full(accumulated, index):
      return add(accumulated, index, call.size)

    # The smaller one goes first where the order does not matter: its backward pass then needs no
    # memory on top of that of a sum of gradients.
    has_carry = bool(jax.tree.leaves(accumulated.carry))
    is_ordered = has_carry or reductions.are_ordered
    # What is collected of the smaller last microbatch: one entry, or none.
    tails = []
    with jax.named_scope("microbatches"):
      if call.tail_rows and not is_ordered:
        accumulated, tail = add(accumulated, call.full, call.tail_rows)
        tails.append(tail)
      # The full microbatches have the indices below `call.full`; the smaller one has that.
      indices = jnp.arange(call.full, dtype=jnp.int32)
      accumulated, collected = lax.scan(add_full, accumulated, indices)
      if call.tail_rows and is_ordered:
        accumulated, tail = add(accumulated, call.full, call.tail_rows)
        tails.append(tail)
    outputs = reductions.join(accumulated.outputs, collected, *tails)
    return accumulated._replace(outputs=outputs)

  def _add(
    self, accumulated: Accumulated, index: ArrayLike, rows: int
  ) -> tuple[Accumulated, Tree]:
    """With one more microbatch, and what is collected of this one."""
    # Sums of shapes that the function gathers from go behind a barrier: `hoisting` says why.
    gathered = hoisting.shapes_in(self._jaxpr)
    accumulated = self.accumulator.unhoisted(accumulated, gathered)
    new = self.run(index, accumulated.carry, rows)
    collected = self.accumulator.reductions.collected(new.outputs)
    return self.accumulator.add(accumulated, new), collected

  def _add_unless_empty(
    self, accumulated: Accumulated, index: ArrayLike, rows: int
  ) -> tuple[Accumulated, Tree]:
    """As `_add`, which does not run where the weight is zero, unless other devices wait for it.

    For gradients that are added in place: elsewhere what weighs zero runs, and is not selected.
    """
    call = self.call
    batch = call.taken(index, rows)
    weight: Any = call.weight(index, batch, rows)
    runs = weighted_mean.counts(weight)
    # Where devices exchange data in a microbatch, all of them run it if one does.
    sends = across_devices.axes_sent_over(self._jaxpr)
    if sends or across_devices.shares_mesh():
      runs = call.devices.any(runs)
    # If it does not run, zeros are in the place of what is collected of it.
    like = self.full
    if rows != call.size:
      like = self.tail
    collected = self.accumulator.reductions.collected(like.outputs)

    # The sums, and those zeros, which a run replaces.
    def add(operand):
      sums, _ = operand
      return self._add(sums, index, rows)

    operand = accumulated, across_devices.zeros_like(collected)
    return update_if(runs, add, operand, "unless_empty")


def reduced(
  call: Microbatches, run: Run, words, root: str = "output"
) -> Reduced:
  """The combined results of a call, which may run its function once, as it is."""
  if not call.is_whole:
    return Loop(call, run, words, root).reduced()
  # The whole batch is microbatch 0.
  whole = run(0, call.carry, call.rows)
  reductions = Reductions(words, whole.outputs, call.split.accumulator_dtype)
  reductions.check(root, call)
  outputs = reductions.only(whole.outputs)
  # No option weighs or skips here, so the total weight is the number of rows.
  carry = combine(whole.carry, call.carry)
  return Reduced(carry, outputs, stats(call.rows))
