"""Recomputation: the backward pass computes each microbatch again, and keeps its arguments only."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from optax_accum import _versions
from optax_accum._arithmetic import dtypes, hoisting, weighted_mean
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.loop import Run
from optax_accum._microbatches.options import Split


class Recomputed:
  """A function of a microbatch's weight and inputs, whose backward pass needs little memory.

  The loop gets a wide copy of each array that is not split, such as parameters, and casts it back
  in its body. So JAX adds up the gradients of the copies in the dtype of accumulators, and sums
  them over the devices of `axis_name` once, after the loop. If it `guards`, a microbatch of weight
  zero adds none, even where it is NaN.
  """

  def __init__(
    self, call: Microbatches, fun: Callable[..., Any], guards: bool
  ) -> None:
    self._call = call
    self._fun = fun
    self._guards = guards
    # The dtype that each wide copy is cast back to, by the id of the copy, which the call holds.
    self._dtypes: dict[int, Any] = {}
    # A call that runs whole adds up nothing, so it needs no wide copies.
    if not call.is_whole:
      call.map_unsplit(self._widened)

  def _widened(self, x):
    """A wide copy of an argument, or the argument if nothing differentiates by it."""
    if not _may_have_tangent(x):
      return x
    wide = widened(self._call.split, x)
    wide = self._call.devices.varying(wide)
    self._dtypes[id(wide)] = x.dtype
    return wide

  def __call__(self, weight, /, *inputs):
    """What the function returns on one microbatch."""
    # The call adds what is not split, which `__init__` has put there as wide copies.
    given = self._call.arguments(inputs)
    args, kwargs = jax.tree.map(lambda x: self._narrowed(x, weight), given)
    # Where XLA has no such bug, or no loop runs, the function needs no barriers.
    if not _versions.HOISTS_ALL_REDUCES or self._call.is_whole:
      return self._fun(*args, **kwargs)
    # The lambda takes nothing, so the arguments are constants of the jaxpr. Those of a shape that
    # is gathered from go through a barrier, and so do their cotangents: `hoisting` says why.
    trace = jax.make_jaxpr(
      lambda: self._fun(*args, **kwargs), return_shape=True
    )
    closed, like = trace()
    gathered = hoisting.shapes_in(closed.jaxpr)
    consts = hoisting.unhoisted(closed.consts, gathered)
    outputs = jax.core.eval_jaxpr(closed.jaxpr, consts)
    # `eval_jaxpr` returns a flat list; `like` has the tree of the outputs.
    return jax.tree.unflatten(jax.tree.structure(like), outputs)

  def _narrowed(self, x, weight):
    """An argument in its own dtype."""
    if not _may_have_tangent(x):
      return x
    # What was not widened is not in `_dtypes`, and keeps its own dtype.
    own = self._dtypes.get(id(x), x.dtype)
    x = x.astype(own)
    # The weight is None where only the loss will tell it.
    if self._guards and weight is not None:
      counted = weighted_mean.counts(weight)
      # Both have the same value, but the second lets no gradient through.
      x = weighted_mean.select(counted, x, lax.stop_gradient(x))
    return x


def recomputed(call: Microbatches, run: Run) -> Run:
  """`run`, which the backward pass computes again, from the cut of the rows on."""
  if call.is_whole:
    return run

  def again(index, carry, rows):
    # A checkpoint makes arrays of all that it returns. A weight that is known when tracing, and
    # `finite`, which is True here, are to stay what they are, so they go around it.
    def arrays(index, carry):
      new = run(index, carry, rows)
      weight = None
      if isinstance(new.weight, jax.Array):
        weight = new.weight
      return new._replace(weight=weight, finite=None)

    # The backward loop computes again what the forward loop did. XLA merges nothing between two
    # loops, so `prevent_cse` is not needed in one. A loop of one trip is inlined, and is none.
    # The smaller last microbatch, of other `rows`, runs outside of the loop.
    in_loop = rows == call.size and call.rows >= 2 * call.size
    checkpointed = jax.checkpoint(arrays, prevent_cse=not in_loop)
    new = checkpointed(index, carry)
    weight = new.weight
    if weight is None:  # it is known when tracing, as set above
      weight = call.known_weight(rows)
    return new._replace(weight=weight, finite=True)

  return again


def widened(split: Split, x: jax.Array) -> jax.Array:
  """`x` in the dtype to add up its cotangents in, if it has any."""
  if not dtypes.is_inexact(x):
    return x
  wide = dtypes.accumulator_dtype(x.dtype, split.accumulator_dtype)
  # An `accumulator_dtype` may be narrower than `x`, which is not to be rounded.
  wide = dtypes.promote(x.dtype, wide)
  # What has that dtype stays weakly typed, if it is.
  if x.dtype == wide:
    return x
  return x.astype(wide)


def _may_have_tangent(x) -> bool:
  """Whether an argument may be differentiated: it is traced, and floating or complex."""
  return isinstance(x, jax.core.Tracer) and dtypes.is_inexact(x)
