"""What nnx objects hold: checked and found once, and read for as long as their structure stays."""

from collections.abc import Callable, Collection
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


def values(tree: Tree) -> Any:
  """The tree, with values in the places of the Variables."""
  return jax.tree.map(value, tree, is_leaf=is_variable)


def write(tree: Tree, new: Tree) -> None:
  """Puts the values of such a tree into the Variables of `tree`."""

  def put(variable: Leaf, new: Leaf) -> None:
    if is_variable(variable):
      variable.set_raw_value(new)

  jax.tree.map(put, tree, new, is_leaf=is_variable)


def wrap_arrays(optimizer: Any) -> None:
  """Makes Variables of arrays that a user put in their place into an optimizer's state."""
  state = optimizer.opt_state
  if not all(map(is_variable, jax.tree.leaves(state, is_leaf=is_variable))):
    wrap = lambda x: x if is_variable(x) else nnx.OptState(jnp.asarray(x))  # noqa: E731
    optimizer.opt_state = nnx.data(
      jax.tree.map(wrap, state, is_leaf=is_variable)
    )


def check_objects(model: object, optimizer: object) -> None:
  """Checks that these are an nnx module and an nnx optimizer, in this order."""
  if not isinstance(model, nnx.Module) or not isinstance(
    optimizer, nnx.Optimizer
  ):
    raise TypeError(
      f"step(model, optimizer, batch) got {type(model).__name__} and {type(optimizer).__name__}: it"
      " takes an nnx module and an nnx.Optimizer(model, tx, wrt=nnx.Param), in this order. For"
      " linen there is linen_train_step, and for parameters make_train_step."
    )
  _validate.transformation(optimizer.tx, "optimizer.tx")


def check_model(
  wrt: Any, params: Tree, model: nnx.Module, optimizer: Any
) -> None:
  """Checks a model of this structure, and that `wrt` selects what the optimizer was made for."""
  for found, x in named(nnx.state(model)).items():
    if is_variable(x) and any(
      x.get_metadata(kind, False) for kind in _versions.NNX_REFERENCES
    ):
      raise TypeError(
        f"model.{found} is a {type(x).__name__} that is a reference (hijax=True or ref=True), which"
        " a step cannot take apart: make the model without."
      )
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
  theirs = (
    selected if optimizer.wrt is wrt else named(nnx.state(model, optimizer.wrt))
  )
  if differ := sorted(selected.keys() ^ theirs.keys()):
    raise ValueError(
      f"wrt={shown(wrt)}, and the optimizer was made with wrt={shown(optimizer.wrt)}: only"
      f" {'the step' if differ[0] in selected else 'the optimizer'} has model.{differ[0]}. Pass the"
      " same to both."
    )


def shown(wrt: object) -> str:
  """A filter, as in the code that made it: ``Param``."""
  return getattr(wrt, "__name__", repr(wrt))
