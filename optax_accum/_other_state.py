"""A state of other parameters, or of another optimizer: refused, with the first leaf that differs.

So it is with a checkpoint of another model. What JAX says of it names neither.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._accumulate_state import is_state

Init = Callable[[Any], Any]


@contextlib.contextmanager
def explained(name: str, init: Init, params: Any, state: Any) -> Iterator[None]:
  """Says of an error that `state` is not as `init` makes it for these parameters, if it is not."""
  try:
    yield
  except Exception as error:
    if difference := _first_difference(name, init, params, state):
      raise ValueError(difference) from error
    raise


def check_kept(name: str, init: Init, params: Any, state: Any, new: Any, old: Any) -> None:
  """Checks that an update which gave other shapes than it got was not given such a state.

  JAX broadcasts: moments of shape (1, 3) step parameters of shape (2, 3), and are then (2, 3).
  """
  if _shapes(new) == _shapes(old):
    return
  if difference := _first_difference(name, init, params, state):
    raise ValueError(difference)


def _shapes(tree: Any) -> Any:
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [jnp.shape(x) for x in leaves]


def _first_difference(name: str, init: Init, params: Any, state: Any) -> str | None:
  """Where `state` differs from ``init(params)`` in tree or shape. `accumulate` checks its own."""
  try:
    made = jax.eval_shape(init, params)
  except Exception:  # it fails by itself, or wants values: nothing to compare with
    return None
  fix = (
    "it is the state of other parameters, or of another optimizer. Restore parameters and state"
    " from a checkpoint of this model and optimizer, or begin with what init(params) returns."
  )
  wanted, own = _leaves(name, made)
  got = {leaf: x for leaf, x in _leaves(name, state)[0].items() if not leaf.startswith(own)}
  for leaf, x in wanted.items():
    if leaf not in got:
      return f"{leaf} is missing, and init makes it, of shape {x.shape}: {fix}"
    if jnp.shape(got[leaf]) != x.shape:
      return f"{leaf} has shape {jnp.shape(got[leaf])}, and init makes it of shape {x.shape}: {fix}"
  for leaf in got:
    if leaf not in wanted:
      return f"{leaf} is there, and init makes no such leaf: {fix}"
  trees: list[Any] = [jax.tree.structure(x) for x in (state, made)]
  if own or trees[0] == trees[1]:
    return None
  return f"{name} is a {trees[0]}, and init makes a {trees[1]}: {fix}"


def _leaves(name: str, tree: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
  """The leaves by name, and the names of the states of `accumulate`, which are left out."""
  named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state)
  leaves = {_validate.leaf_name(name, path): x for path, x in named}
  own = tuple(leaf for leaf, x in leaves.items() if is_state(x))
  return {leaf: x for leaf, x in leaves.items() if leaf not in own}, own
