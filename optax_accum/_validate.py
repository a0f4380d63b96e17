"""The checks that more than one module needs, and their wording.

Every message gives the value, the requirement and the fix, with the path of the leaf.
"""

from collections.abc import Collection
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from optax_accum._arithmetic import weighted_mean


def leaf_name(root: str, path: tuple[Any, ...]) -> str:
  """How messages name a leaf: ``batch['tokens']``."""
  return (root + jax.tree_util.keystr(path)).lstrip(".")


def named_leaves(root: str, tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree, each with the name that messages have for it."""
  return [(leaf_name(root, path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def positive_int(name: str, value: Any) -> int:
  """`value` as an int of at least 1; bools, floats and traced values are errors."""
  if isinstance(value, jax.core.Tracer):
    raise TypeError(
      f"{name} is a traced value ({value}), but shapes depend on it: pass a Python int, e.g. by"
      " marking it static in jax.jit."
    )
  try:
    if isinstance(value, bool):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise TypeError(f"{name}={value!r} must be an int of at least 1.") from None
  if number < 1:
    raise ValueError(f"{name}={value!r} must be at least 1.")
  return number


def booleans(**options: Any) -> None:
  """Checks that options are bools: "no" would count as True."""
  for name, value in options.items():
    if type(value) is not bool:
      raise TypeError(f"{name}={value!r} must be True or False.")


def one_of(name: str, value: Any, allowed: Collection[str]) -> str:
  """Checks that `value` is one of the `allowed` words."""
  if not isinstance(value, str) or value not in allowed:
    raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}.")
  return value


def accumulator_dtype(value: Any) -> jnp.dtype | None:
  """Checks that accumulators of this dtype can hold a mean."""
  if value is not None and not jnp.issubdtype(value, jnp.inexact):
    raise TypeError(
      f"accumulator_dtype={jnp.dtype(value)} cannot hold a mean: give a floating or complex dtype,"
      " or None for the gradient's dtype promoted with float32."
    )
  return None if value is None else jnp.dtype(value)


def holds_dtype(leaf: str, dtype: DTypeLike, accumulator: DTypeLike | None) -> None:
  """Checks that accumulating `dtype` in `accumulator` does not lose an imaginary part."""
  if accumulator is None or not jnp.issubdtype(dtype, jnp.complexfloating):
    return
  if not jnp.issubdtype(accumulator, jnp.complexfloating):
    raise TypeError(
      f"accumulator_dtype={jnp.dtype(accumulator)} would lose the imaginary part of {leaf}, which"
      f" is {jnp.dtype(dtype)}: give a complex dtype, or None."
    )


def weight(source: str, value: Any) -> None:
  """Checks a microbatch's weight: a real scalar, not negative where that can be seen."""
  numeric = hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))
  shape = jnp.shape(value) if numeric else ()
  dtype = jnp.result_type(value) if numeric else jnp.dtype(object)
  if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
    raise TypeError(f"{source} gave the weight {value!r}; it must be a real scalar, a number.")
  if shape != () or jnp.issubdtype(dtype, jnp.complexfloating):
    raise ValueError(
      f"{source} gave a weight of shape {shape} and dtype {dtype}; it must be a real scalar, such"
      " as jnp.sum(mask)."
    )
  if isinstance(value, jax.core.Tracer):
    return
  number = value if isinstance(value, (int, float)) else float(value)
  if not 0 <= number < np.inf:
    raise ValueError(f"{source} gave the weight {value}; it must be 0 or more, and finite.")
  if number and not weighted_mean.LEAST <= number <= weighted_mean.MOST:
    raise ValueError(
      f"{source} gave the weight {value}; it must be 0, or from {weighted_mean.LEAST} to"
      f" {weighted_mean.MOST}, as float32 cannot divide by others: rescale the weights. In a mean"
      " their ratios alone matter."
    )


def transformation(value: Any, name: str = "inner") -> None:
  """Checks that `value` is an optax transformation, and says what to write if it is not."""
  if isinstance(value, optax.MultiSteps):
    raise TypeError(
      f"{name} is an optax.MultiSteps object, which accumulates already: give the optimizer that"
      " it wraps. A step that runs the microbatches itself takes it as it is; a loop that has one"
      " microbatch at a time takes it as optax_accum.accumulate(optimizer, every_k)."
    )
  if not isinstance(value, optax.GradientTransformation):
    fix = (
      ": give an optax optimizer such as optax.adamw(1e-3), or build one with"
      " optax.GradientTransformation(init_fn, update_fn)."
    )
    if callable(value):
      call = f"{getattr(value, '__name__', 'optimizer')}(...)"
      fix = f" but something that may make one: call it first, as in {call}."
    raise TypeError(f"{name}={value!r} is not an optax.GradientTransformation{fix}")
