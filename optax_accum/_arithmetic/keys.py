"""Numbers folded into random keys, so that no two microbatches or devices share noise."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._arithmetic import dtypes


def fold_in(keys: jax.Array, number: ArrayLike) -> jax.Array:
  """An array of keys, typed or raw, with a number folded into each."""
  if jax.random.key_impl(keys) == "unsafe_rbg":
    # Its folds commute. A caller who folds in the number of a step has smaller numbers.
    number = number + 2**30
  axes = jnp.ndim(keys)  # of the array of keys
  if not dtypes.is_key(keys):
    axes -= 1  # the last is of the words of a raw key
  fold = jax.random.fold_in
  # One `vmap` for each axis of the array of keys; all get the same number.
  for _ in range(axes):
    fold = jax.vmap(fold, (0, None))
  return fold(keys, number)
