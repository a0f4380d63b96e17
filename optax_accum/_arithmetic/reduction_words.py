"""Trees of reductions and of their names: one for each output, or for all below a node."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args, Literal, Protocol, TypeAlias

import jax

from optax_accum import _validate
from optax_accum._arithmetic.reductions import Concat, Mean, Reduction, REDUCTIONS
from optax_accum._arithmetic.trees import Path, Tree

ReductionName: TypeAlias = Literal["mean", "sum", "max", "min", "last", "stack", "concat"]
GradReductionName: TypeAlias = Literal["mean", "sum", "max", "min", "last"]


class _Dataclass(Protocol):
  __dataclass_fields__: ClassVar[dict[str, Any]]


# Names at the leaves. (A `Sequence` would let any string pass a type checker.)
_Tree: TypeAlias = Mapping[Any, Any] | tuple[Any, ...] | list[Any] | _Dataclass | None
ReductionTree: TypeAlias = ReductionName | _Tree
GradReductionTree: TypeAlias = GradReductionName | _Tree


def named(
  option: str, tree: Tree, concat_axis: int | None = None, batch_axis: Sequence[int] = (0,)
) -> Tree:
  """The reductions that a tree of names stands for; `batch_axis` are those of the batch."""
  if concat_axis is not None and type(concat_axis) is not int:
    raise TypeError(f"concat_axis={concat_axis!r} must be an int, an axis of outputs, or None.")

  def find(path: Path, name: str) -> Reduction:
    where = _validate.leaf_name(option, path)
    reduction = REDUCTIONS[_validate.one_of(where, name, REDUCTIONS)]
    if not isinstance(reduction, Concat):
      return reduction
    if concat_axis is None and any(batch_axis):
      raise ValueError(
        f'{where}="concat" with batch_axis={" and ".join(map(str, batch_axis))}: give the axis of'
        " the outputs that has the rows, e.g. concat_axis=0."
      )
    return Concat(concat_axis or 0)

  return jax.tree_util.tree_map_with_path(find, tree)


def named_of_aux(tree: Tree, concat_axis: int | None, batch_axis: Sequence[int]) -> Tree:
  """The reductions that an `aux_reduction` stands for, by default the mean of what has no rows."""
  reductions = named("aux_reduction", tree, concat_axis, batch_axis)
  return Mean(default=True) if tree is None else reductions


def named_of_gradients(tree: Tree, default: Reduction) -> Tree:
  """The reductions that a `grad_reduction` stands for, by default that of the loss."""
  if tree is None:
    return default
  for where, name in _validate.named_leaves("grad_reduction", tree):
    _validate.one_of(where, name, get_args(GradReductionName))
  return named("grad_reduction", tree)


def match(option: str, reductions: Tree, like: Tree, of: str = "outputs") -> Tree:
  """A reduction for every leaf of `like`, which messages call `of`, from a prefix tree of them."""
  try:
    return jax.tree.broadcast(reductions, like)
  except ValueError as error:
    why = str(error).replace("broadcast_prefix prefix_tree", option)
    raise ValueError(
      f"{option}={reductions!r} is not a prefix tree of the {of}: give one name for all, or a tree"
      f" with a name for each {of[:-1]}, or for all below a node of it. {why}"
    ) from None
