"""What an update makes of the types of a state: they stay, or become wider."""

from collections.abc import Callable
import operator
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes


def same_types(name: str, new, old):
  """`new` in the shardings of `old`, and in dtypes that hold both, as a conditional needs it."""
  different = _validate.difference(name, new, old)
  if different:
    raise ValueError(
      f"After an update {different}: the optimizer's init and update must return states of one tree"
      " and the same shapes. (optax.monitor's do not: use optax.snapshot.) A restored state must"
      " be of these parameters and this optimizer."
    )

  def cast(x, before):
    x = jnp.asarray(x)
    dtype = jnp.result_type(before)
    # If this is wider than `before`, `widened` casts the operand of the conditional to it first.
    if x.dtype != dtype:
      x = x.astype(dtypes.promote(x.dtype, dtype))
    return across_devices.sharded_like(x, before)

  return jax.tree.map(cast, new, old)


def widened(update: Callable[..., Any], operand):
  """`operand` in the dtypes in which `update` returns it, such as float32 moments of bfloat16."""
  # Cast before the conditional: rounding its results would lose bits in each step.
  like = jax.eval_shape(update, operand)
  wide = jax.tree.map(dtypes.in_dtype_of, operand, like)
  # `in_dtype_of` returns the same object where the dtype fits already.
  fits = jax.tree.map(operator.is_, operand, wide)
  if jax.tree.all(fits):
    return operand
  # An update of the wider operand may return a wider one still, so this repeats until none does.
  return widened(update, wide)
