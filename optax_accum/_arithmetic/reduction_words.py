"""Trees of reductions, from names and functions: one for each output, or for all below a node."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

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


class _Dataclass(Protocol):
  __dataclass_fields__: ClassVar[dict[str, Any]]


# Names at the leaves. (A `Sequence` would let any string pass a type checker.)
_Tree: TypeAlias = Mapping | tuple | list | _Dataclass | None
ReductionTree: TypeAlias = ReductionName | MergeFn | _Tree


def named(option: str, tree, default):
  """The reductions that a tree of names and functions stands for."""

  def find(path, name):
    where = _validate.leaf_name(option, path)
    if not callable(name):
      _validate.one_of(where, name, REDUCTIONS)
      return REDUCTIONS[name]
    return Merge(fun=name)

  # None means that the option was not given.
  if tree is None:
    return default
  return jax.tree_util.tree_map_with_path(find, tree)


def match(option: str, reductions, like):
  """A reduction for each leaf of `like`, or a `Merge` for a node, from a prefix tree of them."""
  try:
    jax.tree.broadcast(reductions, like)  # raises if it is no prefix tree
  except ValueError as error:
    # JAX names its own parameter in the error, and users know the option.
    why = str(error).replace("broadcast_prefix prefix_tree", option)
    raise ValueError(
      f"{option}={reductions!r} is not a prefix tree of the outputs: give one name for all, or a"
      f" tree with a name for each output, or for all below a node of it. {why}"
    ) from None

  def each(reduction, below):
    # A `Merge` reduces all below as one value, unless there is nothing below.
    if isinstance(reduction, Merge) and jax.tree.leaves(below):
      return reduction
    # Other reductions are repeated for every leaf below.
    return jax.tree.map(lambda _: reduction, below)

  return jax.tree.map(each, reductions, like)
