"""Boxes of `nn.with_partitioning` and logical axes, in a loss whose data axis is manual."""

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any

from flax import linen as nn
import jax

from optax_accum._arithmetic.trees import Leaf, Tree


@contextlib.contextmanager
def constraining_automatic_axes(variables) -> Iterator[Tree]:
  """Makes logical axes constrain only automatic axes, and yields boxes that constrain nothing.

  JAX refuses a constraint over the data axis, which `jax.shard_map` has made manual.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.manual_axes:
    yield variables
    return

  def automatic(axes):
    """Those of the axes of one dimension that are left to the compiler here."""
    if isinstance(axes, str):
      axes = (axes,)
    if not isinstance(axes, tuple):  # None, or what is not constrained
      return axes
    return tuple(name for name in axes if name in mesh.auto_axes) or None

  def unconstrained(box):
    return nn.LogicallyPartitioned(box.value, box.names, rules=())

  rules = [(name, automatic(to)) for name, to in nn.get_logical_axis_rules()]
  with nn.logical_axis_rules(rules), nn.intercept_methods(_in_plain_shapes):
    yield map_boxes(unconstrained, variables)


def _in_plain_shapes(method: Callable[..., Any], args, kwargs, context):
  """Calls a module's method. Its initializers, whose shapes flax compares, make no boxes there.

  `nn.DenseGeneral` would constrain a kernel as its box says before the kernel has its shape.
  """

  def unboxed(init, *args, **kwargs):
    return without_boxes(init(*args, **kwargs))

  for name, init in vars(context.module).items():
    if name.endswith("_init") and callable(init):
      init = functools.partial(unboxed, init)
      object.__setattr__(context.module, name, init)
  return method(*args, **kwargs)


def without_boxes(tree):
  """The tree with what is in the boxes."""
  return map_boxes(lambda box: box.value, tree)


def map_boxes(fun: Callable[[Any], Leaf], tree):
  """The tree, with ``fun(box)`` in the place of each box."""

  def is_box(x):
    return isinstance(x, nn.Partitioned)

  def mapped(x):
    if is_box(x):
      return fun(x)
    return x

  return jax.tree.map(mapped, tree, is_leaf=is_box)
