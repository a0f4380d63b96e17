"""The `update` and `apply` of `accumulate`: one call, from its gradients to the next state."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from optax_accum._arithmetic import conditional, dtypes, weighted_mean
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.devices import Devices
from optax_accum._arithmetic.skip import asks_to_skip
from optax_accum._arithmetic.trees import (
  Args,
  combine,
  Grads,
  Kwargs,
  OptState,
  Params,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._compiled import scopes
from optax_accum._streaming import checks
from optax_accum._streaming.calls import Call, Calls, refused, ValueOfOneCall
from optax_accum._streaming.inner_state import same_types, widened
from optax_accum._streaming.state import (
  AccumulateState,
  own,
  states_in,
  stored,
  SUMS,
)

Model = TypeVar("Model", bound=Any)  # the type of the parameters


class MiniStep(NamedTuple):
  """What one call adds up and decides, before `inner` runs."""

  call: Call
  sums: AccumulateState  # of the cycle, with this call
  emit: Flag  # whether `inner` steps in this call
  state: AccumulateState  # the next, but for `acc_grads` and `inner_opt_state`


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulation:
  """The `update` of `accumulate`."""

  inner: optax.GradientTransformationExtraArgs
  calls: Calls
  reduction: Literal["mean", "sum"]  # over the cycle's calls and the devices
  skip_fn: optax.ShouldSkipUpdateFunction | None
  devices: Devices
  differentiable: bool

  def init(self, params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    checks.check_whole(params, self.devices)
    # Parameters stand for their gradients, which have the same tree and shapes.
    grads = params
    if isinstance(params, optax.LookaheadParams):
      grads = params.fast  # whose gradients step both copies
    # One array a field: a state in which one zero stands twice cannot be donated.
    gradient_step = jnp.zeros((), jnp.int32)
    # Without a `skip_fn` the state keeps no info.
    info: Tree = ()
    if self.skip_fn is not None:
      # This runs only with a `skip_fn`, since `jax.eval_shape` refuses what is no array, such as a
      # function in an Equinox model.
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
    **extra_args,
  ) -> tuple[Grads, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    params = checks.with_gradients(updates, params)
    step = self.add(updates, state, params, weight, flush, extra_args)
    total = step.sums.acc_grads
    inner_state = state.inner_opt_state
    run = functools.partial(self.run_inner, step, params)
    if step.emit is True:
      # Tracing knows that every call steps, so no sums are kept and no updates are zeros.
      # The first result is the gradients of the call, which are not kept.
      _, updates, inner_state = run(total, inner_state)
      state = step.state._replace(inner_opt_state=inner_state)
      return updates, stored(state, self.devices)

    # Traced once, for the types of the updates and for the conditional.
    traced = jax.jit(run, inline=True)
    _, like, _ = jax.eval_shape(traced, total, inner_state)
    # Updates come out in the buffers of the sums, or in spare ones where they do not fit there.
    buffers = conditional.OutputBuffers(total, like)

    # The second operand is zeros in the spare buffers, which the updates replace.
    def run_in_buffers(total, _, inner_state):
      total, new, inner_state = traced(total, inner_state)
      # The sums are used up: from here on `total` has updates, and `spare` has the others.
      total, spare = buffers.filled(new, total)
      return total, spare, inner_state

    total, spare, state = self.if_it_emits(step, run_in_buffers, buffers.spare)
    updates = buffers.updates(total, spare, step.emit)
    return updates, stored(state, self.devices)

  @jax.named_scope("accumulate")
  def add(
    self,
    updates,
    state: AccumulateState,
    params,
    weight: ArrayLike,
    flush: Flag,
    extra_args: Kwargs,
  ) -> MiniStep:
    """Adds one microbatch's gradients up, and decides whether the cycle emits."""
    updates = checks.gradients(updates)
    checks.check_is_state(state)
    checks.check_not_reduced(updates, self.devices)
    checks.check_whole(params, self.devices)
    # From here to `stored`, the state has no axis of devices.
    state = own(state, self.devices)
    checks.check_accumulators(self.calls.kept(updates), state.acc_grads)

    # What this device has to say.
    dtype = jnp.result_type(state.acc_weight)
    own_weight = checks.checked_weight(weight, dtype)
    # A Python bool stays one, so that tracing knows it.
    if not isinstance(flush, bool):
      flush = jnp.asarray(flush, jnp.bool_)
    skip, info = asks_to_skip(
      self.skip_fn, updates, state.gradient_step, params, own_weight
    )
    info = checks.checked_info(info, state.skip_state)
    loss = checks.checked_value(extra_args.get("value"))
    # `value` is the loss times its weight, as it goes into the sum.
    value: Weight = 0.0
    if loss is not None:
      value = weighted_mean.weigh(loss, own_weight, dtype)
    # What all say together. If one skips the call, or flushes, so do all.
    skip, flush, total, value = self.devices.agreed(
      [skip, flush], [own_weight, value], dtype
    )
    numbers = [own_weight, total, value]
    # Without a `skip_fn`, `skip` is a Python False, and the numbers stay as they are.
    if isinstance(skip, jax.Array):
      numbers = [jnp.where(skip, 0, x).astype(dtype) for x in numbers]
    own_weight, total, value = numbers
    terms = {"acc_weight": total, "acc_value": value, "value_weight": total}
    # A call without a loss does not count in the mean of losses.
    if loss is None:
      terms["value_weight"] = 0.0
    call = Call(updates, extra_args, loss, skip, flush, own_weight, terms)

    sums = self.calls.add(state, call)
    ends, after = self.calls.end(state, sums, call)
    # A cycle whose total weight is zero ends without a step. A weight that tracing knows is above
    # 0, and so is then the total of its cycle.
    emit = ends
    if isinstance(total, jax.Array):
      emit = ends & (sums.acc_weight != 0)
    steps = optax.safe_increment(state.gradient_step)
    after = after._replace(
      gradient_step=weighted_mean.select(emit, steps, state.gradient_step),
      skip_state=info,
      # Without gradients, as for an empty part of optax.partition, `inner` has nothing to step.
      has_updated=jnp.asarray(emit) & bool(jax.tree.leaves(updates)),
    )
    return MiniStep(call, sums, emit, after)

  def if_it_emits(
    self, step: MiniStep, run: Callable[..., Args], target
  ) -> tuple[Grads, Tree, AccumulateState]:
    """What `run` makes where the cycle emits, else what it is given, in the same buffers.

    That is the sum of gradients, the `target` of the updates (parameters, or spare buffers) and the
    state of `inner`. The last is returned in the state after this call.
    """

    # The conditional takes and returns sums in the shape that they are stored in, because XLA for
    # CPU copies what is reshaped after a loop.
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
      # A conditional changes no dtype, so the operand gets those of the results before it.
      operand = widened(run_stored, operand)
    total, target, inner_state = conditional.update_if(
      step.emit, run_stored, operand, scopes.END_OF_CYCLE, self.differentiable
    )
    total = self.devices.own(total)
    # With every_k=1, `kept` drops the sums, as the next call needs none.
    state = step.state._replace(
      acc_grads=self.calls.kept(total), inner_opt_state=inner_state
    )
    return total, target, state

  @jax.named_scope("optimizer")
  def run_inner(
    self, step: MiniStep, params, total, inner_state
  ) -> tuple[Grads, Grads, OptState]:
    """One step of `inner` on the cycle's gradient: its updates, and its next state.

    Where calls are added up, `total` is returned summed over devices, in the same buffers: the
    first call of the next cycle overwrites it.
    """
    call = step.call
    sums = step.sums

    # In float32 or wider: where no sums are kept, `accumulator_dtype` does not apply.
    def weighed(g):
      dtype = dtypes.accumulator_dtype(g.dtype)
      return weighted_mean.weigh(g, call.weight, dtype)

    if self.calls.every_k == 1:
      # Weighed in the conditional, and so without a buffer.
      terms = jax.tree.map(weighed, total)
      gradient = jax.tree.map(self.devices.sum, terms)
    else:
      total = jax.tree.map(self.devices.sum, total)
      gradient = total

    # `like` is the gradient or the loss of this call; the result has its dtype.
    def divided(weight, x, like):
      if self.reduction == "sum":
        return x.astype(like.dtype)
      return weighted_mean.mean(x, weight, like.dtype)

    of_cycle = functools.partial(divided, sums.acc_weight)
    reduced = jax.tree.map(of_cycle, gradient, call.updates)
    given: dict[str, Any] = {"grad": reduced}
    if call.loss is not None:
      given["value"] = divided(sums.value_weight, sums.acc_value, call.loss)
    value_fn = call.extra_args.get("value_fn")
    # With every_k=1 the rows of the call are those of the cycle.
    if self.calls.every_k != 1 and isinstance(value_fn, ValueOfOneCall):
      given["value_fn"] = refused
    # `given` replaces only what the caller passed by that name, and adds nothing.
    extra_args = {
      name: given.get(name, x) for name, x in call.extra_args.items()
    }
    if self.reduction == "mean" and states_in(inner_state):
      # An accumulation in `inner` counts this cycle as what it weighs. A sum has no weight.
      extra_args["weight"] = weighted_mean.as_weight(sums.acc_weight)
    try:
      new, new_state = self.inner.update(
        reduced, inner_state, params, **extra_args
      )
    except Exception as error:
      like = params
      # Gradients stand for parameters that the caller left out.
      if params is None:
        like = call.updates
      # This raises another error if the state is not as `init` makes it, and else nothing.
      checks.check_made(self.inner.init, like, inner_state, error)
      raise
    new_state = same_types("inner_opt_state", new_state, inner_state)
    return total, new, new_state


class AccumulateTransformation(optax.GradientTransformationExtraArgs):
  """An `optax.GradientTransformationExtraArgs`, the pair ``(init, update)``, with `apply`.

  Attributes:
    init: ``init(params) -> AccumulateState``.
    update: ``update(updates, state, params, *, weight=1.0, flush=False, **extra_args)``, which
      returns ``(updates, state)``: zeros, until a cycle ends.
  """

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
    # The `update` of this pair is the `Accumulation` itself.
    accumulation: Any = self.update
    # `trained` has None in the place of each parameter without a gradient.
    trained = checks.with_gradients(updates, params)
    step = accumulation.add(updates, state, trained, weight, flush, extra_args)

    # `update` and `optax.apply_updates`, with both inside the conditional.
    def run(total, trained, inner_state):
      total, new, inner_state = accumulation.run_inner(
        step, trained, total, inner_state
      )
      new = optax.apply_updates(trained, new)
      return total, same_types("params", new, trained), inner_state

    # The first result, the sums, is in the state already.
    _, trained, state = accumulation.if_it_emits(step, run, trained)
    # What has no gradient stays.
    params = combine(trained, params)
    return params, stored(state, accumulation.devices)
