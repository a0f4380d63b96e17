"""A call that can be differentiated: going backward, each microbatch is computed again."""

from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._arithmetic import across_devices, dtypes, hoisting, weighted_mean
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.options import Call, Microbatch, Take

if TYPE_CHECKING:
  from jax.extend.core import ClosedJaxpr


class RecomputedCall(Call):
  """A call of which differentiation keeps the arguments, and one microbatch's intermediate values.

  Cotangents of what all microbatches share, such as parameters, are added up in the dtype of
  accumulators, and reduced over the devices of `axis_name` once, after the loop. A microbatch of
  weight zero adds none, even where it is NaN, unless its outputs are `collected`.
  """

  def __init__(self, *args: Any, collected: bool) -> None:
    super().__init__(*args)
    self._guards = self.split.weighs and not collected
    self._jaxprs: dict[int, _Traced] = {}
    self._links: dict[int, jax.Array] = {}  # by the id of what it is a copy of
    if not self.is_whole:
      shared = self._roles.shared.items()
      self._arguments.update({slot: jax.tree.map(self._varying, x) for slot, x in shared})

  def _varying(self, x: Any) -> Any:
    """`x` as it differs between devices, of which the copy to add up in is reduced."""
    if not _may_have_tangent(x) or self.split.axis_name is None:
      return x
    varying = across_devices.varying(x, self.split.axis_name)
    self._links[id(varying)] = across_devices.varying(self._wide(x), self.split.axis_name)
    return varying

  def _wide(self, x: jax.Array) -> jax.Array:
    wide = dtypes.accumulator_dtype(x.dtype, self.split.accumulator_dtype)
    return x.astype(dtypes.promote(x.dtype, wide))

  def cut(self, full: int) -> tuple[Callable[[ArrayLike], Any], Any]:
    """The microbatches, as in `Call`; and the function is traced, on one of each size."""
    take, tail = super().cut(full)
    tail_rows = self.rows - full * self.size
    for rows, batch in ((self.size, take(0)), (tail_rows, tail)):
      if rows:
        self._jaxprs[rows] = self._trace(batch, rows)
    return take, tail

  def _trace(self, batch: tuple[Any, ...], rows: int) -> "_Traced":
    """The function of one microbatch, and all that it takes from outside."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(batch)

    def fun(index: jax.Array, *leaves: jax.Array) -> Microbatch:
      return super(RecomputedCall, self).run(index, (), lambda: treedef.unflatten(leaves), rows)

    jaxpr, like = jax.make_jaxpr(fun, return_shape=True)(jnp.int32(0), *leaves)
    held = [self._linked(x) for x in jaxpr.consts]
    return _Traced(jaxpr, jax.tree.structure(like), held, hoisting.shapes_in(jaxpr.jaxpr))

  def _linked(self, x: Any) -> Any:
    if not _may_have_tangent(x):
      return x
    return _Linked(self._links[id(x)] if id(x) in self._links else self._wide(x), x.dtype)

  def run(
    self, index: ArrayLike, carry: Any, take: Take, rows: int, factor: Weight | None = None
  ) -> Microbatch:
    """The function on one microbatch."""
    if self.is_whole:
      return super().run(index, carry, take, rows)
    # What a loop's body computes again cannot be merged with what the loop before it computed.
    unrolled = self.split.unroll is True or self.split.unroll > 1
    in_loop = rows == self.size and self.rows >= 2 * self.size and not unrolled
    return jax.checkpoint(lambda: self._run(index, take(), rows), prevent_cse=not in_loop)()

  def _run(self, index: ArrayLike, batch: tuple[Any, ...], rows: int) -> Microbatch:
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # longer to import than this package

    counted = None
    if self._guards:
      counted = weighted_mean.counts(self.weight(index, batch, rows))

    def guarded(x: Any) -> Any:
      if counted is None or not _may_have_tangent(x):
        return x
      return jnp.where(counted, x, lax.stop_gradient(x))

    traced = self._jaxprs[rows]
    held = [x.value(traced.gathered) if isinstance(x, _Linked) else x for x in traced.held]
    held, batch = jax.tree.map(guarded, (held, batch))
    fun = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr.jaxpr, held))
    return traced.treedef.unflatten(fun(jnp.asarray(index, jnp.int32), *jax.tree.leaves(batch)))


class _Traced(NamedTuple):
  """A function of one microbatch: of its index, and of the leaves of its batch."""

  jaxpr: "ClosedJaxpr"
  treedef: Any  # of what it returns
  held: list[Any]  # what it takes from outside, parameters too
  gathered: hoisting.Shapes  # of the arrays that it gathers from


class _Linked(NamedTuple):
  """A copy of an array in a dtype to add up cotangents in, and that of the array."""

  wide: jax.Array
  dtype: jnp.dtype

  def value(self, gathered: hoisting.Shapes) -> jax.Array:
    """The array: cast back in the loop's body, so that the loop adds up what is wide."""
    return hoisting.unhoisted(self.wide, gathered).astype(self.dtype)


def _may_have_tangent(x: Any) -> bool:
  return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
