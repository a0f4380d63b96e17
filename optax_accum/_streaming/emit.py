"""The functions that `accumulate` returns, and what they run when a cycle ends."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, TypeVar

import jax
from jax.typing import ArrayLike
import optax

from optax_accum._arithmetic import conditional
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.trees import Grads, Kwargs, OptState
from optax_accum._arithmetic.weighted_mean import as_weight
from optax_accum._streaming import checks
from optax_accum._streaming.cycle import Cycle, MiniStep, sending
from optax_accum._streaming.inner_state import same_types, updated, widened
from optax_accum._streaming.state import (
  AccumulateState,
  states_in,
  stored,
  with_device_axis,
  without_device_axis,
)

Params = TypeVar("Params", bound=Any)
Carry = TypeVar("Carry")


@dataclasses.dataclass(eq=False, repr=False)
class Accumulation:
  """The `update` of `accumulate`: adds gradients up, and runs `inner` when a cycle ends."""

  inner: optax.GradientTransformationExtraArgs
  cycle: Cycle
  differentiable: bool

  def init(self, params: Params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    return self.cycle.init(params, self.inner.init(params))

  def __call__(
    self,
    updates: Grads,
    state: AccumulateState,
    params: Params | None = None,
    *,
    weight: ArrayLike = 1.0,
    flush: Flag = False,
    _may_end: Flag | None = None,  # of a step: does anything of its batch count?
    **extra_args: Any,
  ) -> tuple[Grads, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    updates = checks.checked("update", updates, state, params, extra_args)
    step = self.cycle.add(updates, state, params, weight, flush, _may_end)
    run = functools.partial(self._run_inner, step, updates, extra_args, params)
    if step.emit is True:
      updates, total, inner_state = run(step.total, state.inner_opt_state)
      return updates, self._next(step, total, inner_state)

    traced = jax.jit(run, inline=True)  # once, for the types of updates and for the conditional
    like = jax.eval_shape(traced, step.total, state.inner_opt_state)[0]
    # Where they can, sums go in and updates come out in the same buffers.
    shared = conditional.OutputBuffers(step.total, like)

    def emitted(total: Grads, carry: tuple[Grads, OptState]) -> tuple[Grads, Any]:
      new, total, inner_state = traced(total, carry[1])
      total, spare = shared.filled(new, total)
      return total, (spare, inner_state)

    carry = (shared.spare, state.inner_opt_state)
    total, (spare, inner_state) = self._if_it_emits(step, emitted, carry)
    return shared.updates(total, spare, step.emit), self._next(step, total, inner_state)

  def apply(
    self, updates: Grads, state: Any, params: Params, weight: Any, flush: Flag, extra_args: Kwargs
  ) -> tuple[Params, AccumulateState]:
    """`update` and `optax.apply_updates`, with both inside the conditional."""
    if params is None:
      raise ValueError("apply(updates, state, params) got params=None; it needs the parameters.")
    updates = checks.checked("apply", updates, state, params, extra_args)
    step = self.cycle.add(updates, state, params, weight, flush, None)

    def emitted(total: Grads, carry: tuple[Params, OptState]) -> tuple[Grads, Any]:
      old, inner_state = carry
      new, total, inner_state = self._run_inner(step, updates, extra_args, old, total, inner_state)
      return total, (same_types("params", optax.apply_updates(old, new), params), inner_state)

    carry = (params, state.inner_opt_state)
    total, (params, inner_state) = self._if_it_emits(step, emitted, carry)
    return params, self._next(step, total, inner_state)

  def _if_it_emits(
    self, step: MiniStep, fun: Callable[[Grads, Carry], tuple[Grads, Carry]], carry: Carry
  ) -> tuple[Grads, Carry]:
    """``fun(step.total, carry)`` where the cycle emits, and else the two, in the same buffers."""
    axis_name = self.cycle.axis_name

    def run(operand: tuple[Grads, Carry]) -> tuple[Grads, Carry]:
      total, carry = fun(without_device_axis(operand[0], axis_name), operand[1])
      return with_device_axis(total, axis_name), carry

    if step.emit is not True:  # `fun` is traced once, for types and for the conditional
      fun = jax.jit(fun, inline=True)
      carry = widened(lambda carry: fun(step.total, carry)[1], carry)
    # In the shape that they are stored in: XLA for CPU copies what is reshaped after a loop.
    operand = (with_device_axis(step.total, axis_name), carry)
    total, carry = conditional.update_if(step.emit, run, operand, self.differentiable)
    return without_device_axis(total, axis_name), carry

  def _run_inner(
    self,
    step: MiniStep,
    updates: Grads,
    extra_args: Kwargs,
    params: Params | None,
    total: Grads,
    inner_state: OptState,
  ) -> tuple[Grads, Grads, OptState]:
    """One step of `inner` on the cycle's gradient, in the dtypes of one microbatch's.

    Sums over devices are returned in place of `total`, in its buffers: nothing reads it again.
    """
    kind, axis_name, weight = self.cycle.reduction, self.cycle.axis_name, step.divisor
    with jax.named_scope("optimizer"):
      if axis_name is not None:
        total = jax.tree.map(lambda x: kind.over_devices(x, axis_name, True), total)
      reduced = jax.tree.map(
        lambda x, g: kind.finish(x, weight, g.dtype).astype(g.dtype), total, updates
      )
      # An accumulation in `inner` counts this cycle as what it weighs. A sum has no weight.
      sends = kind.name == "mean" and bool(states_in(inner_state))
      if sends:
        extra_args = {**extra_args, "weight": as_weight(step.cycle_weight)}
      like = updates if params is None else params

      def run() -> tuple[Grads, OptState]:
        with sending(["weight"] * sends):
          return self.inner.update(reduced, inner_state, params, **extra_args)

      new, new_state = updated("inner_opt_state", self.inner.init, like, inner_state, run)
    return new, total, same_types("inner_opt_state", new_state, inner_state)

  def _next(self, step: MiniStep, total: Grads, inner_state: OptState) -> AccumulateState:
    kept = () if self.cycle.every_k == 1 else total
    state = step.state._replace(acc_grads=kept, inner_opt_state=inner_state)
    return stored(state, self.cycle.axis_name)
