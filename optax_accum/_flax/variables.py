"""The Variables of nnx objects: found by name, read, and written."""

from collections.abc import Callable, Collection

from flax import nnx
import jax
import jax.numpy as jnp

from optax_accum._arithmetic.trees import Leaf, Path


def is_variable(x: object) -> bool:
  """Whether `x` is an nnx `Variable`, which flattening would open."""
  return isinstance(x, nnx.Variable)


def value(x):
  """The value of a Variable; an array is its own."""
  if is_variable(x):
    return x.get_raw_value()
  return x


def name(path) -> str:
  """The name that a user has for a path: ``bn.mean``."""
  return ".".join(map(str, path))


def named(state) -> dict[str, Leaf]:
  """The Variables of a `State`, by name."""
  return {name(path): x for path, x in nnx.to_flat_state(state)}


def among(names: Collection[str]) -> Callable[[Path, Leaf], bool]:
  """A filter: the Variables of these names."""
  return lambda path, _: name(path) in names


def values(tree):
  """The tree, with values in the places of the Variables."""
  return jax.tree.map(value, tree, is_leaf=is_variable)


def write(tree, new) -> None:
  """Puts the values of such a tree into the Variables of `tree`."""

  def put(variable, new):
    if is_variable(variable):
      variable.set_raw_value(new)

  jax.tree.map(put, tree, new, is_leaf=is_variable)


def wrap_arrays(optimizer) -> None:
  """Makes Variables of arrays that a user put in their place into an optimizer's state."""

  def wrapped(x):
    if is_variable(x):
      return x
    return nnx.OptState(jnp.asarray(x))

  state = optimizer.opt_state
  leaves = jax.tree.leaves(state, is_leaf=is_variable)
  if not all(map(is_variable, leaves)):
    state = jax.tree.map(wrapped, state, is_leaf=is_variable)
    optimizer.opt_state = nnx.data(state)
