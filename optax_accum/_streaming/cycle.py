"""The accumulators of `accumulate`, and how a call adds to them: every k calls, or every call."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum
from optax_accum._streaming.state import AccumulateState

# The mini steps in a cycle, an integer of at least 1, from the steps taken before it.
Schedule: TypeAlias = Callable[[jax.Array], ArrayLike]


class Weights(NamedTuple):
  """What one call counts."""

  local: Weight  # of the microbatch on this device
  over_devices: Weight  # of the microbatches on all devices


class MiniStep(NamedTuple):
  """What one call adds up and decides, before `inner` runs."""

  total: optax.Updates  # the cycle's weighted sum of gradients on this device
  divisor: Weight  # what `total` is divided by, once it is summed over the devices
  cycle_weight: Weight  # the cycle's sum of weights, over all devices
  emit: Flag  # whether the cycle ends with this call
  state: AccumulateState  # the next state but for `acc_grads` and `inner_opt_state`


@dataclasses.dataclass(eq=False, repr=False)
class EveryCall:
  """Every call is a cycle (``every_k=1``): nothing is kept from one call to the next."""

  reduction: str
  accumulator_dtype: DTypeLike | None
  axis_name: AxisName | None

  def init(self, params: optax.Params) -> Any:
    """The accumulators before the first call."""
    return ()

  def add(
    self,
    updates: Any,
    state: AccumulateState,
    skip: Flag,
    flush: Flag,
    weights: Weights,
    may_end: Flag,
  ) -> MiniStep:
    """Adds one microbatch up. The flags are the same on all devices."""
    _check_every_k(updates, state.acc_grads, "every_k=1", accumulates=False)
    emit = True if skip is False else jnp.logical_not(skip)
    if self.reduction == "mean" and self.axis_name is None:
      divisor: Weight = 1.0
      if isinstance(weights.local, jax.Array):  # a weight that cannot be used shows, as in a cycle
        out_of_range = 10 * weighted_mean.MOST_IN_TOTAL
        divisor = jnp.where(weighted_mean.usable(weights.local), 1.0, out_of_range)
      return MiniStep(updates, divisor, weights.over_devices, emit, state)
    counted = weights.over_devices
    if self.reduction == "mean" and isinstance(weights.local, (int, float)):
      weights = Weights(1.0, lax.axis_size(self.axis_name))

    def weighed(g: jax.Array) -> jax.Array:
      wide = dtypes.accumulator_dtype(g.dtype, self.accumulator_dtype)
      return weighted_mean.weigh(g, weights.local, g.dtype if self.axis_name is None else wide)

    total = jax.tree.map(weighed, updates)
    return MiniStep(total, weights.over_devices, counted, emit, state)

  def kept(self, total: optax.Updates) -> Any:
    """The accumulators for the next call, from the buffers of the sums of this one."""
    return ()


@dataclasses.dataclass(eq=False, repr=False)
class Cycle:
  """Cycles of `every_k` calls, an int above 1 or a schedule; with the methods of `EveryCall`."""

  every_k: int | Schedule
  accumulator_dtype: DTypeLike | None

  def init(self, params: optax.Params) -> Any:
    """The accumulators before the first call."""

    def zeros(path: Any, leaf: jax.Array) -> jax.Array:
      name, dtype = _validate.leaf_name("params", path), jnp.result_type(leaf)
      dtypes.check_holds(name, dtype, self.accumulator_dtype)
      return _zeros_like(leaf, dtypes.accumulator_dtype(dtype, self.accumulator_dtype))

    return jax.tree_util.tree_map_with_path(zeros, gradients_like(params))

  def add(
    self,
    updates: Any,
    state: AccumulateState,
    skip: Flag,
    flush: Flag,
    weights: Weights,
    may_end: Flag,
  ) -> MiniStep:
    """Adds one microbatch up."""
    _check_every_k(updates, state.acc_grads, f"every_k={self.every_k!r}", accumulates=True)
    _check_gradients(updates, state.acc_grads, self.accumulator_dtype)
    counted = jnp.logical_not(skip)
    mini_step = state.mini_step + counted.astype(jnp.int32)
    k: Any = self.every_k
    k = _check_k(k(state.gradient_step)) if callable(k) else k
    emit = ((counted & (mini_step >= k)) | (flush & (mini_step > 0))) & may_end
    first = state.mini_step == 0
    dtype = state.acc_weight.dtype
    weight_sum = WeightSum(state.acc_weight, jnp.asarray(state.weight_rest, dtype))
    weight_sum = weight_sum.add(jnp.asarray(weights.over_devices, dtype))

    # The first mini step overwrites: selecting is free where zeroing after the cycle costs
    # a pass over the accumulators, and an inf cannot get past it.
    def added(acc: jax.Array, g: jax.Array) -> jax.Array:
      return jnp.where(first, 0, acc) + weighted_mean.weigh(g, weights.local, acc.dtype)

    total = jax.tree.map(added, state.acc_grads, updates)
    kept = jax.tree.map(lambda x: jnp.where(emit, jnp.zeros_like(x), x), weight_sum)
    state = state._replace(
      mini_step=jnp.where(emit, 0, mini_step),
      acc_weight=kept.total,
      weight_rest=kept.rest,
    )
    return MiniStep(total, weight_sum.total, weight_sum.total, emit, state)

  def kept(self, total: optax.Updates) -> Any:
    """The accumulators for the next call."""
    return total


def gradients_like(params: optax.Params) -> optax.Updates:
  """Parameters with the tree and the types that their gradients have."""
  # `optax.lookahead` steps two copies of the parameters by the gradients of one.
  return params.fast if isinstance(params, optax.LookaheadParams) else params


def _zeros_like(leaf: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Zeros that are sharded as `leaf`, also under jit."""
  if not isinstance(leaf, jax.core.Tracer):
    return jnp.zeros_like(leaf, dtype)
  # The compiler shards results after the arguments that they are computed from. Zeros that are
  # computed from nothing end up on one device, or in whole on each.
  no = lax.optimization_barrier(jnp.zeros((), jnp.bool_))
  return jnp.where(no, leaf.astype(dtype), jnp.zeros((), dtype))


