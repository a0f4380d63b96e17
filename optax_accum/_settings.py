"""Settings of a loss, such as ``train=True``, which a step takes for data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _arguments, _validate
from optax_accum._arguments import Slot

# What JAX raises where Python asks for the value of something traced.
VALUE_WANTED = (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)


def refuse(leaves: list[Any], fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
  """Refuses what is no array. `args` are those of the loss `fun` after the parameters.

  `leaves` are all that may be none: every call comes here.
  """
  if all(map(_is_data, leaves)):
    return
  arguments: dict[Slot, Any] = dict(enumerate(args, 1))
  arguments.update(kwargs)
  for slot, tree in arguments.items():
    for name, leaf in _validate.named_leaves(_described(fun, slot), tree):
      if _is_data(leaf):
        continue
      fix = f"{_arguments.name_of(fun, slot)}={leaf!r}" if leaf is tree else "..."
      raise TypeError(
        f"{name} is {leaf!r}, of type {type(leaf).__name__}, and a step takes arrays. A setting is"
        f" fixed in the loss, functools.partial(loss_fn, {fix}), and what is none left out."
      )


def note(fun: Callable[..., Any], shared: dict[Slot, Any]) -> str | None:
  """What to say where Python asked for a value: which arguments may be settings."""
  found = [slot for slot, x in shared.items() if _may_be_setting(x)]
  if not found:
    return None
  names = [_arguments.name_of(fun, slot) for slot in found]
  return (
    f"If the loss branches on {' or '.join(_described(fun, slot) for slot in found)}: a step traces"
    " all that it is passed, and Python has no value to branch on. Fix a setting in the loss,"
    f" functools.partial(loss_fn, {', '.join(f'{name}=...' for name in names)}), and make a step"
    " for each value."
  )


def _described(fun: Callable[..., Any], slot: Slot) -> str:
  name = _arguments.name_of(fun, slot)
  return f"argument {slot if name == '...' else name!r}"


def _is_data(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _may_be_setting(x: Any) -> bool:
  """Whether `x` is one bool or integer."""
  if not jax.tree.all(jax.tree.map(_is_data, x)) or not jax.tree_util.all_leaves([x]):
    return False
  kind = jnp.result_type(x)
  return not jnp.shape(x) and (kind == jnp.bool_ or jnp.issubdtype(kind, jnp.integer))
