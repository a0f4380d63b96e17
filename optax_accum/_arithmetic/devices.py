"""The devices that rows are spread over: one, or those of an axis, with the same methods."""

import dataclasses
from typing import TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum._arithmetic import across_devices, dtypes, weighted_mean
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.keys import fold_in
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum


class OneDevice:
  """One device, or several that the compiler sees as one: nothing is reduced over them here."""

  axis_name: None = None
  size = 1
  first_unit = 0  # that weights are counted in: the first weight becomes it

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

  def all(self, flag: jax.Array) -> jax.Array:
    """Whether a flag is true on all devices."""
    return flag

  def number(self, index: ArrayLike, count: int) -> ArrayLike:
    """The number of microbatch `index` among those of all devices, which have `count` each."""
    return index

  def reduced(self, kind: Reduction, held, counted: bool | jax.Array):
    """What all devices hold of one output; `counted`: whether this one had any that counts."""
    return held

  def has_counted(self, weight: Weight) -> bool | jax.Array:
    """Whether a microbatch of this device counts, if its weights add up to this."""
    return True  # which nothing asks for

  def total(
    self, weights: WeightSum, unit: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The sum of the weights of all devices, and that sum in the unit of the outputs."""
    return weights.total, weighted_mean.in_units(weights.total, unit)

  def agreed(self, flags, numbers, dtype: DTypeLike):
    """Which flags are true on some device, and the sums of numbers, by one reduction in `dtype`."""
    return [*flags, *numbers]

  def sum_dtype(
    self, dtype: DTypeLike, requested: DTypeLike | None
  ) -> DTypeLike:
    """The dtype that what devices have is summed in: a term of `dtype` each."""
    return dtype

  def stored(self, tree):
    """What is a device's own, as it is kept between calls."""
    return tree

  def own(self, tree):
    """What is a device's own, of what is `stored`."""
    return tree


@dataclasses.dataclass(frozen=True)
class OverAxis:
  """The devices of one or several axes of `pmap`, `shard_map` or `vmap`."""

  axis_name: AxisName
  first_unit = 1  # devices that are added up share theirs

  @property
  def size(self) -> int:
    """How many there are. Raises where no collective over the axis can run."""
    return across_devices.check_bound(self.axis_name)

  def varying(self, tree):
    """The tree, typed as differing between devices, so that JAX does not sum its gradient."""
    return across_devices.varying(tree, self.axis_name)

  def with_own_noise(self, tree):
    """The tree as this device has it: the keys in it differ between devices."""
    index = lax.axis_index(self.axis_name)

    def own(x):
      return fold_in(x, index) if dtypes.is_key(x) else x

    return jax.tree.map(own, self.varying(tree))

  def sum(self, tree):
    """The sum over devices."""
    return lax.psum(tree, self.axis_name)

  def any(self, flag: bool | jax.Array) -> jax.Array:
    """Whether a flag is true on some device."""
    return lax.pmax(jnp.int32(flag), self.axis_name) > 0

  def all(self, flag: jax.Array) -> jax.Array:
    """Whether a flag is true on all devices."""
    return lax.pmin(jnp.int32(flag), self.axis_name) > 0

  def number(self, index: ArrayLike, count: int) -> ArrayLike:
    """The number of microbatch `index` among those of all devices, which have `count` each."""
    return index + lax.axis_index(self.axis_name) * count

  def reduced(self, kind: Reduction, held, counted: bool | jax.Array):
    """What all devices hold of one output; `counted`: whether this one had any that counts."""
    return kind.over_devices(held, self.axis_name, counted)

  def has_counted(self, weight: Weight) -> bool | jax.Array:
    """Whether a microbatch of this device counts, if its weights add up to this."""
    return weighted_mean.counts(weight)

  def total(
    self, weights: WeightSum, unit: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The sum of the weights of all devices, and that sum in the unit of the outputs."""
    total = weights.over_devices(self.axis_name)
    return total, total

  def agreed(self, flags, numbers, dtype: DTypeLike):
    """Which flags are true on some device, and the sums of numbers, by one reduction in `dtype`.

    What is known when tracing is the same on all devices.
    """
    scalars = [*flags, *numbers]
    traced = [x.astype(dtype) for x in scalars if isinstance(x, jax.Array)]
    if traced:
      traced = list(self.sum(self.varying(jnp.stack(traced))))
    for i, x in enumerate(scalars):
      if isinstance(x, jax.Array):
        scalars[i] = traced.pop(0)
      else:
        scalars[i] = x * self.size
    return [x > 0 for x in scalars[: len(flags)]] + scalars[len(flags) :]

  def sum_dtype(
    self, dtype: DTypeLike, requested: DTypeLike | None
  ) -> DTypeLike:
    """The dtype that what devices have is summed in: a term of `dtype` each."""
    return dtypes.accumulator_dtype(dtype, requested)

  def stored(self, tree):
    """What is a device's own, as it is kept between calls: with an axis of devices in front."""
    tree = jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)
    if across_devices.is_bound(self.axis_name):
      tree = self.varying(tree)
    return tree

  def own(self, tree):
    """What is a device's own, of what is `stored`."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)


Devices: TypeAlias = OneDevice | OverAxis


def devices_of(axis_name: AxisName | None) -> Devices:
  """The devices that an `axis_name` names: one where there is none."""
  if axis_name is None:
    return OneDevice()
  return OverAxis(axis_name)