def _check_every_k(updates: Any, acc_grads: Any, every_k: str, accumulates: bool) -> None:
  """Checks that the state is of an `every_k` like this one: 1, or not."""
  has = bool(jax.tree.leaves(acc_grads))
  if jax.tree.leaves(updates) and has != accumulates:
    raise ValueError(
      f"{every_k}, and the state {'has' if has else 'lacks'} an accumulator, because it was made"
      f" with every_k {'above' if has else 'of'} 1: end the cycle with the old every_k and"
      " flush=True, and replace acc_grads by that of a new init."
    )


def _check_gradients(updates: Any, acc_grads: Any, requested: DTypeLike | None) -> None:
  """Checks that gradients have the tree and the shapes of the accumulators, and go into them."""
  leaves, accs = (dict(_validate.named_leaves("updates", tree)) for tree in (updates, acc_grads))
  fix = (
    "updates must have the tree and the shapes of the parameters that init was given. (A state that"
    " was restored has those of its own model: restore a checkpoint of this one, or begin with"
    " tx.init(params).)"
  )
  for name in accs:
    if name not in leaves:
      raise ValueError(f"{name} is missing: {fix}")
  for name, leaf in leaves.items():
    if name not in accs:
      raise ValueError(f"{name} is not expected: {fix}")
    if jnp.shape(leaf) != accs[name].shape:
      raise ValueError(f"{name} has shape {jnp.shape(leaf)}, not {accs[name].shape}: {fix}")
    _check_dtype(name, leaf.dtype, accs[name].dtype, requested)
  trees: list[Any] = [jax.tree.structure(updates), jax.tree.structure(acc_grads)]
  if trees[0] != trees[1]:
    raise ValueError(f"updates is a {trees[0]} and not a {trees[1]}: {fix}")


def _check_dtype(name: str, dtype: Any, accumulator: Any, requested: DTypeLike | None) -> None:
  """Checks that gradients of `dtype` can be added to an accumulator without a surprise."""
  if not jnp.issubdtype(dtype, jnp.inexact):
    raise TypeError(
      f"{name} has dtype {jnp.dtype(dtype)}; gradients are floating or complex: leave integer"
      " parameters out with optax.masked(accumulate(...), mask)."
    )
  got = f"{name} has dtype {jnp.dtype(dtype)} and its accumulator {jnp.dtype(accumulator)}, which"
  if jnp.issubdtype(dtype, jnp.complexfloating) > jnp.issubdtype(accumulator, jnp.complexfloating):
    raise TypeError(
      f"{got} would lose the imaginary part: give init complex parameters, or give"
      " accumulator_dtype=jnp.complex64."
    )
  if requested is None and jnp.finfo(dtype).bits > jnp.finfo(accumulator).bits:
    raise TypeError(
      f"{got} would round it: give init parameters of that dtype, pass accumulator_dtype, or cast"
      " the gradients."
    )


def _check_k(value: Any) -> jax.Array:
  """Checks what a schedule of k returned."""
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if shape != () or not jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(
      f"The schedule every_k returned a value of shape {shape} and dtype {dtype}; it must return"
      " an integer scalar: cast it, e.g."
      " `lambda step: jnp.asarray(schedule(step)).astype(jnp.int32)`."
    )
  if not isinstance(value, jax.core.Tracer) and value < 1:
    raise ValueError(f"The schedule every_k returned {value}; it must return 1 or more.")
  return jnp.asarray(value).astype(jnp.int32)
