"""What can be differentiated, and what to pass where an object that holds parameters cannot be.

No library is imported to know its objects by: they are told by their attributes and class names.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate


def check_step(params: Any) -> None:
  """Checks what a step is given as its parameters, which it updates and returns."""
  if instead := _instead(params):
    raise TypeError(f"params is {instead}")
  check_differentiable("argument 0", params)


def check_differentiable(what: str, tree: Any) -> None:
  """Checks that every leaf can be differentiated."""
  # A step asks in every call, so most trees are told by the few dtypes that they have.
  if all(map(_is_inexact, {getattr(x, "dtype", None) for x in jax.tree.leaves(tree)})):
    return
  if instead := _instead(tree):
    raise TypeError(f"{what} is {instead}")
  for name, leaf in _validate.named_leaves(what, tree):
    kind = _kind(leaf)
    if _is_inexact(kind):
      continue
    word = f"type {kind.__name__}" if isinstance(kind, type) else f"dtype {kind}"
    raise TypeError(
      f"{name} has {word} and cannot be differentiated: keep all but floating and complex arrays"
      " out of the differentiated argument, e.g. close over them or pass them as another argument"
      " (in Equinox: eqx.partition(model, eqx.is_inexact_array))."
    )


def _kind(leaf: Any) -> Any:
  """The dtype of an array, or the type of what is none."""
  return leaf.dtype if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else type(leaf)


def _is_inexact(kind: Any) -> bool:
  if kind is None or isinstance(kind, type):
    return kind in (float, complex)
  return jnp.issubdtype(kind, jnp.inexact)


def _instead(tree: Any) -> str | None:
  """Of an object that is more than parameters: what it is, and what to pass instead."""
  name = type(tree).__name__
  if all(hasattr(tree, field) for field in ("params", "opt_state", "apply_gradients")):
    return (
      f"a {name}, which holds more than parameters: pass its parts, state.params and"
      " state.opt_state, and put what comes back in its place with state.replace(params=params,"
      " opt_state=opt_state)."
    )
  classes = [(c.__module__, c.__name__) for c in type(tree).__mro__]
  if any(c == "Module" and module.startswith("flax.nnx") for module, c in classes):
    return (
      f"{name}, an nnx module, which holds more than parameters: take them out with graphdef,"
      " params, rest = nnx.split(model, nnx.Param, ...), pass params, and have the loss use"
      " nnx.merge(graphdef, params, rest). nnx.update(model, params) puts them back."
    )
  return None
