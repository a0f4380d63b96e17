"""The calls of a cycle, one or several: what is kept, what they add up to, and when they end it."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Grads, Kwargs, Leaf, Tree
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum
from optax_accum._streaming import checks
from optax_accum._streaming.state import AccumulateState, SUMS

# The mini steps in a cycle, an integer of at least 1, from the steps taken before it.
Schedule: TypeAlias = Callable[[jax.Array], ArrayLike]


class Call(NamedTuple):
  """One call, as all devices agree on it. One that is skipped weighs nothing."""

  updates: Grads
  extra_args: Kwargs
  loss: Leaf  # that of ``value=``, or None
  skip: Flag
  info: Tree  # of `skip_fn`
  flush: Flag
  may_end: Flag | None
  weight: Weight  # of the gradients of this device
  all_weights: Leaf  # the sum over devices, a `Weight` as the next two
  value: Leaf  # the weighted sum of `loss` over devices
  value_weight: Leaf  # `all_weights`, or zero without a `loss`


@dataclasses.dataclass(frozen=True)
class Calls:
  """The calls between two steps of `inner`: here one, so that nothing is kept."""

  every_k: int | Schedule
  reduction: Reduction  # over the cycle's calls and the devices
  accumulator_dtype: DTypeLike | None
  devices: Devices

  def kept(self, grads):
    """What is kept between calls of a sum of gradients, or of a tree like it."""
    return ()

  def start(self, params):
    """Zeros to add up gradients in, if any are kept, sharded as their parameters."""

    def zeros(path, param):
      dtype = jnp.result_type(param)
      name = _validate.leaf_name("params", path)
      dtypes.check_holds(name, dtype, self.accumulator_dtype)
      dtype = dtypes.accumulator_dtype(dtype, self.accumulator_dtype)
      if not isinstance(param, jax.core.Tracer):
        return jnp.zeros_like(param, dtype)
      # Under jit the compiler shards results as the arguments that they are computed from. Zeros
      # that are computed from nothing end up on one device, or replicated.
      no = lax.optimization_barrier(jnp.zeros((), jnp.bool_))
      return jnp.where(no, param.astype(dtype), jnp.zeros((), dtype))

    return jax.tree.map_with_path(zeros, self.kept(params))

  def add(
    self, state: AccumulateState, call: Call
  ) -> tuple[AccumulateState, Weight]:
    """The state with the cycle's sums, and what divides that of the gradients."""
    weight = call.weight
    divisor = call.all_weights
    if self.reduction.name == "mean" and not isinstance(weight, jax.Array):
      # Known when tracing, so that it is the same on all devices, and cancels.
      weight = 1.0
      divisor = self.devices.size

    def weighed(g):
      dtype = self.devices.sum_dtype(g.dtype, self.accumulator_dtype)
      return weighted_mean.weigh(g, weight, dtype)

    sums = state._replace(
      acc_grads=jax.tree.map(weighed, call.updates),
      acc_weight=call.all_weights,
      acc_value=call.value,
      value_weight=call.value_weight,
    )
    return sums, divisor

  def end(
    self, state: AccumulateState, sums: AccumulateState, call: Call
  ) -> tuple[Flag, AccumulateState]:
    """Whether the cycle ends, and the state after this call."""
    if call.skip is False:
      return True, state
    return jnp.logical_not(call.skip), state

  def extra_args(self, call: Call, sums: AccumulateState, reduced):
    """What `inner` is given: the cycle's, where a call has that of its rows alone."""
    of_cycle = {"grad": reduced}
    if call.loss is not None:
      of_cycle["value"] = self.reduction.finish(
        sums.acc_value, sums.value_weight, call.loss
      )
    return {name: of_cycle.get(name, x) for name, x in call.extra_args.items()}


class MeanOfOne(Calls):
  """The mean of one call on one device, which is that call, whatever it weighs."""

  def add(self, state, call):
    divisor: Weight = 1.0
    if isinstance(call.weight, jax.Array):
      # A weight out of range shows, as in a longer cycle.
      usable = weighted_mean.usable(call.weight)
      divisor = jnp.where(usable, 1.0, 10 * weighted_mean.MOST_IN_TOTAL)
    sums = state._replace(acc_grads=call.updates, acc_weight=call.all_weights)
    return sums, divisor

  def extra_args(self, call, sums, reduced):
    return call.extra_args


class SeveralCalls(Calls):
  """Several calls, or as many as a schedule says. Their sums are kept in the state."""

  def kept(self, grads):
    return grads

  def add(self, state, call):
    checks.check_gradients(
      call.updates, state.acc_grads, self.accumulator_dtype
    )
    dtype = state.acc_weight.dtype
    is_first = state.mini_step == 0

    # The first call overwrites: selecting is free where zeroing after the cycle costs a pass
    # over the accumulators, and an inf cannot get past it.
    def before(x):
      return jnp.where(is_first, 0, x)

    def added(acc, g):
      return before(acc) + weighted_mean.weigh(g, call.weight, acc.dtype)

    grads = jax.tree.map(added, state.acc_grads, call.updates)
    value = before(jnp.asarray(state.acc_value, dtype)) + call.value
    value_weight = before(jnp.asarray(state.value_weight, dtype))
    value_weight = value_weight + call.value_weight
    weight = WeightSum(state.acc_weight, jnp.asarray(state.weight_rest, dtype))
    weight = weight.add(jnp.asarray(call.all_weights, dtype))
    sums = state._replace(
      acc_grads=grads,
      acc_weight=weight.total,
      weight_rest=weight.rest,
      acc_value=value,
      value_weight=value_weight,
    )
    return sums, weight.total

  def end(self, state, sums, call):
    counted = jnp.logical_not(call.skip)
    mini_step = state.mini_step + counted.astype(jnp.int32)
    k: Any = self.every_k
    if callable(k):
      k = checks.checked_k(k(state.gradient_step))
    ends = (counted & (mini_step >= k)) | (call.flush & (mini_step > 0))
    if call.may_end is not None:
      ends = ends & call.may_end

    def unless_ended(x):
      return jnp.where(ends, jnp.zeros_like(x), x)

    kept = {name: getattr(sums, name) for name in SUMS}
    kept = jax.tree.map(unless_ended, kept)
    return ends, state._replace(mini_step=jnp.where(ends, 0, mini_step), **kept)

  def extra_args(self, call, sums, reduced):
    given = dict(super().extra_args(call, sums, reduced))
    if isinstance(given.get("value_fn"), ValueOfOneCall):
      given["value_fn"] = _refused
    return given


class ValueOfOneCall(functools.partial[Any]):
  """The `value_fn` that a step makes: the loss of the rows of its call."""


def _refused(*args, **kwargs) -> NoReturn:
  """The `value_fn` that `inner` gets in place of a `ValueOfOneCall`."""
  raise NotImplementedError(
    "The optimizer within accumulate calls value_fn, as line searches do, and that of a step is the"
    " loss of the rows of one call, not of the cycle. Take the step in one call, of all rows:"
    " optax_accum.make_train_step(loss_fn, inner, num_microbatches=every_k * N)."
  )
