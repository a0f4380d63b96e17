"""Recomputation: the backward pass computes each microbatch again, and keeps its arguments only.

Known weakness: the function is traced once for each size, and closed over by its jaxpr. What it
changes in place is lost, and an `io_callback` in it cannot be differentiated.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._arithmetic import dtypes, hoisting, weighted_mean
from optax_accum._arithmetic.trees import Leaves
from optax_accum._microbatches.call import Microbatches, Take
from optax_accum._microbatches.loop import Microbatch, Run
from optax_accum._microbatches.options import Split


class _Program(NamedTuple):
  """A microbatch of one size, traced."""

  closed: Any
  results: Any  # their structure
  copies: Leaves  # of what it closes over, to add up cotangents in


class Recomputed:
  """Runs a microbatch so that the backward pass computes it again.

  The loop gets a wide copy of each shared array, such as parameters, and casts it back in its body.
  So JAX adds up the gradients of the copies in the dtype of accumulators, and sums them over the
  devices of `axis_name` once, after the loop. A microbatch of weight zero adds none, even where it
  is NaN, unless its outputs are `collected`.
  """

  def __init__(self, call: Microbatches, run: Run, collected: bool) -> None:
    self._call = call
    self._run = run
    self._wide = functools.partial(widened, call.split)
    self._guards = call.split.weighs and not collected
    self._copies: dict[int, jax.Array] = {}  # by the id of what it is a copy of
    if call.split.axis_name is not None:
      call.map_shared(self._varying)
    # By the number of rows.
    self._programs = {rows: self._trace(rows) for rows in call.sizes}

  def _trace(self, rows: int) -> _Program:
    no_carry = ()
    batch = self._call.taken(0, rows)()

    def one(index, batch):
      return self._run(index, no_carry, lambda: batch, rows)

    trace = jax.make_jaxpr(one, return_shape=True)
    closed, like = trace(jnp.int32(0), batch)
    # What the function closes over, such as parameters, the jaxpr has as its constants.
    copies = list(map(self._copy, closed.consts))
    return _Program(closed, jax.tree.structure(like), copies)

  def _varying(self, x):
    """`x`, typed as differing between devices; its copy, to add up in, is reduced over them."""
    if not _may_have_tangent(x):
      return x
    varying = self._call.devices.varying(x)
    self._copies[id(varying)] = self._call.devices.varying(self._wide(x))
    return varying

  def _copy(self, x):
    """The copy of `x` in a dtype to add up cotangents in; `x` itself if it has none."""
    if not _may_have_tangent(x):
      return x
    if id(x) in self._copies:
      return self._copies[id(x)]
    return self._wide(x)

  def __call__(
    self,
    index: ArrayLike,
    carry,
    take: Take,
    rows: int,
    unit=None,
  ) -> Microbatch:
    """The function on one microbatch."""
    call = self._call
    # What a loop's body computes again cannot be merged with what the loop before it computed.
    in_loop = rows == call.size and call.rows >= 2 * call.size

    @functools.partial(jax.checkpoint, prevent_cse=not in_loop)
    def again():
      return self._computed(index, take(), rows)

    return again()

  def _computed(self, index: ArrayLike, batch, rows: int) -> Microbatch:
    closed, results, copies = self._programs[rows]
    gathered = hoisting.shapes_in(closed.jaxpr)

    def narrow(x, copy):
      if not _may_have_tangent(x):
        return x
      # Cast back in the loop's body, so that the loop adds up what is wide.
      return hoisting.unhoisted(copy, gathered).astype(x.dtype)

    consts = list(map(narrow, closed.consts, copies))
    if self._guards:
      weight = self._call.weight(index, batch, rows)
      counted = weighted_mean.counts(weight)

      def guarded(x):
        if not _may_have_tangent(x):
          return x
        return jnp.where(counted, x, lax.stop_gradient(x))

      consts, batch = jax.tree.map(guarded, (consts, batch))
    inputs = jnp.int32(index), *jax.tree.leaves(batch)
    outputs = jax.core.eval_jaxpr(closed.jaxpr, consts, *inputs)
    return results.unflatten(outputs)


def widened(split: Split, x: jax.Array) -> jax.Array:
  """`x` in the dtype to add up its cotangents in, if it has any."""
  if not dtypes.is_inexact(x):
    return x
  wide = dtypes.accumulator_dtype(x.dtype, split.accumulator_dtype)
  wide = dtypes.promote(x.dtype, wide)
  # What has that dtype stays weakly typed, if it is.
  return x if x.dtype == wide else x.astype(wide)


def _may_have_tangent(x) -> bool:
  return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
