"""The `update` and `apply` of `accumulate`: one call, from its gradients to the next state."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_accum import _scopes, _spellings
from optax_accum._arithmetic import conditional, weighted_mean
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.skip import asks_to_skip, SkipFn
from optax_accum._arithmetic.trees import (
  Args,
  Grads,
  Kwargs,
  OptState,
  Params,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._streaming import checks
from optax_accum._streaming.calls import Call, Calls
from optax_accum._streaming.inner_state import same_types, updated, widened
from optax_accum._streaming.state import (
  AccumulateState,
  own,
  states_in,
  stored,
  SUMS,
)

Model = TypeVar("Model", bound=Any)  # the type of the parameters

# The methods of `optax.MultiSteps`, and what is no method here.
_METHODS = {
  "has_updated": ": write optax_accum.has_updated(opt_state), a function of the state",
  "gradient_transformation": ": pass it as it is",
  "flush": ": write tx.apply(grads, opt_state, params, flush=True)",
}


class Given(NamedTuple):
  """What `update` and `apply` are given, beside the state."""

  updates: Grads
  params: Params
  weight: ArrayLike
  flush: Flag
  may_end: Flag | None  # of a step: does anything of its batch count?
  extra_args: Kwargs


class MiniStep(NamedTuple):
  """What one call adds up and decides, before `inner` runs."""

  call: Call
  sums: AccumulateState  # of the cycle, with this call
  divisor: Weight  # of the sum of gradients over the devices, for the mean
  emit: Flag  # whether `inner` steps in this call
  state: AccumulateState  # the next, but for `acc_grads` and `inner_opt_state`


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulation:
  """The `update` of `accumulate`."""

  inner: optax.GradientTransformationExtraArgs
  calls: Calls
  skip_fn: SkipFn | None
  devices: Devices
  differentiable: bool

  def init(self, params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    checks.check_whole(params, self.devices)
    grads = params
    if isinstance(params, optax.LookaheadParams):
      grads = params.fast  # whose gradients step both copies
    # One array a field: a state in which one zero stands twice cannot be donated.
    gradient_step = jnp.zeros((), jnp.int32)
    info: Tree = ()
    if self.skip_fn is not None:
      # What is no array, as a function in an Equinox model, `skip_fn` alone may refuse.
      asked = functools.partial(asks_to_skip, self.skip_fn, weight=1.0)
      _, info = jax.eval_shape(asked, grads, gradient_step, params)
    state = AccumulateState(
      mini_step=jnp.zeros((), jnp.int32),
      gradient_step=gradient_step,
      inner_opt_state=self.inner.init(params),
      acc_grads=self.calls.start(grads),
      skip_state=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info),
      has_updated=jnp.zeros((), jnp.bool_),
      **{name: jnp.zeros((), float) for name in SUMS},
    )
    return stored(state, self.devices)

  def __call__(
    self,
    updates,
    state: AccumulateState,
    params: Params | None = None,
    *,
    weight: ArrayLike = 1.0,
    flush: Flag = False,
    _may_end: Flag | None = None,
    **extra_args,
  ) -> tuple[Grads, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    checks.check_arguments("update", updates, state, params, extra_args)
    params = checks.with_gradients(updates, params, arrays_too=True)
    given = Given(updates, params, weight, flush, _may_end, extra_args)
    step = self.add(given, state)

    total = step.sums.acc_grads
    inner_state = state.inner_opt_state
    run = functools.partial(self.run_inner, step, params)
    if step.emit is True:
      # In every call: so nothing is kept, and no zeros stand for updates.
      _, updates, inner_state = run(total, inner_state)
      state = step.state._replace(inner_opt_state=inner_state)
      return updates, stored(state, self.devices)

    # Traced once, for the types of the updates and for the conditional.
    traced = jax.jit(run, inline=True)
    _, like, _ = jax.eval_shape(traced, total, inner_state)
    # Where they can, sums go in and updates come out in the same buffers.
    buffers = conditional.OutputBuffers(total, like)

    def run_in_buffers(total, _, inner_state):
      total, new, inner_state = traced(total, inner_state)
      total, spare = buffers.filled(new, total)
      return total, spare, inner_state

    total, spare, state = self.if_it_emits(step, run_in_buffers, buffers.spare)
    updates = buffers.updates(total, spare, step.emit)
    return updates, stored(state, self.devices)

  @jax.named_scope("accumulate")
  def add(self, given: Given, state: AccumulateState) -> MiniStep:
    """Adds one microbatch's gradients up, and decides whether the cycle emits."""
    updates = checks.gradients(given.updates)
    checks.check_arrived(
      weight=not isinstance(given.weight, float),
      _may_end=given.may_end is not None,
    )
    kept = self.calls.kept(updates)
    skips = self.skip_fn is not None
    checks.check_state(state, updates, kept, self.calls.every_k, skips)
    checks.check_not_reduced(updates, self.devices)
    checks.check_whole(given.params, self.devices)
    state = own(state, self.devices)

    call = self._agreed(given._replace(updates=updates), state)
    sums, divisor = self.calls.add(state, call)
    ends, after = self.calls.end(state, sums, call)
    emit = ends
    if isinstance(call.all_weights, jax.Array):  # else they are not 0
      emit = ends & (sums.acc_weight != 0)
    steps = optax.safe_increment(state.gradient_step)
    after = after._replace(
      gradient_step=weighted_mean.select(emit, steps, state.gradient_step),
      skip_state=call.info,
      has_updated=jnp.asarray(emit) & bool(jax.tree.leaves(call.updates)),
    )
    return MiniStep(call, sums, divisor, emit, after)

  def _agreed(self, given: Given, state: AccumulateState) -> Call:
    """The call, weighed, and as all devices agree on it."""
    updates, params, weight, flush, may_end, extra_args = given
    # What this device has to say.
    dtype = state.acc_weight.dtype
    weight = checks.checked_weight(weight, dtype)
    flush = checks.checked_flush(flush)
    skip, info = asks_to_skip(
      self.skip_fn, updates, state.gradient_step, params, weight
    )
    info = checks.checked_info(info, state.skip_state)
    loss = checks.checked_value(extra_args.get("value"))
    value: Weight = 0.0
    if loss is not None:
      value = weighted_mean.weigh(loss, weight, dtype)
    # What all say together. If one skips the call, or flushes, so do all.
    skip, flush, all_weights, value = self.devices.agreed(
      [skip, flush], [weight, value], dtype
    )
    numbers = [weight, all_weights, value]
    if isinstance(skip, jax.Array):
      numbers = [jnp.where(skip, 0, x).astype(dtype) for x in numbers]
    weight, all_weights, value = numbers
    value_weight: Weight = 0.0
    if loss is not None:
      value_weight = all_weights
    return Call(
      updates=updates,
      extra_args=extra_args,
      loss=loss,
      skip=skip,
      info=info,
      flush=flush,
      may_end=may_end,
      weight=weight,
      all_weights=all_weights,
      value=value,
      value_weight=value_weight,
    )

  def if_it_emits(
    self, step: MiniStep, run: Callable[..., Args], target
  ) -> tuple[Grads, Tree, AccumulateState]:
    """What `run` makes where the cycle emits, else what it is given, in the same buffers.

    That is the sum of gradients, the `target` of the updates (parameters, or spare buffers) and the
    state of `inner`. The last is returned in the state after this call.
    """

    # In the shape that sums are stored in: XLA for CPU copies what is reshaped after a loop.
    def run_stored(operand):
      total, target, inner_state = operand
      total = self.devices.own(total)
      total, target, inner_state = run(total, target, inner_state)
      return self.devices.stored(total), target, inner_state

    total = self.devices.stored(step.sums.acc_grads)
    operand = total, target, step.state.inner_opt_state
    if step.emit is not True:
      # Traced once, for types and for the conditional.
      run_stored = jax.jit(run_stored, inline=True)
      operand = widened(run_stored, operand)
    total, target, inner_state = conditional.update_if(
      step.emit, run_stored, operand, _scopes.END_OF_CYCLE, self.differentiable
    )
    total = self.devices.own(total)
    state = step.state._replace(
      acc_grads=self.calls.kept(total), inner_opt_state=inner_state
    )
    return total, target, state

  @jax.named_scope("optimizer")
  def run_inner(
    self, step: MiniStep, params, total, inner_state
  ) -> tuple[Grads, Grads, OptState]:
    """One step of `inner` on the cycle's gradient: its updates, and its next state.

    Sums over devices are returned in place of `total`, in its buffers: nothing reads it again.
    """
    updates = step.call.updates
    reduction = self.calls.reduction
    total = jax.tree.map(self.devices.sum, total)

    def divided(x, g):
      return reduction.finish(x, step.divisor, g)

    reduced = jax.tree.map(divided, total, updates)
    extra_args = self.calls.extra_args(step.call, step.sums, reduced)
    if reduction.name == "mean" and states_in(inner_state):
      # An accumulation in `inner` counts this cycle as what it weighs. A sum has no weight.
      weight = weighted_mean.as_weight(step.sums.acc_weight)
      extra_args = {**extra_args, "weight": weight}
    update = functools.partial(
      self.inner.update, reduced, inner_state, params, **extra_args
    )
    like = checks.with_gradients(updates, params)
    if like is None:
      like = updates
    new, inner_state = updated(
      "inner_opt_state",
      self.inner.init,
      like,
      inner_state,
      functools.partial(checks.sending, extra_args, update),
    )
    return total, new, inner_state


