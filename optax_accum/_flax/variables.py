"""What nnx objects hold: checked and found once, and read for as long as their structure stays."""

from collections.abc import Callable, Collection
import operator
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_accum import _validate, _versions
from optax_accum._arithmetic.trees import Leaf, Path, Tree


def is_variable(x: object) -> bool:
  """Whether `x` is an nnx `Variable`, which flattening would open."""
  return isinstance(x, nnx.Variable)


def value(x: Leaf) -> Leaf:
  """The value of a Variable; an array is its own."""
  return x.get_raw_value() if is_variable(x) else x


def name(path: Path) -> str:
  """The name that a user has for a path: ``bn.mean``."""
  return ".".join(map(str, path))


def named(state: Tree) -> dict[str, Leaf]:
  """The Variables of a `State`, by name."""
  return {name(path): x for path, x in nnx.to_flat_state(state)}


def among(names: Collection[str]) -> Callable[[Path, Leaf], bool]:
  """A filter: the Variables of these names."""
  return lambda path, _: name(path) in names


class Values:
  """The values of the Variables in a tree, read and written in place."""

  def __init__(self, tree: Tree):
    self._treedef: Any
    self._variables, self._treedef = jax.tree.flatten(tree, is_leaf=is_variable)

  def read(self) -> Tree:
    """The tree, with values in the places of the Variables."""
    return self._treedef.unflatten(map(value, self._variables))

  def write(self, tree: Tree) -> None:
    """Puts the values of such a tree into the Variables."""
    for variable, new in zip(self._variables, self._treedef.flatten_up_to(tree), strict=True):
      if is_variable(variable):
        variable.set_raw_value(new)


class Snapshot:
  """The structure of nnx objects, to tell whether an `nnx.split` of them still holds.

  It holds while each object has the same attributes, and each Variable the same metadata. Comparing
  them by identity takes a tenth of the time of a split. It does not keep the objects alive.
  """

  def __init__(self, *roots: Tree):
    own = set(map(id, roots))
    nodes = [node for root in roots for _, node in nnx.iter_graph(root) if id(node) not in own]
    self._roots = list(map(_structure, roots))
    self._inner = [(x, _structure(x)) for x in nodes if not jax.tree_util.all_leaves([x])]

  def holds(self, *roots: Tree) -> bool:
    """Whether these, the same objects, have the same structure."""
    nodes = [*zip(roots, self._roots, strict=True), *self._inner]
    return all(_same(_structure(node), before) for node, before in nodes)


def _same(a: dict[object, Leaf], b: dict[object, Leaf]) -> bool:
  return a.keys() == b.keys() and all(map(operator.is_, a.values(), b.values()))


def _structure(node: Tree) -> dict[object, Leaf]:
  """What can change in a node, but for the value of a Variable."""
  if is_variable(node):
    metadata: dict[object, Leaf] = node.get_metadata()
    return metadata
  if isinstance(node, list):
    return dict(enumerate(node))
  return dict(node if isinstance(node, dict) else getattr(node, "__dict__", {}))


def wrap_arrays(optimizer: Any) -> None:
  """Makes Variables of arrays that a user put in their place into an optimizer's state."""
  state = optimizer.opt_state
  if not all(map(is_variable, jax.tree.leaves(state, is_leaf=is_variable))):
    wrap = lambda x: x if is_variable(x) else nnx.OptState(jnp.asarray(x))  # noqa: E731
    optimizer.opt_state = nnx.data(jax.tree.map(wrap, state, is_leaf=is_variable))


def check_objects(model: object, optimizer: object) -> None:
  """Checks that these are an nnx module and an nnx optimizer, in this order."""
  if not isinstance(model, nnx.Module) or not isinstance(optimizer, nnx.Optimizer):
    raise TypeError(
      f"step(model, optimizer, batch) got {type(model).__name__} and {type(optimizer).__name__}: it"
      " takes an nnx module and an nnx.Optimizer(model, tx, wrt=nnx.Param), in this order. For"
      " linen there is linen_train_step, and for parameters make_train_step."
    )
  _validate.transformation(optimizer.tx, "optimizer.tx")
  for found, x in named(nnx.state(model)).items():
    if is_variable(x) and any(x.get_metadata(kind, False) for kind in _versions.NNX_REFERENCES):
      raise TypeError(
        f"model.{found} is a {type(x).__name__} that is a reference (hijax=True or ref=True), which"
        " a step cannot take apart: make the model without."
      )


def check_wrt(wrt: Any, params: Tree, model: nnx.Module, optimizer: Any) -> None:
  """Checks that `wrt` selects Variables, and those that the optimizer was made for."""
  selected = named(params)
  if not selected:
    kinds = sorted({type(x).__name__ for x in named(nnx.state(model)).values()})
    raise ValueError(
      f"wrt={shown(wrt)} selects nothing in {type(model).__name__}, which has {', '.join(kinds)}."
    )
  for found, x in selected.items():
    if not is_variable(x):
      raise ValueError(
        f"wrt={shown(wrt)} selects model.{found}, an array that is not a Variable, which a step"
        " cannot update in place: make it an nnx.Param."
      )
  # The state of a plain SGD would not tell.
  theirs = selected if optimizer.wrt is wrt else named(nnx.state(model, optimizer.wrt))
  if differ := sorted(selected.keys() ^ theirs.keys()):
    raise ValueError(
      f"wrt={shown(wrt)}, and the optimizer was made with wrt={shown(optimizer.wrt)}: only"
      f" {'the step' if differ[0] in selected else 'the optimizer'} has model.{differ[0]}. Pass the"
      " same to both."
    )


def shown(wrt: object) -> str:
  """A filter, as in the code that made it: ``Param``."""
  return getattr(wrt, "__name__", repr(wrt))
