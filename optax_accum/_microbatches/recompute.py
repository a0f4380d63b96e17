"""A function that can be differentiated: the backward pass computes each microbatch again."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._arithmetic import across_devices, dtypes, hoisting, weighted_mean
from optax_accum._arithmetic.trees import Batch, Carry, Leaf, Leaves
from optax_accum._microbatches.cut import Microbatches, Take
from optax_accum._microbatches.loop import Microbatch, Run
from optax_accum._microbatches.traced import Program


class Recomputed:
  """Runs a microbatch so that the backward pass computes it again, and keeps its arguments only.

  Gradients of what all microbatches share, such as parameters, are added up in the dtype of
  accumulators, and summed over the devices of `axis_name` once, after the loop. A microbatch of
  weight zero adds none, even where it is NaN, unless its outputs are `collected`.

  For this the loop gets a wide copy of each shared array, and casts it back in its body. JAX adds
  up the gradients of the copies in their dtype, and sums them over devices after the loop.
  """

  def __init__(self, call: Microbatches, run: Run, collected: bool) -> None:
    self.call, self.split = call, call.split
    self._guards = self.split.weighs and not collected
    self._links: dict[int, jax.Array] = {}  # by the id of what it is a copy of
    call.map_shared(self._varying)
    take, tail = call.cut
    self._programs: dict[int, tuple[Program, Leaves]] = {}  # and copies of what it holds
    for rows, batch in ((call.size, take(0)), (call.tail_rows, tail)):
      if rows:
        one = lambda index, batch, rows=rows: run(index, (), lambda: batch, rows)  # noqa: E731
        program = Program(one, jnp.int32(0), batch)
        self._programs[rows] = program, [self._linked(x) for x in program.held]

  def _varying(self, x: Leaf) -> Leaf:
    """`x` as it differs between devices, of which the copy to add up in is reduced."""
    if not _may_have_tangent(x) or self.split.axis_name is None:
      return x
    varying = across_devices.varying(x, self.split.axis_name)
    self._links[id(varying)] = across_devices.varying(self._wide(x), self.split.axis_name)
    return varying

  def _wide(self, x: jax.Array) -> jax.Array:
    wide = dtypes.accumulator_dtype(x.dtype, self.split.accumulator_dtype)
    return x.astype(dtypes.promote(x.dtype, wide))

  def _linked(self, x: Leaf) -> Leaf:
    """The copy of `x` in a dtype to add up cotangents in; `x` itself if it has none."""
    if not _may_have_tangent(x):
      return x
    return self._links[id(x)] if id(x) in self._links else self._wide(x)

  def __call__(
    self, index: ArrayLike, carry: Carry, take: Take, rows: int, unit: Leaf = None
  ) -> Microbatch:
    """The function on one microbatch."""
    call, unroll = self.call, self.split.unroll
    # What a loop's body computes again cannot be merged with what the loop before it computed.
    unrolled = unroll is True or unroll > 1
    in_loop = rows == call.size and call.rows >= 2 * call.size and not unrolled
    return jax.checkpoint(lambda: self._run(index, take(), rows), prevent_cse=not in_loop)()

  def _run(self, index: ArrayLike, batch: Batch, rows: int) -> Microbatch:
    program, copies = self._programs[rows]
    gathered = hoisting.shapes_in(program.jaxpr)

    def narrow(x: Leaf, copy: Leaf) -> Leaf:
      # Cast back in the loop's body, so that the loop adds up what is wide.
      return hoisting.unhoisted(copy, gathered).astype(x.dtype) if _may_have_tangent(x) else x

    held = list(map(narrow, program.held, copies))
    if self._guards:
      counted = weighted_mean.counts(self.call.weight(index, batch, rows))

      def guarded(x: Leaf) -> Leaf:
        return jnp.where(counted, x, lax.stop_gradient(x)) if _may_have_tangent(x) else x

      held, batch = jax.tree.map(guarded, (held, batch))
    return program(held, jnp.asarray(index, jnp.int32), batch)


def _may_have_tangent(x: Leaf) -> bool:
  return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