class AccumulateTransformation(optax.GradientTransformationExtraArgs):
  """An `optax.GradientTransformationExtraArgs`, the pair ``(init, update)``, with `apply`.

  Attributes:
    init: ``init(params) -> AccumulateState``.
    update: ``update(updates, state, params, *, weight=1.0, flush=False, **extra_args)``, which
      returns ``(updates, state)``: zeros, until a cycle ends.
  """

  @_spellings.hinted("The order is apply(updates, state, params).")
  def apply(
    self,
    updates: Grads,
    state: OptState,
    params: Model,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[Model, AccumulateState]:
    """Adds gradients up, and steps the parameters when the cycle ends; see `accumulate`."""
    accumulation = self.update
    if not isinstance(accumulation, Accumulation):
      raise AttributeError(
        "The `update` of this transformation was replaced, and `apply` would ignore that: use"
        " `update` and optax.apply_updates."
      )
    if params is None:
      raise ValueError(
        "apply(updates, state, params) got params=None; it needs the parameters."
      )
    checks.check_arguments("apply", updates, state, params, extra_args)
    given = Given(updates, params, weight, flush, None, extra_args)
    step = accumulation.add(given, state)

    # `update` and `optax.apply_updates`, with both inside the conditional.
    def run(total, params, inner_state):
      total, new, inner_state = accumulation.run_inner(
        step, params, total, inner_state
      )
      new = optax.apply_updates(params, new)
      return total, same_types("params", new, params), inner_state

    trained = checks.with_gradients(updates, params)
    _, trained, state = accumulation.if_it_emits(step, run, trained)

    def chosen(given, new):
      if new is None:  # what has no gradient stays
        return given
      return new

    params = jax.tree.map(chosen, params, trained)
    return params, stored(state, accumulation.devices)

  if not TYPE_CHECKING:  # to which every name would be one that there is

    def __getattr__(self, name: str):
      """Says what to write for a name that there is elsewhere."""
      instead = _METHODS.get(name, "")
      raise AttributeError(
        f"This {type(self).__name__} has no {name!r}{instead}."
      )
