"""One call of a function: its microbatches, and the rows, the keys and the weight of each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.keys import fold_in
from optax_accum._arithmetic.trees import Args, Batch, Leaf
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import cut, refusals
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import by_slot, Roles


class Microbatches:
  """The microbatches of one call, on one device.

  `before` is how many the cycle had in calls before, on all devices. `kept` says of each
  microbatch of this call whether it is kept, where `skip_nonfinite` decided that before.
  """

  def __init__(
    self,
    split: Split,
    roles: Roles,
    args,
    kwargs,
    before: ArrayLike = 0,
    kept: jax.Array | None = None,
  ) -> None:
    self.split = split
    self.roles = roles
    self.devices = split.devices
    self._before = before
    self._kept = kept
    self._num_args = len(args)
    self._arguments = by_slot(args, kwargs)
    # How many rows the batch has on this device, and how many a full microbatch.
    self.rows = cut.batch_rows(split, roles.batch, self._arguments)
    self.size = cut.microbatch_rows(
      self.rows,
      split.num_microbatches,
      split.microbatch_size,
      f"{split.name(*roles.batch)}{self.devices.of_each}",
    )
    # How many microbatches are full, and the rows left for a smaller last one (0: there is none).
    self.full, self.tail_rows = divmod(self.rows, self.size)
    # The different numbers of rows that microbatches have; and how many there are on this device.
    self.sizes = [self.size]
    self.on_device = self.full
    if self.tail_rows:
      self.sizes.append(self.tail_rows)
      self.on_device += 1
    self.count = self.on_device * self.devices.size  # of all devices together
    # An empty rng_argnums asks for keys to be shared.
    if split.rng_argnums != ():
      refusals.refuse_keys(split, roles, self._arguments)
    carried = [self._arguments[slot] for slot in roles.carry]
    self.carry = tuple(jax.tree.map(jnp.asarray, x) for x in carried)
    # As this device has it: random keys in it differ between devices.
    self.own_carry = self.devices.with_own_noise(self.carry)
    self.batch = tuple(self._arguments[slot] for slot in roles.batch)
    # Without jit they may come from NumPy, and traced indices are for arrays of JAX.
    self.map_unsplit(
      lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    )

  @property
  def is_whole(self) -> bool:
    """Whether the function runs once, as it is: nothing is to split, to weigh or to reduce."""
    if self.split.counts or self.split.axis_name is not None:
      return False
    return self.rows == self.size

  @property
  def rows_in_unit(self) -> int:
    """The rows of a microbatch of weight 1, where it is the rows that count.

    Equal parts of one call weigh 1, so that nothing is multiplied. Others weigh their rows.
    """
    split = self.split
    if self.tail_rows or split.in_parts or split.weighs:
      return 1
    return self.size

  def map_unsplit(self, fun: Callable[[Leaf], Leaf]) -> None:
    """Puts ``fun(x)`` in the place of each leaf that all microbatches share."""
    roles = self.roles
    for slot in (*roles.differentiated, *roles.shared, *roles.of_step):
      self._arguments[slot] = jax.tree.map(fun, self._arguments[slot])

  def inputs(self, index: ArrayLike, batch: tuple[Batch, ...], carry):
    """What one microbatch is given and others are not: rows, keys, carry, keys of its device."""
    # The number among the microbatches of all devices of this call.
    number = self.devices.number(index, self.on_device)
    # A later call of a cycle numbers on, so that no two of its microbatches share a key.
    if self.split.in_parts:
      number = number + self._before
    keys = [self._arguments[slot] for slot in self.roles.rng]
    folded = jax.tree.map(lambda x: fold_in(x, number), keys)
    # Into the keys in what a step adds to the user's arguments each device folds its index, and no
    # microbatch its number.
    of_step = [self._arguments[slot] for slot in self.roles.of_step]
    step_keys = [x for x in jax.tree.leaves(of_step) if dtypes.is_key(x)]
    step_keys = self.devices.with_own_noise(step_keys)
    return *batch, *folded, *carry, step_keys

  def arguments(self, inputs) -> tuple[Args, Any]:
    """The arguments of the function, by position and by name, on a microbatch of such `inputs`."""
    roles = self.roles
    # In the order of `inputs`; last the keys of the step, in the order of their leaves.
    *inputs, step_keys = inputs
    keys = iter(step_keys)

    # A key of the step is replaced by that of this device; other leaves stay.
    def own(x):
      if dtypes.is_key(x):
        return next(keys)
      return x

    slots = (*roles.batch, *roles.rng, *roles.carry)
    new = dict(zip(slots, inputs, strict=True))
    arguments = self._arguments | new
    for slot in roles.of_step:
      arguments[slot] = jax.tree.map(own, arguments[slot])
    # What is left after these are taken out are the arguments by name.
    args = tuple(arguments.pop(i) for i in range(self._num_args))
    return args, arguments

  @property
  def weighs_in_program(self) -> bool:
    """Whether `weight` is an array."""
    return self.split.weight_fn is not None or self._kept is not None

  def known_weight(self, rows: int) -> float:
    """How much a microbatch of so many rows counts, if nothing else is asked for."""
    return rows / self.rows_in_unit

  def weight(
    self, index: ArrayLike, batch: tuple[Batch, ...], rows: int
  ) -> Weight | None:
    """How much a microbatch counts, before it has run; None where its loss will tell."""
    weight: Weight | None = None
    if self.split.weight_fn is not None:
      weight = self._weight_of(batch)
    elif not self.split.has_weight:
      weight = self.known_weight(rows)
    # No earlier decision applies: the weight stands.
    if self._kept is None:
      return weight
    if weight is None:
      # The loss tells the weight of what is kept: here 1 and 0 only say whether it is.
      weight = 1.0
    return jnp.where(self._kept[index], weight, 0.0)

  def _weight_of(self, batch: tuple[Batch, ...]) -> jax.Array:
    """What `weight_fn` returns for a microbatch. Checked."""
    fun: Any = self.split.weight_fn
    # `why` is "" if it can be called with the batch alone.
    why = _validate.why_not(fun, *batch)
    if why:
      raise TypeError(
        f"weight_fn gets only the arguments that are split, as in weight_fn(batch): {why}."
      )
    value = fun(*batch)
    weighted_mean.check_weight("weight_fn", value)
    dtypes.check_wide("The weight of weight_fn", value)
    return weighted_mean.as_weight(value)

  def taken(self, index: ArrayLike, rows: int) -> tuple[Batch, ...]:
    """The part of the batch that one microbatch gets; `rows` is how many rows it has."""
    if self.is_whole:
      return self.batch
    if rows == self.size:
      return cut.strided(self.batch, index, rows, self.full)
    # Only the smaller last one has another number of rows.
    return cut.left_over(self.batch, self.full * self.size)
