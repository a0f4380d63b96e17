"""A conditional update that copies nothing, and buffers that are used again."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_accum import _across_devices, _weighted_mean

Operand = TypeVar("Operand")
Flag: TypeAlias = bool | jax.Array


def update_if(
  pred: Flag, fun: Callable[[Operand], Operand], operand: Operand, differentiable: bool = False
) -> Operand:
  """``fun(operand) if pred else operand``, without copying `operand`.

  The loop below runs zero times or once. XLA updates the carry of a loop in place on
  every backend, where XLA for GPU copies each operand and result of a conditional.

  A loop's carry has one type, so `fun` must return the tree, shapes and dtypes of `operand`: see
  `same_types`. A Python bool as `pred` leaves no conditional in the program.
  `differentiable` uses ``lax.cond``, which reverse-mode differentiation can pass and a loop
  cannot. (Forward mode and `vmap` pass both.)
  """

  def run(operand: Operand) -> Operand:
    return jax.tree.map(_vary_like, fun(operand), operand)

  if isinstance(pred, bool):
    return fun(operand) if pred else operand
  operand = jax.tree.map(jnp.asarray, operand)
  if differentiable:
    return lax.cond(pred, run, lambda operand: operand, operand)
  stop = jnp.zeros_like(pred)
  return lax.while_loop(lambda c: c[0], lambda c: (stop, run(c[1])), (pred, operand))[1]


def _vary_like(value: jax.Array, like: jax.Array) -> jax.Array:
  # In shard_map, what devices may disagree about is part of a carry's type too.
  return _across_devices.vary_like(jnp.asarray(value), like)


class OutputBuffers:
  """Buffers that updates like `like` come out of a conditional in; those of `total` where they can.

  An accumulator can serve if it has the shape, holds the dtype without rounding and, in
  `shard_map`, is as varying (after a reduction over devices it is more so).
  """

  def __init__(self, total: optax.Updates, like: optax.Updates):
    self._sums, self._like = jax.tree.leaves(total), jax.tree.leaves(like)
    self._trees: list[Any] = [jax.tree.structure(total), jax.tree.structure(like)]
    same = self._trees[0] == self._trees[1]
    self._shared = [same and _holds(x, y) for x, y in zip(self._sums, self._like, strict=False)]
    zeros = [_across_devices.vary_like(jnp.zeros_like(x), x) for x in self._like]
    self.buffers = self._choose(self._sums, zeros) if same else zeros

  def _choose(self, shared: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    return [x if here else y for x, y, here in zip(shared, others, self._shared, strict=True)]

  def sums(self, buffers: list[jax.Array]) -> optax.Updates:
    """`total`, with the buffers instead of those of its leaves that they share."""
    sums = self._choose(buffers, self._sums) if any(self._shared) else self._sums
    return self._trees[0].unflatten(sums)

  def filled(self, updates: optax.Updates) -> list[jax.Array]:
    """The buffers with `updates` in them, in the dtypes of the buffers, which hold theirs."""
    leaves = jax.tree.leaves(updates)
    return [jnp.asarray(x).astype(b.dtype) for x, b in zip(leaves, self.buffers, strict=True)]

  def updates(self, buffers: list[jax.Array], emit: Flag) -> optax.Updates:
    """What is in the buffers where the cycle emits, and else zeros."""
    updates = [
      _weighted_mean.select(emit, buffer.astype(x.dtype), jnp.zeros_like(buffer, x.dtype))
      for buffer, x in zip(buffers, self._like, strict=True)
    ]
    return self._trees[1].unflatten(updates)


def _holds(acc: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
  return (
    acc.shape == like.shape
    and _weighted_mean.promote(acc.dtype, like.dtype) == acc.dtype
    and jnp.iscomplexobj(acc) == jnp.issubdtype(like.dtype, jnp.complexfloating)
    and _across_devices.varying_axes(acc) == _across_devices.varying_axes(like)
  )


def distinct(tree: Any) -> Any:
  """`tree`, with a copy of each array that stands in it before: XLA wants to be donated it once.

  ``init`` of optax's `lbfgs` returns such a state. What a step returns is distinct.
  """
  seen: set[int] = set()

  def copied(x: Any) -> Any:
    if id(x) in seen and isinstance(x, jax.Array):
      return jnp.copy(x)
    seen.add(id(x))
    return x

  return jax.tree.map(copied, tree)
