"""One call of a function: its microbatches, and the rows, the keys and the weight of each."""

from collections.abc import Callable
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.keys import fold_in
from optax_accum._arithmetic.trees import Args, Batch, Leaf, Tree
from optax_accum._microbatches import refusals
from optax_accum._microbatches.cut import (
  batch_rows,
  Cut,
  cut_rows,
  microbatch_rows,
)
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import Arguments, by_slot, Roles

# Cuts the rows of a microbatch: where they are used, and not before.
Take: TypeAlias = Callable[[], tuple[Batch, ...]]


class Microbatches:
  """The microbatches of one call; `weights` are theirs, where a call before found them.

  `before` is how many the cycle had in calls before, on all devices, where there may have been any.
  """

  def __init__(
    self,
    split: Split,
    roles: Roles,
    args,
    kwargs,
    weights: jax.Array | None = None,
    before: jax.Array | None = None,
  ) -> None:
    self.split = split
    self._before = before
    self.roles = roles
    self.weights = weights
    self.devices = split.devices
    self._num_args = len(args)
    self._arguments = by_slot(args, kwargs)
    rows = checked_rows(split, roles, self._arguments)
    lanes = self.devices.lanes
    self.rows = rows // lanes  # of a lane
    size = split.microbatch_size
    if size is not None:
      size //= lanes
    self.size = microbatch_rows(
      self.rows, split.num_microbatches, size, split.name(*roles.batch)
    )
    self.full, self.tail_rows = divmod(self.rows, self.size)
    in_lane = self.full + bool(self.tail_rows)
    self._on_device = lanes * in_lane
    self.count = in_lane * self.devices.size  # of all devices together
    self._refuse_defaults(rows)
    carried = [self._arguments[slot] for slot in roles.carry]
    self.carry = tuple(jax.tree.map(jnp.asarray, x) for x in carried)
    self.batch = tuple(self._arguments[slot] for slot in roles.batch)

  def _refuse_defaults(self, on_device: int) -> None:
    split = self.split
    roles = self.roles
    if split.batch_argnums is None:
      # All rows of the batch, or those on one device.
      rows = {on_device, self.rows * self.devices.size}
      if split.rows is not None:
        rows = {split.rows}
      refusals.refuse_rows(split, roles, self._arguments, rows)
    if split.rng_argnums is None or roles.held:
      refusals.refuse_keys(split, roles, self._arguments)
    for slot in roles.rng:
      _check_keys(split.name(slot), self._arguments[slot])

  @property
  def is_whole(self) -> bool:
    """Whether the function runs once, as it is: nothing is to split, to weigh or to reduce."""
    if self.split.weighs or self.split.axis_name is not None:
      return False
    if self.devices.lanes > 1:
      return False
    return self.rows == self.size

  def map_shared(self, fun: Callable[[Leaf], Leaf]) -> None:
    """Puts ``fun(x)`` in the place of each leaf that all microbatches share."""
    for slot in (*self.roles.shared, *self.roles.held):
      self._arguments[slot] = jax.tree.map(fun, self._arguments[slot])

  def inputs(self, index: ArrayLike, batch: tuple[Batch, ...], carry):
    """What one microbatch is given and others are not: rows, keys, carry, keys of its device."""
    lane: Leaf = 0
    if self.devices.lanes > 1:
      lane = jnp.asarray(index) // self.full
    own_noise = self.devices.with_own_noise(self._held_keys, lane)
    number = self.devices.number(index, self._on_device)
    if self._before is not None:
      number = number + self._before
    keys = [self._arguments[slot] for slot in self.roles.rng]
    own = jax.tree.map(lambda x: fold_in(x, number), keys)
    return *batch, *own, *carry, own_noise

  @property
  def _held_keys(self) -> list[jax.Array]:
    """The keys in what a step gives its loss beside the user's arguments, which no number tells."""
    held = [self._arguments[slot] for slot in self.roles.held]
    return [x for x in jax.tree.leaves(held) if dtypes.is_key(x)]

  def arguments(self, inputs) -> tuple[Args, Any]:
    """The arguments of the function, by position and by name, on a microbatch of such `inputs`."""
    roles = self.roles
    *inputs, own_noise = inputs
    keys = iter(own_noise)

    def own(x):
      return next(keys) if dtypes.is_key(x) else x

    slots = (*roles.batch, *roles.rng, *roles.carry)
    arguments = self._arguments | dict(zip(slots, inputs, strict=True))
    for slot in roles.held:
      arguments[slot] = jax.tree.map(own, arguments[slot])
    args = tuple(arguments.pop(i) for i in range(self._num_args))
    return args, arguments

  def weight(
    self, index: ArrayLike, batch: tuple[Batch, ...], rows: int
  ) -> Leaf:
    """How much a microbatch counts, before it has run; None where its loss will tell."""
    if self.weights is not None:
      return self.weights[index]
    if self.split.has_weight:
      return None
    weight_fn = self.split.weight_fn
    if weight_fn is None:
      return weighted_mean.as_weight(float(rows))
    named: dict[Any, Tree] = dict(zip(self.roles.batch, batch, strict=True))
    positions = [slot for slot in named if isinstance(slot, int)]
    args = [named.pop(slot) for slot in positions]
    why = _validate.why_not(weight_fn, *args, **named)
    if why:
      raise TypeError(
        f"weight_fn gets only the arguments that are split, as in weight_fn(batch): {why}."
      )
    value = weight_fn(*args, **named)
    weighted_mean.check_weight("weight_fn", value)
    return weighted_mean.as_weight(value)

  @property
  def sizes(self) -> list[int]:
    """The rows of a full microbatch, and those of the smaller last one, if any."""
    if self.tail_rows:
      return [self.size, self.tail_rows]
    return [self.size]

  def taken(self, index: ArrayLike, rows: int) -> Take:
    """The rows of one microbatch, which has so many."""
    take, rest = self._cut
    if rows == self.size:
      return lambda: take(index)
    return lambda: rest

  @functools.cached_property
  def _cut(self) -> tuple[Cut, tuple[Batch, ...]]:
    """The microbatches of full size, by index, and the rows left over."""
    axes = tuple(self.roles.batch.values())
    lanes = self.devices.lanes
    return cut_rows(self.batch, axes, self.size, self.full, lanes)


def checked_rows(split: Split, roles: Roles, arguments: Arguments) -> int:
  """The rows of the batch of a call, whose roles are right."""
  refusals.refuse_double_roles(split, roles, arguments)
  # Of a device's part of a batch, all has been looked at.
  is_part = split.rows is not None
  if not is_part:
    refusals.refuse_key(split, roles, arguments)
  rows = batch_rows(split, roles.batch, arguments)
  if not is_part:
    refusals.refuse_uneven_lanes(split, roles, rows)
  return rows


def _check_keys(root: str, keys) -> None:
  """Checks that these are random keys, typed or raw."""
  for name, x in _validate.named_leaves(root, keys):
    shape = jnp.shape(x)
    dtype = jnp.result_type(x)
    is_raw = dtype == jnp.uint32 and bool(shape)
    if not dtypes.is_key(x) and not is_raw:
      raise TypeError(
        f"{name} is {dtype}{list(shape)}: give a key, such as jax.random.key(0)."
      )
