"""The checks that more than one module needs, and their wording.

Every message gives the value, the requirement and the fix, with the path of the leaf.
"""

from collections.abc import Collection
import operator
from typing import Any

import jax
import optax


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
