"""The devices that rows are spread over: one, or those of an axis, with the same methods."""

import dataclasses
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum._arithmetic import across_devices, dtypes
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.keys import fold_in
from optax_accum._arithmetic.reductions import Reduction


class OneDevice:
  """One device, or several that the compiler sees as one: nothing is reduced over them here."""

  axis_name: Any = None
  size = 1
  of_each = ""  # what messages add to rows

  def varying(self, tree):
    """The tree, typed as differing between devices."""
    return tree

  def with_own_noise(self, tree):
    """The tree as this device has it: the keys in it differ between devices."""
    return tree

  def sum(self, tree):
    """The sum over devices."""
    return tree

  def any(self, flag: bool | jax.Array) -> bool | jax.Array:
    """Whether a flag is true on some device."""
    return flag

  def number(self, index: ArrayLike, count: int) -> ArrayLike:
    """The number of microbatch `index` among those of all devices, which have `count` each."""
    return index

  def reduced(self, kind: Reduction, state):
    """The state of an output, of the microbatches of all devices."""
    return state

  def agreed(self, flags, numbers, dtype: DTypeLike):
    """Which flags are true on some device, and the sums of numbers, by one reduction in `dtype`."""
    return [*flags, *numbers]

  def stored(self, tree):
    """What is a device's own, as it is kept between calls."""
    return tree

  def own(self, tree):
    """What is a device's own, of what is `stored`."""
    return tree


@dataclasses.dataclass(frozen=True)
class OverAxis(OneDevice):
  """The devices of one or several axes of `pmap`, `shard_map` or `vmap`."""

  axis_name: AxisName
  of_each = " on each device"

  @property
  def size(self) -> int:  # type: ignore[override]
    """How many there are."""
    return int(lax.axis_size(self.axis_name))

  def varying(self, tree):
    """The tree, typed as differing between devices, so that JAX does not sum its gradient."""
    return across_devices.varying(tree, self.axis_name)

  def with_own_noise(self, tree):
    """The tree as this device has it: the keys in it differ between devices."""
    index = lax.axis_index(self.axis_name)

    def own(x):
      if dtypes.is_key(x):
        return fold_in(x, index)
      return x

    return jax.tree.map(own, self.varying(tree))

  def sum(self, tree):
    """The sum over devices."""
    return lax.psum(tree, self.axis_name)

  def any(self, flag: bool | jax.Array) -> jax.Array:
    """Whether a flag is true on some device."""
    return lax.pmax(jnp.int32(flag), self.axis_name) > 0

  def number(self, index: ArrayLike, count: int) -> ArrayLike:
    """The number of microbatch `index` among those of all devices, which have `count` each."""
    before = lax.axis_index(self.axis_name) * count  # of other devices
    return index + before

  def reduced(self, kind: Reduction, state):
    """The state of an output, of the microbatches of all devices."""
    return kind.over_devices(state, self)

  def agreed(self, flags, numbers, dtype: DTypeLike):
    """Which flags are true on some device, and the sums of numbers, by one reduction in `dtype`.

    What is known when tracing is the same on all devices.
    """
    scalars = [*flags, *numbers]
    traced = [x.astype(dtype) for x in scalars if isinstance(x, jax.Array)]
    if traced:
      # All of them are stacked in one array, so that there is one reduction.
      stack = self.varying(jnp.stack(traced))
      traced = list(self.sum(stack))
    sums = []
    for x in scalars:
      if isinstance(x, jax.Array):
        # What was traced is in the order of the scalars.
        sums.append(traced.pop(0))
      else:
        # A Python number is the same on all devices, so no device has to send it.
        sums.append(x * self.size)
    # The flags come first; the sum of one is above 0 where it is true on some device.
    count = len(flags)
    on_some = [x > 0 for x in sums[:count]]
    return on_some + sums[count:]

  def stored(self, tree):
    """What is a device's own, as it is kept between calls: with an axis of devices in front."""
    tree = with_axis(tree)
    if across_devices.is_bound(self.axis_name):
      tree = self.varying(tree)
    return tree

  def own(self, tree):
    """What is a device's own, of what is `stored`."""
    return without_axis(tree)


Devices: TypeAlias = OneDevice | OverAxis


def with_axis(tree):
  """What a device has for itself, with an axis of devices in front, of length 1 on each."""
  return jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def without_axis(tree):
  """What a device has for itself, of what has that axis."""
  return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


def devices_of(axis_name: AxisName | None) -> Devices:
  """The devices that an `axis_name` names: one where there is none."""
  if axis_name is None:
    return OneDevice()
  return OverAxis(axis_name)
