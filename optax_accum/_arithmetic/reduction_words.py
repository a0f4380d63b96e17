"""Trees of reductions, from names and functions: one for each output, or for all below a node."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args, Literal, Protocol, TypeAlias

import jax

from optax_accum import _validate
from optax_accum._arithmetic.reductions import (
  Merge,
  MergeFn,
  REDUCTIONS,
)

ReductionName: TypeAlias = Literal[
  "mean", "sum", "max", "min", "last", "stack", "concat"
]
GradReductionName: TypeAlias = Literal["mean", "sum", "max", "min", "last"]


class _Dataclass(Protocol):
  __dataclass_fields__: ClassVar[dict[str, Any]]


# Names at the leaves. (A `Sequence` would let any string pass a type checker.)
_Tree: TypeAlias = Mapping | tuple | list | _Dataclass | None
ReductionTree: TypeAlias = ReductionName | MergeFn | _Tree
GradReductionTree: TypeAlias = GradReductionName | _Tree


def named(option: str, tree, default):
  """The reductions that a tree of names and functions stands for."""

  def find(path, name):
    where = _validate.leaf_name(option, path)
    if not callable(name):
      return REDUCTIONS[_validate.one_of(where, name, REDUCTIONS)]
    why = _validate.why_not(name, None, None)
    if why:
      raise TypeError(
        f"{where}={name!r} must take two values, merge(a, b): {why}."
      )
    return Merge.by(name)

  if tree is None:
    return default
  return jax.tree_util.tree_map_with_path(find, tree)


def named_of_gradients(tree, default):
  """The same of `grad_reduction`, which takes fewer names and no function."""
  for where, name in _validate.named_leaves("grad_reduction", tree):
    _validate.one_of(where, name, get_args(GradReductionName))
  return named("grad_reduction", tree, default)


def match(option: str, reductions, like, of: str = "outputs"):
  """A reduction for each leaf of `like`, or a `Merge` for a node of it, from a prefix tree of them.

  Messages call the leaves `of`.
  """
  try:
    jax.tree.broadcast(reductions, like)  # raises if it is no prefix tree
  except ValueError as error:
    why = str(error).replace("broadcast_prefix prefix_tree", option)
    raise ValueError(
      f"{option}={reductions!r} is not a prefix tree of the {of}: give one name for all, or a tree"
      f" with a name for each {of[:-1]}, or for all below a node of it. {why}"
    ) from None

  def each(reduction, below):
    if isinstance(reduction, Merge) and jax.tree.leaves(below):
      return reduction
    return jax.tree.map(lambda _: reduction, below)

  return jax.tree.map(each, reductions, like)
