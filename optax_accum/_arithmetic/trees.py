"""Names for the pytrees that are passed around, and trees with None in the place of leaves.

To a type checker each of the names is anything.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

Tree: TypeAlias = Any  # whatever pytree
Params: TypeAlias = Any  # what is differentiated and updated
Grads: TypeAlias = Any  # of the parameters, leaf by leaf
OptState: TypeAlias = Any  # of an optax transformation
Batch: TypeAlias = Any  # arrays with an axis of rows
Carry: TypeAlias = Any  # what each microbatch hands to the next
Aux: TypeAlias = Any  # what a loss returns in addition to its value

Leaf: TypeAlias = Any  # an array, a shape, a tracer or a number
Leaves: TypeAlias = list[Any]
Path: TypeAlias = tuple[Any, ...]  # of a leaf, as jax.tree_util has it
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]


def masked_like(like, tree):
  """A tree with None where `like` has it."""

  def choose(x, own):
    if x is None:
      return None
    return own

  return map_none(choose, like, tree)


def combine(tree, other):
  """A tree with what `other` has where the first has None."""

  def choose(x, own):
    if x is None:
      return own
    return x

  return map_none(choose, tree, other)


def map_none(fun, *trees):
  """As `jax.tree.map`, for which None is a leaf, and not an empty tree."""
  return jax.tree.map(fun, *trees, is_leaf=lambda x: x is None)
