"""A state of other parameters, or of another optimizer: refused, with the first leaf that differs.

So it is with a checkpoint of another model. What JAX says of it names neither.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._streaming.state import is_state

Init = Callable[[Any], Any]


FIX = (
  "it is the state of other parameters, or of another optimizer. Restore parameters and state"
  " from a checkpoint of this model and optimizer, or begin with what init(params) returns."
)
FAILED = object()
# What JAX, Optax and Python say where a state lacks a leaf, or has one of another shape.
OF_SHAPES_AND_TREES = (TypeError, ValueError, AttributeError)


@contextlib.contextmanager
def explained(name: str, init: Init, params: Any, state: Any) -> Iterator[None]:
  """Says of an error that `state` is not as `init` makes it for these parameters, if it is not."""
  try:
    yield
  except Exception as error:
    difference = _first_difference(name, init, params, state)
    if difference and isinstance(error, OF_SHAPES_AND_TREES):
      raise ValueError(f"{difference}: {FIX}") from error
    if difference:  # an optimizer's own error, by which its state may not have to do with it
      error.add_note(f"{difference}. If it was restored: {FIX}")
    raise


def check_kept(
  name: str, init: Init, params: Any, state: Any, new_params: Any, new_state: Any
) -> None:
  """Checks that an update did not fit parameters and state of other shapes to one another.

  JAX broadcasts: moments of shape (1, 3) step parameters of shape (2, 3), and are then (2, 3).
  A state that grows by itself passes: it does not become what `init` makes.
  """
  if _shapes((new_params, new_state)) == _shapes((params, state)):
    return
  moved = _shapes(new_params) != _shapes(params)
  if not (moved or _became_as_made(name, _made(init, params), state, new_state)):
    return
  if difference := _first_difference(name, init, params, state):
    raise ValueError(f"{difference}. If it was restored: {FIX}")


def _shapes(tree: Any) -> Any:
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [jnp.shape(x) for x in leaves]


def _became_as_made(name: str, made: Any, old: Any, new: Any) -> bool:
  """Whether the update gave a leaf the shape that `init` makes, which it did not have before."""
  if made is FAILED:
    return False
  wanted, before, after = (_leaves(name, tree)[0] for tree in (made, old, new))
  return any(
    jnp.shape(before[leaf]) != jnp.shape(after[leaf]) == x.shape
    for leaf, x in wanted.items()
    if leaf in before and leaf in after
  )


def _made(init: Init, params: Any) -> Any:
  try:
    return jax.eval_shape(init, params)
  except Exception:  # it fails by itself, or wants values: nothing to compare with
    return FAILED


def _first_difference(name: str, init: Init, params: Any, state: Any) -> str | None:
  """Where `state` differs from ``init(params)`` in tree or shape. `accumulate` checks its own."""
  made = _made(init, params)
  if made is FAILED:
    return None
  wanted, own = _leaves(name, made)
  got = {leaf: x for leaf, x in _leaves(name, state)[0].items() if not leaf.startswith(own)}
  for leaf, x in wanted.items():
    if leaf not in got:
      return f"{leaf} is missing, and init makes it, of shape {x.shape}"
    if jnp.shape(got[leaf]) != x.shape:
      return f"{leaf} has shape {jnp.shape(got[leaf])}, and init makes it of shape {x.shape}"
  for leaf in got:
    if leaf not in wanted:
      return f"{leaf} is there, and init makes no such leaf"
  trees: list[Any] = [jax.tree.structure(x) for x in (state, made)]
  if own or trees[0] == trees[1]:
    return None
  return f"{name} is a {trees[0]}, and init makes a {trees[1]}"


def _leaves(name: str, tree: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
  """The leaves by name, and the names of the states of `accumulate`, which are left out."""
  named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state)
  leaves = {_validate.leaf_name(name, path): x for path, x in named}
  own = tuple(leaf for leaf, x in leaves.items() if is_state(x))
  return {leaf: x for leaf, x in leaves.items() if leaf not in own}, own
