"""A tree as its leaves: what a step flattens, JAX need not flatten again."""

import operator
from typing import Any

import jax


class Flattened:
  """The leaves of a tree and its structure: one node to JAX, with the tree's names for its leaves.

  A step must know its parameters and state leaf by leaf, before it is run and after. A jitted
  function that takes and returns these does not walk the tree a second time.
  """

  __slots__ = ("leaves", "treedef")

  def __init__(self, leaves: Any, treedef: Any) -> None:
    self.leaves, self.treedef = leaves, treedef

  @classmethod
  def of(cls, tree: Any) -> "Flattened":
    """`tree` as its leaves."""
    return cls(*jax.tree.flatten(tree))

  def alike(self, tree: Any) -> "Flattened":
    """Another tree, which has something in place of every leaf, None too."""
    return Flattened(self.treedef.flatten_up_to(tree), self.treedef)

  def tree(self) -> Any:
    """The tree."""
    return self.treedef.unflatten(self.leaves)


class _Path:
  """The path to a leaf, as one key."""

  def __init__(self, path: Any) -> None:
    self._path = path

  def __str__(self) -> str:
    return jax.tree_util.keystr(self._path)


def _with_keys(x: Flattened) -> Any:
  # None would be no leaf; what JAX puts in place of leaves here may be.
  positions = x.treedef.unflatten(range(len(x.leaves)))
  paths = jax.tree_util.tree_leaves_with_path(positions)
  return [(_Path(path), x.leaves[i]) for path, i in paths], x.treedef


jax.tree_util.register_pytree_with_keys(
  Flattened,
  _with_keys,
  lambda treedef, leaves: Flattened(leaves, treedef),
  operator.attrgetter("leaves", "treedef"),
)
