"""Settings of a loss, such as ``train=True``, which a step takes for data."""

from collections.abc import Callable
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._microbatches.roles import name_of, Slot

# What JAX raises where Python asks for the value of something traced.
VALUE_WANTED = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerIntegerConversionError,
  jax.errors.TracerArrayConversionError,
)


def refuse(leaves: list[Any], fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
  """Refuses what is no array. `args` are those of the loss `fun` after the parameters.

  `leaves` are all that may be none: every call comes here.
  """
  if all(map(_holds_data, set(map(type, leaves)))) or all(map(is_data, leaves)):
    return
  arguments: dict[Slot, Any] = dict(enumerate(args, 1))
  arguments.update(kwargs)
  for slot, tree in arguments.items():
    for name, leaf in _validate.named_leaves(_described(fun, slot), tree):
      if is_data(leaf):
        continue
      fix = f"{name_of(fun, slot)}={leaf!r}" if leaf is tree else "..."
      if isinstance(leaf, np.ndarray):
        fix = "..."
      raise TypeError(
        f"{described(name, leaf)}, and a step takes arrays of numbers. A setting is fixed in the"
        f" loss, functools.partial(loss_fn, {fix}), and what is none left out."
      )


def described(name: str, leaf: Any) -> str:
  """What messages say of what is no data."""
  dtype = f" and dtype {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
  return f"{name} is {leaf!r}, of type {type(leaf).__name__}{dtype}"


def note(error: Exception, fun: Callable[..., Any], shared: dict[Slot, Any]) -> str | None:
  """What to say where Python asked for a value: which arguments may be settings."""
  branches = isinstance(error, jax.errors.TracerBoolConversionError)
  found: dict[Slot, str] = {}
  for slot, tree in shared.items():
    for name, x in _validate.named_leaves(_described(fun, slot), tree):
      if _may_be_setting(x, alone=x is tree, branches=branches):
        found.setdefault(slot, name)
  if not found:
    return None
  fixed = ", ".join(f"{name_of(fun, slot)}=..." for slot in found)
  return (
    f"If the loss takes the value of {' or '.join(found.values())}, as a branch, a dict's key"
    " or a static argument does: a step traces all that it is passed, and Python has no value. Fix"
    f" a setting in the loss, functools.partial(loss_fn, {fixed}), and make a step for each value."
  )


def wants_value(error: Exception) -> bool:
  """Whether Python asked for the value of something traced.

  The text alone says so of shapes, and of what is hashed: static arguments, and keys of a dict.
  """
  wanted = "sequences of concrete values|unhashable type: '[A-Za-z]*Tracer'"
  return isinstance(error, VALUE_WANTED) or re.search(wanted, str(error)) is not None


def _described(fun: Callable[..., Any], slot: Slot) -> str:
  name = name_of(fun, slot)
  return f"argument {slot if name == '...' else name!r}"


@functools.cache
def _holds_data(kind: type) -> bool:
  """Whether all values of a type are data: this is asked in every call."""
  numbers = (bool, int, float, complex, np.number, np.bool_)
  return issubclass(kind, (jax.Array, *numbers)) or hasattr(kind, "__jax_array__")


def is_data(leaf: Any) -> bool:
  """Whether it is an array of numbers or of keys, or a number."""
  kind: Any = type(leaf)
  if _holds_data(kind):
    return True
  dtype = getattr(leaf, "dtype", None)
  if isinstance(leaf, type) or dtype is None:  # as jnp.float32, whose dtype is that of its arrays
    return False
  if isinstance(dtype, np.dtype):
    if dtype.kind in "biufc":
      return True
    return jnp.issubdtype(dtype, np.number) or dtype == jax.dtypes.float0  # as bfloat16
  kind = getattr(dtype, "type", None)
  return isinstance(kind, type) and issubclass(kind, jax.dtypes.extended)  # as of random keys


def _may_be_setting(x: Any, alone: bool, branches: bool) -> bool:
  """Whether `x` may be one: a bool, or a number that is a whole argument.

  Branches on floats are mostly on what was computed from them.
  """
  if not is_data(x) or jnp.shape(x):
    return False
  kinds = [jnp.bool_, *[jnp.integer] * alone, *[jnp.floating] * (alone and not branches)]
  return any(jnp.issubdtype(jnp.result_type(x), kind) for kind in kinds)
