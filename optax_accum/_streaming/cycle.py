"""What `accumulate` returns: adds gradients up, decides when a cycle ends, and runs `inner`."""

from collections.abc import Callable, Collection
import contextvars
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import optax

from optax_accum import _scopes, _validate
from optax_accum._arithmetic import (
  across_devices,
  conditional,
  dtypes,
  weighted_mean,
)
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.conditional import Flag
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.skip import asks_to_skip, SkipFn
from optax_accum._arithmetic.trees import (
  Grads,
  Kwargs,
  Leaf,
  OptState,
  Path,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight, WeightSum
from optax_accum._streaming import checks
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
Result = TypeVar("Result")
# The mini steps in a cycle, an integer of at least 1, from the steps taken before it.
Schedule: TypeAlias = Callable[[jax.Array], ArrayLike]

# For an error only: where a transformation in between drops extra arguments, `accumulate` sees its
# defaults. Each call would count the same, and one that counts nothing would end a cycle.
_sent: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar(
  "sent", default=()
)


def sending(names: Collection[str], step: Callable[[], Result]) -> Result:
  """What `step` returns, which gives these extra arguments to a transformation."""
  context = contextvars.copy_context()
  context.run(_sent.set, names)
  return context.run(step)


class MiniStep(NamedTuple):
  """What one call adds up and decides, before `inner` runs."""

  updates: Grads  # of this call, as arrays
  total: Grads  # the cycle's weighted sum of gradients on this device
  divisor: (
    Weight  # what `total` is divided by, once it is summed over the devices
  )
  cycle_weight: Weight  # the cycle's sum of weights, over all devices
  value: Weight  # the cycle's weighted sum of ``value=``, over all devices
  value_weight: Weight  # the sum of the weights of the calls with one
  emit: Flag  # whether `inner` steps in this call
  state: (
    AccumulateState  # the next state but for `acc_grads` and `inner_opt_state`
  )


@dataclasses.dataclass(eq=False, repr=False)
class Accumulation:
  """The `update` of `accumulate`. With ``every_k=1`` it keeps nothing between calls."""

  inner: optax.GradientTransformationExtraArgs
  every_k: int | Schedule
  reduction: Reduction  # over the cycle's microbatches and the devices
  accumulator_dtype: DTypeLike | None
  skip_fn: SkipFn | None
  axis_name: AxisName | None
  differentiable: bool

  def init(self, params: Params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    if self.axis_name is not None:
      checks.check_whole(params, self.axis_name)
    # `optax.lookahead` steps two copies of the parameters by the gradients of one.
    grads = params.fast if isinstance(params, optax.LookaheadParams) else params
    # One array a field: a state in which one zero stands twice cannot be donated.
    gradient_step = jnp.zeros((), jnp.int32)
    skip_state: Tree = ()
    if self.skip_fn is not None:
      asked = functools.partial(asks_to_skip, self.skip_fn)
      info = jax.eval_shape(asked, grads, gradient_step, params)[1]
      skip_state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)
    state = AccumulateState(
      mini_step=jnp.zeros((), jnp.int32),
      gradient_step=gradient_step,
      inner_opt_state=self.inner.init(params),
      acc_grads=()
      if self.every_k == 1
      else jax.tree.map_with_path(self._accumulator, grads),
      skip_state=skip_state,
      acc_weight=jnp.zeros((), jnp.result_type(float)),
      has_updated=jnp.zeros((), jnp.bool_),
      weight_rest=jnp.zeros((), jnp.result_type(float)),
      acc_value=jnp.zeros((), jnp.result_type(float)),
      value_weight=jnp.zeros((), jnp.result_type(float)),
    )
    return stored(state, self.axis_name)

  def _accumulator(self, path: Path, param: Leaf) -> jax.Array:
    """Zeros to add up gradients in, sharded as their parameter, also under jit."""
    dtype = jnp.result_type(param)
    dtypes.check_holds(
      _validate.leaf_name("params", path), dtype, self.accumulator_dtype
    )
    dtype = dtypes.accumulator_dtype(dtype, self.accumulator_dtype)
    if not isinstance(param, jax.core.Tracer):
      return jnp.zeros_like(param, dtype)
    # The compiler shards results as the arguments that they are computed from. Zeros that are
    # computed from nothing end up on one device, or replicated.
    no = lax.optimization_barrier(jnp.zeros((), jnp.bool_))
    return jnp.where(no, param.astype(dtype), jnp.zeros((), dtype))

  def __call__(
    self,
    updates: Grads,
    state: AccumulateState,
    params: Params | None = None,
    *,
    weight: ArrayLike = 1.0,
    flush: Flag = False,
    _may_end: Flag
    | None = None,  # of a step: does anything of its batch count?
    **extra_args: Any,
  ) -> tuple[Grads, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    updates, params = checks.checked(
      "update", updates, state, params, extra_args
    )
    step = self._add(
      updates, state, params, weight, flush, _may_end, extra_args
    )
    run = functools.partial(self._run_inner, step, extra_args, params)
    if step.emit is True:
      updates, total, inner_state = run(step.total, state.inner_opt_state)
      return updates, self._next(step, total, inner_state)

    traced = jax.jit(
      run, inline=True
    )  # once, for the types of updates and for the conditional
    like = jax.eval_shape(traced, step.total, state.inner_opt_state)[0]
    # Where they can, sums go in and updates come out in the same buffers.
    shared = conditional.OutputBuffers(step.total, like)

    def emitted(
      total: Grads, carry: tuple[Grads, OptState]
    ) -> tuple[Grads, Any]:
      new, total, inner_state = traced(total, carry[1])
      total, spare = shared.filled(new, total)
      return total, (spare, inner_state)

    carry = (shared.spare, state.inner_opt_state)
    total, (spare, inner_state) = self._if_it_emits(step, emitted, carry)
    return shared.updates(total, spare, step.emit), self._next(
      step, total, inner_state
    )

  def apply(
    self,
    updates: Grads,
    state: Any,
    params: Params,
    weight: Any,
    flush: Flag,
    extra_args: Kwargs,
  ) -> tuple[Params, AccumulateState]:
    """`update` and `optax.apply_updates`, with both inside the conditional."""
    if params is None:
      raise ValueError(
        "apply(updates, state, params) got params=None; it needs the parameters."
      )
    given = params
    updates, params = checks.checked(
      "apply", updates, state, params, extra_args
    )
    step = self._add(updates, state, given, weight, flush, None, extra_args)

    def emitted(
      total: Grads, carry: tuple[Params, OptState]
    ) -> tuple[Grads, Any]:
      old, inner_state = carry
      new, total, inner_state = self._run_inner(
        step, extra_args, old, total, inner_state
      )
      return total, (
        same_types("params", optax.apply_updates(old, new), params),
        inner_state,
      )

    carry = (params, state.inner_opt_state)
    total, (params, inner_state) = self._if_it_emits(step, emitted, carry)
    # What has no gradient stays.
    params = jax.tree.map(
      lambda x, new: x if new is None else new, given, params
    )
    return params, self._next(step, total, inner_state)

  def _if_it_emits(
    self,
    step: MiniStep,
    fun: Callable[[Grads, Carry], tuple[Grads, Carry]],
    carry: Carry,
  ) -> tuple[Grads, Carry]:
    """``fun(step.total, carry)`` where the cycle emits, and else the two, in the same buffers."""
    axis_name = self.axis_name

    def run(operand: tuple[Grads, Carry]) -> tuple[Grads, Carry]:
      total, carry = fun(without_device_axis(operand[0], axis_name), operand[1])
      return with_device_axis(total, axis_name), carry

    if (
      step.emit is not True
    ):  # `fun` is traced once, for types and for the conditional
      fun = jax.jit(fun, inline=True)
      carry = widened(lambda carry: fun(step.total, carry)[1], carry)
    # In the shape that they are stored in: XLA for CPU copies what is reshaped after a loop.
    operand = (with_device_axis(step.total, axis_name), carry)
    scope = _scopes.END_OF_CYCLE
    total, carry = conditional.update_if(
      step.emit, run, operand, scope, self.differentiable
    )
    return without_device_axis(total, axis_name), carry

  def _run_inner(
    self,
    step: MiniStep,
    extra_args: Kwargs,
    params: Params | None,
    total: Grads,
    inner_state: OptState,
  ) -> tuple[Grads, Grads, OptState]:
    """One step of `inner` on the cycle's gradient, in the dtypes of one microbatch's.

    Sums over devices are returned in place of `total`, in its buffers: nothing reads it again.
    """
    kind, axis_name, weight = self.reduction, self.axis_name, step.divisor
    with jax.named_scope("optimizer"):
      if axis_name is not None:
        total = jax.tree.map(
          lambda x: kind.over_devices(x, axis_name, True), total
        )
      reduced = jax.tree.map(
        lambda x, g: kind.finish(x, weight, g).astype(g.dtype),
        total,
        step.updates,
      )
      extra_args = self._of_cycle(step, reduced, extra_args)
      # An accumulation in `inner` counts this cycle as what it weighs. A sum has no weight.
      sends = kind.name == "mean" and bool(states_in(inner_state))
      if sends:
        extra_args = {
          **extra_args,
          "weight": weighted_mean.as_weight(step.cycle_weight),
        }
      like = (
        step.updates
        if params is None
        else checks.with_gradients(step.updates, params)
      )

      update = functools.partial(
        self.inner.update, reduced, inner_state, params, **extra_args
      )
      run = functools.partial(sending, ["weight"] * sends, update)
      new, new_state = updated(
        "inner_opt_state", self.inner.init, like, inner_state, run
      )
    return new, total, new_state

  def _of_cycle(
    self, step: MiniStep, reduced: Grads, extra_args: Kwargs
  ) -> Kwargs:
    """The extra arguments of a call, where they are of its rows alone replaced by the cycle's."""
    is_mean = self.reduction.name == "mean"
    if self.every_k == 1 and is_mean and self.axis_name is None:
      return extra_args
    of_cycle: dict[str, Any] = {"grad": reduced}
    like: Any = checks.checked_value(extra_args)
    if like is not None:
      of_cycle["value"] = self.reduction.finish(
        step.value, step.value_weight, like
      )
    if self.every_k != 1 and isinstance(
      extra_args.get("value_fn"), ValueOfOneCall
    ):
      of_cycle["value_fn"] = _refused_value_fn
    return {name: of_cycle.get(name, x) for name, x in extra_args.items()}

  def _next(
    self, step: MiniStep, total: Grads, inner_state: OptState
  ) -> AccumulateState:
    kept = () if self.every_k == 1 else total
    state = step.state._replace(acc_grads=kept, inner_opt_state=inner_state)
    return stored(state, self.axis_name)

  @jax.named_scope("accumulate")
  def _add(
    self,
    updates: Grads,
    state: AccumulateState,
    params: Params | None,
    weight: ArrayLike,
    flush: Flag,
    may_end: Flag | None,
    extra_args: Kwargs,
  ) -> MiniStep:
    """Adds one microbatch's gradients up, and decides whether the cycle emits."""
    _check_arrived(
      weight=not isinstance(weight, float), _may_end=may_end is not None
    )
    checks.check_state(state, updates, self.every_k, self.skip_fn is not None)
    if self.axis_name is not None:
      checks.check_not_reduced(updates, self.axis_name)
      checks.check_whole(params, self.axis_name)
    acc_grads = without_device_axis(state.acc_grads, self.axis_name)
    skip_state = without_device_axis(
      state.skip_state, self.axis_name, "skip_state"
    )
    weighted_mean.check_weight("The caller of update", weight)
    # A weight that is known and not zero settles that the cycle's total is not zero either.
    dtype = state.acc_weight.dtype
    if isinstance(weight, (int, float)) and weight != 0:
      local: Weight = float(weight)
    else:
      local = weighted_mean.as_weight(weight).astype(dtype)
    flush = checks.checked_flush(flush)
    skip: Flag = False
    if self.skip_fn is not None:
      skip, info = asks_to_skip(
        self.skip_fn, updates, state.gradient_step, params
      )
      if isinstance(
        local, jax.Array
      ):  # what has no weight may be NaN: no cause to skip
        skip = skip & weighted_mean.counts(local)
      checks.check_info(info, skip_state)
      info = jax.tree.map(lambda x, old: x.astype(old.dtype), info, skip_state)
      state = state._replace(skip_state=info)
    value = checks.checked_value(extra_args)
    term = 0.0 if value is None else weighted_mean.weigh(value, local, dtype)
    skip, flush, local, over_devices, term = self._agree(
      skip, flush, local, term, dtype
    )
    value_weight = 0.0 if value is None else over_devices

    if self.every_k == 1:
      total, divisor = self._of_one(updates, local, over_devices)
      cycle_weight, ends = (
        over_devices,
        True if skip is False else jnp.logical_not(skip),
      )
    else:
      checks.check_gradients(updates, acc_grads, self.accumulator_dtype)
      first = state.mini_step == 0

      # The first mini step overwrites: selecting is free where zeroing after the cycle costs
      # a pass over the accumulators, and an inf cannot get past it.
      def added(acc: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.where(first, 0, acc) + weighted_mean.weigh(
          g, local, acc.dtype
        )

      total = jax.tree.map(added, acc_grads, updates)
      held = state.acc_value, state.value_weight
      before = (jnp.where(first, 0, jnp.asarray(x, dtype)) for x in held)
      term, value_weight = (
        x + y for x, y in zip(before, (term, value_weight), strict=True)
      )
      weight_sum = WeightSum(
        state.acc_weight, jnp.asarray(state.weight_rest, dtype)
      )
      weight_sum = weight_sum.add(jnp.asarray(over_devices, dtype))
      divisor = cycle_weight = weight_sum.total

      counted = jnp.logical_not(skip)
      mini_step = state.mini_step + counted.astype(jnp.int32)
      k: Any = self.every_k
      k = checks.checked_k(k(state.gradient_step)) if callable(k) else k
      ends = (counted & (mini_step >= k)) | (flush & (mini_step > 0))
      ends = ends if may_end is None else ends & may_end
      sums = {"acc_weight": weight_sum.total, "weight_rest": weight_sum.rest}
      sums |= {"acc_value": term, "value_weight": value_weight}
      kept = jax.tree.map(lambda x: jnp.where(ends, jnp.zeros_like(x), x), sums)
      state = state._replace(mini_step=jnp.where(ends, 0, mini_step), **kept)

    emit = ends
    if isinstance(over_devices, jax.Array):  # else it is not 0
      emit = emit & (cycle_weight != 0)
    gradient_step = optax.safe_increment(state.gradient_step)
    state = state._replace(
      gradient_step=weighted_mean.select(
        emit, gradient_step, state.gradient_step
      ),
      has_updated=jnp.asarray(emit) & bool(jax.tree.leaves(updates)),
    )
    return MiniStep(
      updates, total, divisor, cycle_weight, term, value_weight, emit, state
    )

  def _agree(
    self,
    skip: Flag,
    flush: Flag,
    local: Weight,
    value: Weight,
    dtype: DTypeLike,
  ) -> tuple[Flag, Flag, Weight, Weight, Weight]:
    """Skip, flush (any device's is all devices'), the weight here and on all, the value on all."""
    total = local
    if self.axis_name is not None:
      values = enumerate((skip, flush, local, value))
      traced = {
        i: jnp.asarray(x).astype(dtype)
        for i, x in values
        if isinstance(x, jax.Array)
      }
      if traced:  # one reduction, of up to four numbers
        stacked = across_devices.varying(
          jnp.stack([*traced.values()]), self.axis_name
        )
        traced = dict(
          zip(traced, lax.psum(stacked, self.axis_name), strict=True)
        )
      skip, flush = (
        traced[i] > 0 if i in traced else x for i, x in enumerate((skip, flush))
      )
      total = (
        traced[2] if 2 in traced else local * lax.axis_size(self.axis_name)
      )
      value = traced.get(3, value)
    if isinstance(skip, jax.Array):
      sums = (local, total, value)
      local, total, value = (jnp.where(skip, 0, x).astype(dtype) for x in sums)
    return skip, flush, local, total, value

  def _of_one(
    self, updates: Grads, local: Weight, over_devices: Weight
  ) -> tuple[Grads, Weight]:
    """The sum and the divisor of a cycle of one call."""
    mean = self.reduction.name == "mean"
    if mean and self.axis_name is None:
      if not isinstance(local, jax.Array):
        return updates, 1.0
      out_of_range = (
        10 * weighted_mean.MOST_IN_TOTAL
      )  # shows, as in a longer cycle
      return updates, jnp.where(weighted_mean.usable(local), 1.0, out_of_range)
    if mean and not isinstance(local, jax.Array):
      local, over_devices = 1.0, lax.axis_size(self.axis_name)

    def weighed(g: jax.Array) -> jax.Array:
      wide = dtypes.accumulator_dtype(g.dtype, self.accumulator_dtype)
      return weighted_mean.weigh(
        g, local, g.dtype if self.axis_name is None else wide
      )

    return jax.tree.map(weighed, updates), over_devices


class ValueOfOneCall(functools.partial[Any]):
  """The `value_fn` that a step makes: the loss of the rows of its call."""


def _refused_value_fn(*args: Any, **kwargs: Any) -> Any:
  raise NotImplementedError(
    "The optimizer within accumulate calls value_fn, as line searches do, and that of a step is the"
    " loss of the rows of one call, not of the cycle. Take the step in one call, of all rows:"
    " optax_accum.make_train_step(loss_fn, inner, num_microbatches=every_k * N)."
  )


def _check_arrived(**arrived: bool) -> None:
  """Checks that no transformation around this one dropped what was sent to it."""
  if any(name in _sent.get() and not there for name, there in arrived.items()):
    raise ValueError(
      "accumulate did not get all that was passed to the optimizer: a transformation around it"
      " drops extra arguments, such as the weight. Let the update of that one take **extra_args and"
      " pass them all on, or put accumulate around it. If it passes weight=1.0, so that every call"
      " counts the same, let it pass weight=jnp.asarray(1.0)."
    )
