"""A call that can be differentiated: going backward, each microbatch is computed again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _across_devices, _weighted_mean
from optax_accum._split import Call, Microbatch, Take


class RecomputedCall(Call):
  """A call of which differentiation keeps the arguments, and one microbatch's intermediate values.

  Cotangents of what all microbatches share, such as parameters, are added up in the dtype of
  accumulators, and reduced over the devices of `axis_name` once, after the loop. A microbatch of
  weight zero adds none, even where it is NaN.
  """

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self._traced: dict[int, _Traced] = {}
    if not self.is_whole:
      shared = self._roles.shared.items()
      self._arguments.update({slot: jax.tree.map(self._varying, x) for slot, x in shared})

  def _varying(self, x: Any) -> Any:
    return _across_devices.varying(x, self.split.axis_name) if _may_have_tangent(x) else x

  def cut(self, full: int) -> tuple[Callable[[ArrayLike], Any], Any]:
    """The microbatches, as in `Call`; and the function is traced, on one of each size."""
    take, tail = super().cut(full)
    tail_rows = self.rows - full * self.size
    for rows, batch in ((self.size, take(0)), (tail_rows, tail)):
      if rows:
        self._traced[rows] = self._trace(batch, rows)
    return take, tail

  def _trace(self, batch: tuple[Any, ...], rows: int) -> "_Traced":
    """The function of one microbatch, and all that it takes from outside."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(batch)

    def fun(index: jax.Array, *leaves: jax.Array) -> Microbatch:
      return super(RecomputedCall, self).run(index, (), lambda: treedef.unflatten(leaves), rows)

    jaxpr, like = jax.make_jaxpr(fun, return_shape=True)(jnp.int32(0), *leaves)
    return _Traced(jaxpr, jax.tree.structure(like), [self._linked(x) for x in jaxpr.consts])

  def _linked(self, x: Any) -> Any:
    if not (isinstance(x, jax.core.Tracer) and _may_have_tangent(x)):
      return x
    dtype = _weighted_mean.accumulator_dtype(x.dtype, self.split.accumulator_dtype)
    return _Linked(lax.stop_gradient(x), x.astype(dtype))

  def run(self, index: ArrayLike, carry: Any, take: Take, rows: int) -> Microbatch:
    """The function on one microbatch."""
    if self.is_whole:
      return super().run(index, carry, take, rows)
    # What a loop's body computes again cannot be merged with what the loop before it computed.
    in_loop = rows == self.size
    recomputed = jax.checkpoint(lambda: self._run(index, take(), rows), prevent_cse=not in_loop)
    return recomputed()

  def _run(self, index: ArrayLike, batch: tuple[Any, ...], rows: int) -> Microbatch:
    counted = None
    if self.split.weighs:
      counted = _weighted_mean.counts(self.weight(index, batch, rows))

    def guarded(x: Any) -> Any:
      return _followed(lax.stop_gradient(x), x, counted) if _may_have_tangent(x) else x

    traced = self._traced[rows]
    batch = batch if counted is None else jax.tree.map(guarded, batch)
    held = [_followed(*x, counted) if isinstance(x, _Linked) else x for x in traced.held]
    fun = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr.jaxpr, held))
    return traced.treedef.unflatten(fun(jnp.asarray(index, jnp.int32), *jax.tree.leaves(batch)))


class _Traced(NamedTuple):
  """A function of one microbatch: of its index, and of the leaves of its batch."""

  jaxpr: ClosedJaxpr
  treedef: Any  # of what it returns
  held: list[Any]  # what it takes from outside, parameters too


class _Linked(NamedTuple):
  """An array without its derivative, and the same in a dtype to add up derivatives in."""

  value: jax.Array
  link: jax.Array


@jax.custom_jvp
def _followed(value: jax.Array, link: jax.Array, counted: jax.Array | None) -> jax.Array:
  """`value`, with the derivative of `link`; zero unless `counted`, where that is given.

  The number in `link` is not used, so the compiler drops it. What remains is that the cotangents
  of a loop's microbatches are added up in its dtype.
  """
  return value


@_followed.defjvp
def _followed_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  value, _, counted = primals
  tangent = tangents[1].astype(value.dtype)
  if counted is not None:
    tangent = jnp.where(counted, tangent, jnp.zeros_like(tangent))
  return _followed(*primals), tangent


def _may_have_tangent(x: Any) -> bool:
  return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
