"""One call of `accumulate`: adds its gradients up, and decides whether the cycle ends with it."""

from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, weighted_mean
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.skip import asks_to_skip, SkipFn
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._streaming import checks, device_state
from optax_accum._streaming.cycle import Cycle, EveryCall, MiniStep, Weights
from optax_accum._streaming.state import AccumulateState

_weight_is_sent = contextvars.ContextVar("weight_is_sent", default=False)


@contextlib.contextmanager
def weight_is_sent(sent: bool) -> Iterator[None]:
  """Whether a caller of ours gives `weight` to the transformation that it runs here."""
  token = _weight_is_sent.set(sent)
  try:
    yield
  finally:
    _weight_is_sent.reset(token)


@dataclasses.dataclass(eq=False, repr=False)
class MiniSteps:
  """Adds up the gradients of one call after the other."""

  cycle: Cycle | EveryCall  # what is kept from one call to the next, and when the cycle ends
  skip_fn: SkipFn | None
  axis_name: AxisName | None

  @jax.named_scope("accumulate")
  def add(
    self, updates: Any, state: AccumulateState, params: Any, weight: ArrayLike, flush: Flag
  ) -> MiniStep:
    """Adds one microbatch's gradients up, and decides whether the cycle emits."""
    checks.check_state(state, self.skip_fn is not None)
    if self.axis_name is not None:
      _check_not_reduced(updates, self.axis_name)
      checks.check_device_axis(state, updates)
    state = device_state.loaded(state, self.axis_name)
    if _weight_is_sent.get() and isinstance(weight, float):
      raise ValueError(
        "accumulate did not get the weight that was passed to the optimizer. If a transformation"
        " around accumulate drops it, with all extra arguments, put accumulate around that one, as"
        " in accumulate(transformation(optimizer), every_k). If one passes a Python number instead,"
        " because every call shall count the same, let it pass weight=jnp.asarray(1.0)."
      )
    weighted_mean.check_weight("The caller of update", weight)
    # A weight that is known and not zero settles that the cycle's total is not zero either.
    if isinstance(weight, (int, float)) and weight != 0:
      local_weight: Weight = float(weight)
    else:
      local_weight = weighted_mean.as_weight(weight).astype(state.acc_weight.dtype)
    flush = _check_flush(flush)
    skip: Flag = False
    if self.skip_fn is not None:
      skip, info = asks_to_skip(self.skip_fn, updates, state.gradient_step, params)
      if isinstance(local_weight, jax.Array):  # what has no weight may be NaN: no cause to skip
        skip = skip & weighted_mean.counts(local_weight)
      checks.check_info(info, state.skip_state)
      info = jax.tree.map(lambda x, old: x.astype(old.dtype), info, state.skip_state)
      state = state._replace(skip_state=info)

    skip, flush, weights = self._agree(skip, flush, local_weight, state.acc_weight.dtype)
    # A train step whose batch counts nothing moves no parameter, so it ends no cycle either.
    may_end = weighted_mean.counts(weights.over_devices) if _weight_is_sent.get() else True
    step = self.cycle.add(updates, state, skip, flush, weights, may_end)
    emit = step.emit
    if isinstance(weights.over_devices, jax.Array):
      emit = emit & (state.acc_weight + weights.over_devices != 0)
    gradient_step = optax.safe_increment(state.gradient_step)
    state = step.state._replace(
      gradient_step=weighted_mean.select(emit, gradient_step, state.gradient_step),
      has_updated=jnp.asarray(emit),
    )
    return step._replace(emit=emit, state=state)

  def _agree(
    self, skip: Flag, flush: Flag, local: Weight, dtype: Any
  ) -> tuple[Flag, Flag, Weights]:
    """What the devices decide together: any that skips or flushes does so for all."""
    total = local
    if self.axis_name is not None:
      values = (skip, flush, local)
      traced = [jnp.asarray(x).astype(dtype) for x in values if isinstance(x, jax.Array)]
      sums: Any = iter(())
      if traced:  # one reduction, of up to three numbers
        stacked = across_devices.varying(jnp.stack(traced), self.axis_name)
        sums = iter(lax.psum(stacked, self.axis_name))
      skip = next(sums) > 0 if isinstance(skip, jax.Array) else skip
      flush = next(sums) > 0 if isinstance(flush, jax.Array) else flush
      known = not isinstance(local, jax.Array)
      total = local * lax.axis_size(self.axis_name) if known else next(sums)
    if isinstance(skip, jax.Array):
      local, total = (jnp.where(skip, 0, w).astype(dtype) for w in (local, total))
    return skip, flush, Weights(local, total)


def _check_flush(value: Any) -> bool | jax.Array:
  """Checks a flag that may be traced; a Python bool stays one."""
  if isinstance(value, (bool, np.bool_)):
    return bool(value)
  is_array = isinstance(value, (jax.Array, np.ndarray))
  if not is_array or (value.shape, value.dtype) != ((), jnp.bool_):
    raise TypeError(
      f"flush={value!r} must be a bool, or a bool scalar array, e.g. `step == last_step`."
    )
  return jnp.asarray(value)


def _check_not_reduced(updates: optax.Updates, axis_name: AxisName) -> None:
  """Checks that no gradient was reduced over the devices yet, where the types say so."""
  across_devices.check_bound(axis_name)
  # Types say which axes a value varies over in shard_map with check_vma=True, and nowhere else.
  # A gradient of zero is no exception: it varies as its parameter does.
  known = across_devices.varying_axes(across_devices.varying(jnp.zeros(()), axis_name))
  for name, leaf in _validate.named_leaves("updates", updates):
    if missing := known.difference(across_devices.varying_axes(leaf)):
      raise ValueError(
        f"{name} is the same on all devices of the axes {sorted(missing)} of"
        f" axis_name={axis_name!r}, so it was reduced in this microbatch, and accumulate would"
        " reduce it again. Gradients of parameters that are the same on all devices are *summed*"
        " by JAX: differentiate with respect to"
        f' jax.lax.pcast(params, {axis_name!r}, to="varying"), and leave lax.pmean out. (Cast'
        " gradients that you made yourself, such as zeros, in the same way.)"
      )
