"""A conditional update that copies nothing, and buffers that are used again."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.trees import Grads, Leaves

Operand = TypeVar("Operand")
Flag: TypeAlias = bool | jax.Array


def update_if(
  pred: Flag,
  fun: Callable[[Operand], Operand],
  operand: Operand,
  scope: str,
  differentiable: bool = False,
) -> Operand:
  """``fun(operand) if pred else operand``, without copying `operand`, whose type `fun` keeps.

  The compiled program has `scope` in the name of the conditional.

  The loop below runs once or not at all. XLA updates the carry of a loop in place on every backend,
  but XLA for GPU copies the operands and results of a conditional. A Python bool leaves neither in
  the program. A loop has no reverse mode, so `differentiable` uses `lax.cond`.
  """
  if isinstance(pred, bool):
    return fun(operand) if pred else operand
  # A loop carries arrays, so a Python number becomes one.
  operand = jax.tree.map(jnp.asarray, operand)

  def run(operand):
    # In shard_map, what devices may disagree about is part of a carry's type too.
    new = jax.tree.map(jnp.asarray, fun(operand))
    return jax.tree.map(across_devices.vary_like, new, operand)

  with jax.named_scope(scope):
    if differentiable:
      return lax.cond(pred, run, lambda operand: operand, operand)
    # A false flag in the type of `pred`: after one run it ends the loop.
    stop = jnp.zeros_like(pred)

    # The loop carries a pair: whether it runs (again), and the operand.
    def goes_on(carry):
      return carry[0]

    def run_once(carry):
      _, operand = carry
      return stop, run(operand)

    _, operand = lax.while_loop(goes_on, run_once, (pred, operand))
    return operand


class OutputBuffers:
  """The buffers in which a conditional returns updates: those of `total` if they fit, or spare."""

  def __init__(self, total, like):
    # `like` has the types of the updates, and `total` the sums of the gradients.
    self._treedef: Any
    self._like, self._treedef = jax.tree.flatten(like)
    # Sums in another tree than the updates lend no buffer.
    sums = [None] * len(self._like)
    if jax.tree.structure(total) == self._treedef:
      sums = jax.tree.leaves(total)
    # Of each update: whether it comes out in the buffer of the sum in the same place.
    self._shared = list(map(_holds, sums, self._like))
    unshared = []
    for x, shared in zip(self._like, self._shared, strict=True):
      if not shared:
        unshared.append(x)
    # Behind a barrier: of equal constants XLA makes one array, and copies it to each place.
    zeros = [jnp.zeros((), x.dtype) for x in unshared]
    zeros = lax.optimization_barrier(zeros)
    self.spare = list(map(across_devices.full_like, unshared, zeros))

  def filled(self, updates, total) -> tuple[Grads, Leaves]:
    """`total` and the spare buffers, with `updates` in them where they come out."""
    sums = jax.tree.leaves(total)
    spare = []
    for i, update in enumerate(jax.tree.leaves(updates)):
      if self._shared[i]:
        # The sum was used up to make the updates, so that its buffer is free.
        sums[i] = jnp.asarray(update).astype(sums[i].dtype)
      else:
        spare.append(update)
    total = jax.tree.unflatten(jax.tree.structure(total), sums)
    return total, spare

  def updates(self, total, spare, emit: Flag):
    """What `filled` put there where the cycle emits, and else zeros."""
    sums = jax.tree.leaves(total)
    # Those in spare buffers, in the order in which `filled` put them there.
    others = iter(spare)
    updates = []
    for i, like in enumerate(self._like):
      if not self._shared[i]:
        # Zeros already, where the cycle does not emit.
        updates.append(next(others))
        continue
      # The dtype of the sum holds the update without rounding, so this gives it back exactly.
      update = sums[i].astype(like.dtype)
      zeros = jnp.zeros_like(update)
      # Where the cycle does not emit, the buffer still has the sum, which is no update.
      updates.append(weighted_mean.select(emit, update, zeros))
    return self._treedef.unflatten(updates)


def _holds(acc: jax.Array | None, like: jax.ShapeDtypeStruct) -> bool:
  """Whether a sum's buffer can have updates like this in it, without rounding; None has none."""
  return (
    acc is not None
    and acc.shape == like.shape
    and dtypes.promote(acc.dtype, like.dtype) == acc.dtype
    # A complex dtype holds real numbers too, but a real update stays out of a complex sum.
    and jnp.iscomplexobj(acc) == jnp.issubdtype(like.dtype, jnp.complexfloating)
    # In shard_map both must differ between devices over the same axes, to have one type.
    and across_devices.varying_axes(acc) == across_devices.varying_axes(like)
  )
