"""Run a function or leave its operand alone, in place."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _reduce

Operand = TypeVar("Operand")


def update_if(
  pred: bool | jax.Array,
  fun: Callable[[Operand], Operand],
  operand: Operand,
  differentiable: bool = False,
) -> Operand:
  """``fun(operand) if pred else operand``, without copying `operand`.

  The loop below runs zero times or once. XLA updates the carry of a loop in place on
  every backend, where XLA for GPU copies each operand and result of a conditional.

  Args:
    pred: bool scalar. A Python bool leaves no conditional in the program, and the results
      as they are.
    fun: maps `operand` to the same tree of shapes. Its results are cast to the dtypes of
      `operand`, because a carry has the same type before and after.
    operand: pytree of arrays.
    differentiable: use ``lax.cond``, which reverse-mode differentiation can pass and a
      loop cannot. (Forward mode and `vmap` pass both.)

  Returns:
    A pytree like `operand`.
  """

  def run(operand: Operand) -> Operand:
    return jax.tree.map(_cast_like, fun(operand), operand)

  if isinstance(pred, bool):
    return fun(operand) if pred else operand
  operand = jax.tree.map(jnp.asarray, operand)
  if differentiable:
    return lax.cond(pred, run, lambda operand: operand, operand)
  stop = jnp.zeros_like(pred)
  return lax.while_loop(lambda c: c[0], lambda c: (stop, run(c[1])), (pred, operand))[1]


def _cast_like(value: jax.Array, like: jax.Array) -> jax.Array:
  value = jnp.asarray(value)
  value = value if value.dtype == like.dtype else value.astype(like.dtype)
  # In shard_map, what devices may disagree about is part of a carry's type too.
  return _reduce.vary_like(value, like)
