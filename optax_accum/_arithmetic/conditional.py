"""A conditional update that copies nothing, and buffers that are used again."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.trees import Grads, Tree

Operand = TypeVar("Operand")
Flag: TypeAlias = bool | jax.Array


def update_if(
  pred: Flag, fun: Callable[[Operand], Operand], operand: Operand, differentiable: bool = False
) -> Operand:
  """``fun(operand) if pred else operand``, without copying `operand`, whose type `fun` keeps.

  The loop below runs zero times or once. XLA updates the carry of a loop in place on
  every backend, where XLA for GPU copies each operand and result of a conditional. A Python bool
  leaves neither in the program. Reverse mode cannot pass a loop: `differentiable` uses `lax.cond`.
  """
  if isinstance(pred, bool):
    return fun(operand) if pred else operand
  operand = jax.tree.map(jnp.asarray, operand)

  def run(operand: Operand) -> Operand:
    # In shard_map, what devices may disagree about is part of a carry's type too.
    new = jax.tree.map(jnp.asarray, fun(operand))
    return jax.tree.map(across_devices.vary_like, new, operand)

  if differentiable:
    return lax.cond(pred, run, lambda operand: operand, operand)
  stop = jnp.zeros_like(pred)
  return lax.while_loop(lambda c: c[0], lambda c: (stop, run(c[1])), (pred, operand))[1]


class OutputBuffers:
  """Buffers that updates like `like` come out of a conditional in: those of `total`, or `spare`.

  Accumulators can serve if all have the shapes, hold the dtypes without rounding and, in
  `shard_map`, are as varying (after a reduction over devices they are more so).
  """

  def __init__(self, total: Grads, like: Tree):
    self._like = like
    one_tree = jax.tree.structure(total) == jax.tree.structure(like)
    self._shared = one_tree and all(map(_holds, jax.tree.leaves(total), jax.tree.leaves(like)))
    self.spare: Tree = ()
    if not self._shared:
      # XLA makes one array of constants that are the same, and copies it.
      zeros = lax.optimization_barrier(jax.tree.map(lambda x: jnp.zeros((), x.dtype), like))
      self.spare = jax.tree.map(across_devices.full_like, like, zeros)

  def filled(self, updates: Grads, total: Grads) -> tuple[Grads, Tree]:
    """`total` and the spare buffers, with `updates` in the ones or the others."""
    if not self._shared:
      return total, updates
    return jax.tree.map(lambda x, acc: jnp.asarray(x).astype(acc.dtype), updates, total), ()

  def updates(self, total: Grads, spare: Tree, emit: Flag) -> Grads:
    """What `filled` put there where the cycle emits, and else zeros."""
    if not self._shared:
      return spare

    def emitted(acc: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
      return weighted_mean.select(emit, acc.astype(like.dtype), jnp.zeros_like(acc, like.dtype))

    return jax.tree.map(emitted, total, self._like)


def _holds(acc: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
  return (
    acc.shape == like.shape
    and dtypes.promote(acc.dtype, like.dtype) == acc.dtype
    and jnp.iscomplexobj(acc) == jnp.issubdtype(like.dtype, jnp.complexfloating)
    and across_devices.varying_axes(acc) == across_devices.varying_axes(like)
  )
