"""The functions of the transformation that `accumulate` returns."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_accum._arithmetic import conditional
from optax_accum._arithmetic.skip import asks_to_skip
from optax_accum._arithmetic.weighted_mean import as_weight
from optax_accum._streaming import checks
from optax_accum._streaming.cycle import gradients_like, MiniStep
from optax_accum._streaming.device_state import stored, with_device_axis, without_device_axis
from optax_accum._streaming.inner_state import check_kept, explained
from optax_accum._streaming.mini_step import MiniSteps, weight_is_sent
from optax_accum._streaming.same_types import same_types, widened
from optax_accum._streaming.state import AccumulateState, states_in
from optax_accum._streaming.transformation import Params

Held = TypeVar("Held")


@dataclasses.dataclass(eq=False, repr=False)
class Accumulation(MiniSteps):
  """The functions that `accumulate` returns: they add up, and run `inner` when a cycle ends."""

  inner: optax.GradientTransformationExtraArgs
  reduction: Any  # over the cycle's microbatches and the devices
  differentiable: bool

  def init(self, params: optax.Params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    # One array a field: a state in which one zero stands twice cannot be donated.
    gradient_step = jnp.zeros((), jnp.int32)
    skip_state: Any = ()
    if self.skip_fn is not None:
      asked = functools.partial(asks_to_skip, self.skip_fn)
      info = jax.eval_shape(asked, gradients_like(params), gradient_step, params)[1]
      skip_state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)
    state = AccumulateState(
      mini_step=jnp.zeros((), jnp.int32),
      gradient_step=gradient_step,
      inner_opt_state=self.inner.init(params),
      acc_grads=self.cycle.init(params),
      skip_state=skip_state,
      acc_weight=jnp.zeros((), jnp.result_type(float)),
      has_updated=jnp.zeros((), jnp.bool_),
      weight_rest=jnp.zeros((), jnp.result_type(float)),
    )
    return stored(state, self.axis_name)

  def update(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    updates = checks.checked("update", updates, state, params, extra_args)
    step = self.add(updates, state, params, weight, flush)
    run = functools.partial(self._run_inner, step, updates, extra_args, params)
    if step.emit is True:
      updates, total, inner_state = run(step.total, state.inner_opt_state)
      return updates, self._next(step, total, inner_state)

    # `inner` is traced once, for the types of its state and updates and for the conditional.
    traced = jax.jit(run, inline=True)
    old_state = widened(lambda x: traced(step.total, x)[2], state.inner_opt_state)
    like = jax.eval_shape(traced, step.total, old_state)[0]
    # Where they can, sums go in and updates come out in the same buffers.
    shared = conditional.OutputBuffers(step.total, like)

    def emitted(total: Any, held: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
      new, total, inner_state = traced(total, held[1])
      total, spare = shared.filled(new, total)
      return total, (spare, inner_state)

    held = (shared.spare, old_state)
    total, (spare, inner_state) = self._if_it_emits(step, emitted, held)
    return shared.updates(total, spare, step.emit), self._next(step, total, inner_state)

  def apply(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: Params,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[Params, AccumulateState]:
    """`update` and `optax.apply_updates`, with both inside the conditional."""
    if params is None:
      raise ValueError("apply(updates, state, params) got params=None; it needs the parameters.")
    updates = checks.checked("apply", updates, state, params, extra_args)
    step = self.add(updates, state, params, weight, flush)

    def emitted(total: Any, held: tuple[Params, Any]) -> tuple[Any, tuple[Params, Any]]:
      run = functools.partial(self._run_inner, step, updates, extra_args)
      new, total, inner_state = run(held[0], total, held[1])
      return total, (same_types("params", optax.apply_updates(held[0], new), params), inner_state)

    held = (params, state.inner_opt_state)
    total, (params, inner_state) = self._if_it_emits(step, emitted, held)
    return params, self._next(step, total, inner_state)

  def _if_it_emits(
    self, step: MiniStep, fun: Callable[[Any, Held], tuple[Any, Held]], held: Held
  ) -> tuple[Any, Held]:
    """``fun(step.total, held)`` where the cycle emits, and else the two, in the same buffers."""

    def run(operand: tuple[Any, Held]) -> tuple[Any, Held]:
      total, held = fun(without_device_axis(operand[0], self.axis_name), operand[1])
      return with_device_axis(total, self.axis_name), held

    if step.emit is not True:  # `fun` is traced once, for types and for the conditional
      fun = jax.jit(fun, inline=True)
      held = widened(lambda held: fun(step.total, held)[1], held)
    # In the shape that they are stored in: XLA for CPU copies what is reshaped after a loop.
    operand = (with_device_axis(step.total, self.axis_name), held)
    total, held = conditional.update_if(step.emit, run, operand, self.differentiable)
    return without_device_axis(total, self.axis_name), held

  def _run_inner(
    self, step: MiniStep, updates: Any, extra_args: Any, params: Any, total: Any, inner_state: Any
  ) -> tuple[optax.Updates, optax.Updates, optax.OptState]:
    """One step of `inner` on the cycle's gradient, in the dtypes of one microbatch's.

    Sums over devices are given out in place of `total`, which nothing reads again: the next mini
    step overwrites it. So they are made in its buffers.
    """
    kind, axis_name, weight = self.reduction, self.axis_name, step.divisor
    with jax.named_scope("optimizer"):
      if axis_name is not None:
        total = jax.tree.map(lambda x: kind.across_devices(x, axis_name, True), total)
      reduced = jax.tree.map(
        lambda x, g: kind.finish(x, weight, g.dtype).astype(g.dtype), total, updates
      )
      # An accumulation in `inner` counts this cycle as what it weighs. A sum has no weight.
      sends = kind.name == "mean" and bool(states_in(inner_state))
      if sends:
        extra_args = {**extra_args, "weight": as_weight(step.cycle_weight)}
      like = updates if params is None else params
      restored = ("inner_opt_state", self.inner.init, like, inner_state)
      with explained(*restored), weight_is_sent(sends):
        new, new_state = self.inner.update(reduced, inner_state, params, **extra_args)
      check_kept(*restored, new, new_state)
    return new, total, same_types("inner_opt_state", new_state, inner_state)

  def _next(self, step: MiniStep, total: Any, inner_state: optax.OptState) -> AccumulateState:
    state = step.state._replace(acc_grads=self.cycle.kept(total), inner_opt_state=inner_state)
    return stored(state, self.axis_name)
