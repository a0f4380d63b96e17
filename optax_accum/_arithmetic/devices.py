"""The devices that rows are spread over: one, or those of an axis, with the same methods."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  in_order,
  weighted_mean,
)
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.keys import fold_in
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum


class OneDevice:
  """One device, or several that the compiler sees as one: nothing is reduced over them here."""

  axis_name: Any = None
  size = 1
  lanes = 1  # how many of the devices this one stands for
  first_unit = 0  # that weights are counted in: the first weight becomes it

  def varying(self, tree):
    """The tree, typed as differing between devices."""
    return tree

  def with_own_noise(self, tree, lane: ArrayLike = 0):
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

  def apart(self, fun: Callable[..., Any], *args):
    """``fun(*args)``, compiled by itself where that makes a difference."""
    return fun(*args)

  def of_lane(self, held, lane: ArrayLike):
    """What is one lane's, of what all lanes of a device hold."""
    return held

  def in_lanes(self, fun: Callable[..., Any], held=None):
    """What all lanes hold, of ``fun(lane, held)`` of what each holds."""
    return fun(0, held)


@dataclasses.dataclass(frozen=True)
class OverAxis(OneDevice):
  """The devices of one or several axes of `pmap`, `shard_map` or `vmap`."""

  axis_name: AxisName
  first_unit = 1  # devices that are added up share theirs

  @property
  def size(self) -> int:  # type: ignore[override]
    """How many there are. Raises where no collective over the axis can run."""
    return across_devices.check_bound(self.axis_name)

  def varying(self, tree):
    """The tree, typed as differing between devices, so that JAX does not sum its gradient."""
    return across_devices.varying(tree, self.axis_name)

  def with_own_noise(self, tree, lane: ArrayLike = 0):
    """The tree as this device has it: the keys in it differ between devices."""
    index = lax.axis_index(self.axis_name)
    return _with_noise(self.varying(tree), index)

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
    return kind.over_devices(held, self, counted)

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


@dataclasses.dataclass(frozen=True)
class VirtualDevices(OneDevice):
  """As so many devices, whatever number of `real` ones there is: each stands for as many.

  It runs the microbatches of these lanes one lane after the other. What is summed or combined is so
  in the order of `in_order`.
  """

  real: OneDevice | OverAxis
  size: int
  first_unit = 1

  @property
  def axis_name(self) -> AxisName | None:
    """The axis of the real devices, if there are several."""
    return self.real.axis_name

  @property
  def lanes(self) -> int:  # type: ignore[override]
    """How many virtual devices a real one stands for."""
    return self.size // self.real.size

  def varying(self, tree):
    """The tree, typed as differing between real devices."""
    return self.real.varying(tree)

  def with_own_noise(self, tree, lane: ArrayLike = 0):
    """The tree as a lane has it: the keys in it differ between virtual devices."""
    index = self.real.number(lane, self.lanes)
    return _with_noise(self.varying(tree), index)

  def sum(self, tree):
    """The sum over real devices, of what is summed over lanes."""
    over = functools.partial(self._over_axis, in_order.sum_over)
    return jax.tree.map(over, tree)

  def _over_axis(self, over, held, *others):
    """What `over` makes of what several real devices hold."""
    if self.axis_name is None:
      return held
    return over(self.axis_name, held, *others)

  def number(self, index: ArrayLike, count: int) -> ArrayLike:
    """The number of microbatch `index` of a real device, which has `count` in all its lanes."""
    return self.real.number(index, count)

  def reduced(self, kind: Reduction, held, counted: bool | jax.Array):
    """What all devices hold of one output, of what those of this one hold together."""
    if kind.summed or kind.collected:
      return kind.over_devices(held, self, counted)

    def both(first, second):
      one, has_one = first
      other, has_other = second
      return kind.both(one, other, has_other), has_one | has_other

    of_all = held, jnp.asarray(counted)
    return self._over_axis(in_order.fold_over, of_all, both)[0]

  def has_counted(self, weight: Weight) -> bool | jax.Array:
    """Whether a microbatch of this device counts, if its weights add up to this."""
    return weighted_mean.counts(weight)

  def total(
    self, weights: WeightSum, unit: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The sum of the weights of all devices, and that sum in the unit of the outputs."""
    of_all = self._over_axis(in_order.fold_over, weights, WeightSum.both)
    total = of_all.total + of_all.rest
    return total, total

  def apart(self, fun: Callable[..., Any], *args):
    """``fun(*args)``, compiled by itself."""
    return in_order.apart(fun, *args)

  def of_lane(self, held, lane: ArrayLike):
    """What is one lane's, of what all lanes of a device hold, on a first axis."""
    return jax.tree.map(lambda x: x[lane], held)

  def in_lanes(self, fun: Callable[..., Any], held=None):
    """What all lanes hold, of ``fun(lane, held)`` of what each holds, in its place."""
    if self.lanes == 1:
      own = jax.tree.map(lambda x: x[0], held)
      return jax.tree.map(lambda x: x[None], fun(0, own))
    if held is None:
      return jax.lax.map(lambda lane: fun(lane, None), jnp.arange(self.lanes))

    def update(lane, held):
      new = fun(lane, self.of_lane(held, lane))
      return jax.tree.map(lambda x, y: x.at[lane].set(y), held, new)

    return lax.fori_loop(0, self.lanes, update, held)


Devices: TypeAlias = OneDevice | OverAxis


def devices_of(
  axis_name: AxisName | None, virtual: int | None = None
) -> Devices:
  """The devices that an `axis_name` names: one where there is none."""
  real: Any = OneDevice()
  if axis_name is not None:
    real = OverAxis(axis_name)
  if virtual is None:
    return real
  return VirtualDevices(real, virtual)


def _with_noise(tree, index: ArrayLike):
  """The tree, with the index folded into its keys."""

  def own(x):
    return fold_in(x, index) if dtypes.is_key(x) else x

  return jax.tree.map(own, tree)
