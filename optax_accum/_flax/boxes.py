"""Flax's annotations of how arrays are sharded, in a loss that runs on each device by itself.

`jax.shard_map` over the data axis has made it manual: each device has its own rows, and parameters
in whole. JAX refuses a constraint that names such an axis, and has nothing left to do for it.
"""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import AxisType, PartitionSpec


def _automatic(axes: Any) -> Any:
  """Those of the axes of one dimension that are left to the compiler here."""
  if not isinstance(axes, (str, tuple)):
    return axes  # None, or what is not constrained
  mesh = jax.sharding.get_abstract_mesh()
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  named = (axes,) if isinstance(axes, str) else axes
  return tuple(name for name in named if types.get(name, AxisType.Auto) is AxisType.Auto) or None


@contextlib.contextmanager
def on_device() -> Iterator[None]:
  """Has logical axes mean automatic axes alone, where others are manual."""
  rules = nn.get_logical_axis_rules()
  if jax.sharding.get_abstract_mesh().manual_axes:
    rules = [(name, _automatic(axes)) for name, axes in rules]
  with nn.logical_axis_rules(rules):
    yield


def opened_on_device(tree: Any) -> Any:
  """`tree`, whose boxes constrain what they hold by automatic axes alone, where others are manual.

  They are still boxes, with all of their names, which transforms of layers need.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return tree

  def opened(box: Any) -> Any:
    kind: Any = type(box)
    return _kind_on_device(kind)(**vars(box))

  return _map(opened, tree)


def bare(tree: Any) -> Any:
  """`tree` without its boxes, and without their constraints."""
  return _map(lambda box: box.value, tree)


def _map(fun: Any, tree: Any) -> Any:
  def is_box(x: Any) -> bool:
    return isinstance(x, nn.Partitioned)

  return jax.tree.map(lambda x: fun(x) if is_box(x) else x, tree, is_leaf=is_box)


@functools.cache
def _kind_on_device(kind: Any) -> Any:
  class OnDevice(kind):
    def unbox(self, apply_constraint: bool = True) -> Any:
      if not apply_constraint or not jax.sharding.get_abstract_mesh().auto_axes:
        return self.value
      logical = isinstance(self, nn.LogicallyPartitioned)
      names: Any = nn.logical_to_mesh_axes(self.names, self.rules) if logical else self.names
      spec = PartitionSpec(*map(_automatic, names))
      return jax.lax.with_sharding_constraint(self.value, spec)

  return OnDevice
