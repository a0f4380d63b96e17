"""Checks that several modules need. A message gives the value, the requirement and the fix."""

from collections.abc import Callable, Collection
import inspect
import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax


def leaf_name(root: str, path: tuple[Any, ...]) -> str:
  """How messages name a leaf: ``batch['tokens']``; of a root with attributes ``state.step``."""
  if root.endswith("."):
    root, path = root + jax.tree_util.keystr(path[:1], simple=True), path[1:]
  return (root + jax.tree_util.keystr(path)).lstrip(".")


def named_leaves(
  root: str, tree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
  """The leaves of a tree, each with the name that messages have for it."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
  return [(leaf_name(root, path), x) for path, x in leaves]


def difference(
  name: str,
  got,
  wanted,
  what: str = "shape",
  of: Callable[..., Any] = jnp.shape,
) -> str:
  """Where a tree first differs from another in its leaves, in `what` these have, or in nodes."""

  def kinds(tree):
    return {leaf: of(x) for leaf, x in named_leaves(name, tree)}

  gots = kinds(got)
  wanteds = kinds(wanted)
  for leaf, kind in wanteds.items():
    if leaf not in gots:
      return f"{leaf} is missing"
    if gots[leaf] != kind:
      return f"{leaf} has {what} {gots[leaf]}, not {kind}"
  for leaf in gots:
    if leaf not in wanteds:
      return f"{leaf} is not expected"
  nodes: Any = jax.tree.structure(got)
  expected = jax.tree.structure(wanted)
  if nodes != expected:
    return f"{name} is a {nodes} and not a {expected}"
  return ""


def type_of(x) -> str:
  """The type of a leaf: ``float32[8]``."""
  return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def check_alike(what: str, name: str, got, wanted) -> None:
  """Checks that a tree that a function returned is like the one it was given."""
  different = difference(name, got, wanted, "type", type_of)
  if different:
    raise ValueError(
      f"In {what} {different}: return the same structure, shapes and dtypes, e.g. with .astype."
    )


def positive_int(name: str, value) -> int:
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


def booleans(**options) -> None:
  """Checks that options are bools: "no" would count as True."""
  for name, value in options.items():
    if type(value) is not bool:
      raise TypeError(f"{name}={value!r} must be True or False.")


def one_of(name: str, value, allowed: Collection[str]) -> str:
  """Checks that `value` is one of the `allowed` words."""
  if not isinstance(value, str) or value not in allowed:
    raise ValueError(
      f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}."
    )
  return value


def transformation(value, name: str = "inner") -> None:
  """Checks that `value` is an optax transformation, and says what to write if it is not."""
  if isinstance(value, optax.MultiSteps):
    raise TypeError(
      f"{name} is an optax.MultiSteps object, which accumulates already: give the optimizer that"
      " it wraps. A step that runs the microbatches itself takes that optimizer; a loop that has"
      " one microbatch at a time takes optax_accum.accumulate(optimizer, every_k)."
    )
  if not isinstance(value, optax.GradientTransformation):
    fix = (
      ": give an optax optimizer such as optax.adamw(1e-3), or build one with"
      " optax.GradientTransformation(init_fn, update_fn)."
    )
    if callable(value):
      call = f"{getattr(value, '__name__', 'optimizer')}(...)"
      fix = f" but something that may make one: call it first, as in {call}."
    raise TypeError(
      f"{name}={value!r} is not an optax.GradientTransformation{fix}"
    )


def refuse_fp8(name: str, params) -> None:
  """Refuses the fp8 statistics of Flax beside parameters, whose gradients are new values."""
  for leaf, _ in named_leaves(name, params):
    if "_overwrite_with_gradient" in leaf:
      raise TypeError(
        f"{leaf} is one of Flax's fp8 statistics, whose gradients are new values and have no mean"
        " over microbatches: take the step of the whole batch, or train in bfloat16."
      )


def function(loss_fn) -> None:
  """Checks that a loss is a function."""
  if not callable(loss_fn):
    raise TypeError(
      f"The loss is of type {type(loss_fn).__name__}: give the function itself, not its value, an"
      " optimizer or a number of microbatches."
    )


def why_not(fun, /, *args, **kwargs) -> str:
  """Why a function cannot be called so: "" if it, or what it wraps, can, or nobody knows."""
  why = ""
  while fun is not None:
    try:
      signature = inspect.signature(fun, follow_wrapped=False)
    except (TypeError, ValueError, NameError):
      return ""  # builtins and some callables have none
    try:
      signature.bind(*args, **kwargs)
      return ""
    except TypeError as error:
      why = str(error)
    # A decorator may take other arguments than what it wraps.
    fun = getattr(fun, "__wrapped__", None)
  return why
