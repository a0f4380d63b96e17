"""The calls of a cycle: what is kept between them, what they add up to, and which one ends it."""

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
from optax_accum._arithmetic.trees import Grads, Kwargs, Leaf
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._streaming.state import AccumulateState, SUMS

# The mini steps in a cycle, an integer of at least 1, from the steps taken before it.
Schedule: TypeAlias = Callable[[jax.Array], ArrayLike]


class Call(NamedTuple):
  """One call, as all devices agree on it. One that is skipped weighs nothing."""

  updates: Grads
  extra_args: Kwargs
  loss: Leaf  # that of ``value=``, or None
  skip: Flag
  flush: Flag
  weight: Weight  # of the gradients of this device
  sums: dict[str, Leaf]  # what it adds to each of `SUMS`


@dataclasses.dataclass(frozen=True)
class Calls:
  """The calls between two steps of `inner`."""

  every_k: int | Schedule
  accumulator_dtype: DTypeLike | None

  def kept(self, grads):
    """Of a tree like the gradients, what is kept between calls: nothing, if each call is a step."""
    if self.every_k == 1:
      return ()
    return grads

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
      # that are computed from nothing end up on one device, or replicated. The barrier keeps the
      # compiler from seeing that `no` is False.
      no = lax.optimization_barrier(jnp.zeros((), jnp.bool_))
      return jnp.where(no, param.astype(dtype), jnp.zeros((), dtype))

    return jax.tree.map_with_path(zeros, self.kept(params))

  def add(self, state: AccumulateState, call: Call) -> AccumulateState:
    """The state with the sums of the cycle, this call included."""
    if self.every_k == 1:
      # The gradients are not weighed yet: `run_inner` weighs them.
      return state._replace(acc_grads=call.updates, **call.sums)
    dtype = jnp.result_type(state.acc_weight)
    is_first = state.mini_step == 0

    # The first call overwrites: selecting is free where zeroing after the cycle costs a pass
    # over the accumulators, and an inf cannot get past it.
    def before(x):
      return jnp.where(is_first, 0, x)

    def added(acc, g):
      old = before(acc)
      return old + weighted_mean.weigh(g, call.weight, acc.dtype)

    sums = {}
    for name, x in call.sums.items():
      # A state made without the newer fields has float32 zeros of NumPy there.
      old = jnp.asarray(getattr(state, name), dtype)
      sums[name] = before(old) + x
    grads = jax.tree.map(added, state.acc_grads, call.updates)
    return state._replace(acc_grads=grads, **sums)

  def end(
    self, state: AccumulateState, sums: AccumulateState, call: Call
  ) -> tuple[Flag, AccumulateState]:
    """Whether the cycle ends, and the state after this call."""
    # A skipped call does not count as one of the cycle's calls.
    counted: Flag = True
    if call.skip is not False:
      counted = jnp.logical_not(call.skip)
    if self.every_k == 1:
      # Each counted call is a cycle, and the scalars of `state` stay zero.
      return counted, state
    mini_step = state.mini_step + jnp.int32(counted)
    k: Any = self.every_k
    if callable(k):
      k = k(state.gradient_step)
    # A skipped call can end a cycle only by `flush`, and an empty cycle has no end.
    is_full = counted & (mini_step >= k)
    flushed = call.flush & (mini_step > 0)
    ends = is_full | flushed

    def unless_ended(x):
      return jnp.where(ends, jnp.zeros_like(x), x)

    # `acc_grads` is not zeroed here: the first call of the next cycle overwrites it.
    after = {name: getattr(sums, name) for name in SUMS}
    after["mini_step"] = mini_step
    return ends, state._replace(**jax.tree.map(unless_ended, after))


class ValueOfOneCall(functools.partial[Any]):
  """The `value_fn` that a step makes: the loss of the rows of its call."""


def refused(*args, **kwargs) -> NoReturn:
  """The `value_fn` that `inner` gets in place of a `ValueOfOneCall`."""
  raise NotImplementedError(
    "The optimizer within accumulate calls value_fn, as line searches do, and that of a step is the"
    " loss of the rows of one call, not of the cycle. Take the step in one call, of all rows:"
    " optax_accum.make_train_step(loss_fn, inner, num_microbatches=every_k * N)."
  )
