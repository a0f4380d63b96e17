"""A call that can be differentiated: going backward, each microbatch is computed again."""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _across_devices, _weighted_mean
from optax_accum._arguments import Slot
from optax_accum._split import Call, Microbatch, Take


class RecomputedCall(Call):
  """A call of which differentiation keeps the arguments, and one microbatch's intermediate values.

  Cotangents of what all microbatches share, such as parameters, are added up in the dtype of
  accumulators, and reduced over the devices of `axis_name` once, after the loop. A microbatch of
  weight zero adds none, even where it is NaN.
  """

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self._shared = {} if self.is_whole else jax.tree.map(self._linked, self._roles.shared)

  def _linked(self, x: Any) -> Any:
    if not _may_have_tangent(x):
      return x
    x = _across_devices.varying(x, self.split.axis_name)
    dtype = _weighted_mean.accumulator_dtype(x.dtype, self.split.accumulator_dtype)
    return _Linked(lax.stop_gradient(x), x.astype(dtype))

  def run(self, index: ArrayLike, carry: Any, take: Take, rows: int) -> Microbatch:
    """The function on one microbatch."""
    run = super().run
    if self.is_whole:
      return run(index, carry, take, rows)
    # What a loop's body computes again cannot be merged with what the loop before it computed.
    in_loop = rows == self.size
    return jax.checkpoint(lambda: run(index, carry, take, rows), prevent_cse=not in_loop)()

  def _inputs(self, index: ArrayLike, batch: tuple[Any, ...], weight: Any) -> dict[Slot, Any]:
    counted = None if weight is None else _weighted_mean.counts(weight)

    def guarded(x: Any) -> Any:
      return _followed(lax.stop_gradient(x), x, counted) if _may_have_tangent(x) else x

    def unlinked(x: Any) -> Any:
      return _followed(*x, counted) if isinstance(x, _Linked) else x

    if counted is not None:
      batch = jax.tree.map(guarded, batch)
    shared = jax.tree.map(unlinked, self._shared, is_leaf=lambda x: isinstance(x, _Linked))
    return {**super()._inputs(index, batch, weight), **shared}


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
