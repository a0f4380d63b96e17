"""What an nnx object holds: found once, and read again for as long as its structure stays."""

from collections.abc import Callable, Collection
import operator
from typing import Any

from flax import nnx
import jax


def is_variable(x: Any) -> bool:
  """Whether `x` is an nnx `Variable`, which flattening would open."""
  return isinstance(x, nnx.Variable)


def value(x: Any) -> Any:
  """The value of a Variable; an array is its own."""
  return x.get_raw_value() if is_variable(x) else x


def values(tree: Any) -> Any:
  """A tree with the values of its Variables in their places."""
  return jax.tree.map(value, tree, is_leaf=is_variable)


def named(state: Any) -> dict[str, Any]:
  """The Variables of a `State` by the names that a user has for them: ``bn.mean``."""
  return {name(path): x for path, x in nnx.to_flat_state(state)}


def name(path: tuple[Any, ...]) -> str:
  """The name of a path: ``bn.mean``."""
  return ".".join(map(str, path))


def partition(state: Any, names: Collection[str]) -> tuple[Any, Any]:
  """The Variables of a `State` that have these names, and the others."""
  selected = nnx.filter_state(state, lambda path, _: name(path) in names)
  return selected, nnx.filter_state(state, lambda path, _: name(path) not in names)


class Slots:
  """The Variables of a tree, whose values are read and written in place."""

  def __init__(self, tree: Any):
    treedef: Any
    self.variables, treedef = jax.tree.flatten(tree, is_leaf=is_variable)
    self._treedef = treedef

  def read(self) -> Any:
    """The tree, with values in the places of the Variables."""
    return self._treedef.unflatten([value(x) for x in self.variables])

  def write(self, tree: Any) -> None:
    """Puts the values of such a tree into the Variables."""
    for variable, new in zip(self.variables, self._treedef.flatten_up_to(tree), strict=True):
      if is_variable(variable):
        variable.set_raw_value(new)


class Snapshot:
  """The structure of nnx objects, to tell whether an `nnx.split` of them still holds.

  It does while each object in them has the same attributes, and each Variable the same metadata.
  Values of Variables may differ. Attributes are compared by identity, which takes a hundredth of
  the time of a split. The objects themselves are not kept alive, only what is in them.
  """

  def __init__(self, *roots: Any):
    nodes = [node for root in roots for _, node in nnx.iter_graph(root)]
    own = set(map(id, roots))
    self._roots = [_reader(root)(root) for root in roots]
    readers = [(node, _reader(node)) for node in nodes if id(node) not in own]
    self._inner = [(node, read, read(node)) for node, read in readers if read is not _nothing]

  def holds(self, *roots: Any) -> bool:
    """Whether these, the same objects, have the same structure."""
    pairs = zip(roots, self._roots, strict=True)
    return all(_same(_reader(root)(root), before) for root, before in pairs) and all(
      _same(read(node), before) for node, read, before in self._inner
    )


def _reader(node: Any) -> Callable[[Any], dict[Any, Any]]:
  """How to read what can change in a node, but for the value of a Variable."""
  if is_variable(node):
    return nnx.Variable.get_metadata
  if isinstance(node, dict):
    return dict
  if isinstance(node, list):
    return _items
  is_leaf = jax.tree_util.all_leaves([node])
  return _attributes if hasattr(node, "__dict__") and not is_leaf else _nothing


def _items(node: list[Any]) -> dict[int, Any]:
  return dict(enumerate(node))


def _attributes(node: Any) -> dict[str, Any]:
  return dict(vars(node))


def _nothing(node: Any) -> dict[Any, Any]:
  return {}


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
  return a.keys() == b.keys() and all(map(operator.is_, a.values(), b.values()))
