"""What one call of a streaming accumulation adds up, decides and runs."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_accum import _conditional, _reduce, _slots, _validate


class AccumulateState(NamedTuple):
  """State of `accumulate`; the first five fields are those of `optax.MultiStepsState`.

  Attributes:
    mini_step: int32 scalar, the mini steps counted in the present cycle; 0 after the last.
    gradient_step: int32 scalar, the steps that `inner` has taken. Never reset.
    inner_opt_state: the state of `inner`. Changes only when a cycle emits.
    acc_grads: pytree like the parameters, in the accumulators' dtypes: the weighted sum of
      the cycle's gradients so far. Not reset but overwritten by the first mini step of the
      next cycle: what it holds while `mini_step` is 0 is never read. ``()`` if ``every_k=1``.
    skip_state: what `skip_fn` returned beside its bool on the last call; ``()`` without it.
    acc_weight: float32 scalar (float64 where x64 is enabled), the sum of the cycle's weights
      so far, over all devices. 0 after the last mini step of a cycle.
    has_updated: bool scalar, whether the last call emitted. Set by every call.

  With `axis_name`, `acc_grads` and `skip_state` are those of one device, and their leaves have one
  more axis in front: of length 1 on each device, and of all devices where `jax.shard_map`
  returns them. All else is the same on all devices.
  """

  mini_step: jax.Array
  gradient_step: jax.Array
  inner_opt_state: optax.OptState
  acc_grads: chex.ArrayTree
  skip_state: chex.ArrayTree
  acc_weight: jax.Array
  has_updated: jax.Array


class _MiniStep(NamedTuple):
  """What one call adds up and decides, before any of `inner` runs."""

  total: optax.Updates  # the cycle's weighted sum of gradients on this device
  weight: _reduce.Weight  # the cycle's sum of weights, over all devices
  emit: bool | jax.Array
  state: AccumulateState  # the next state but for `inner_opt_state`


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
  """The functions that `accumulate` returns, and the arguments it was given."""

  inner: optax.GradientTransformationExtraArgs
  every_k: int | Callable[[jax.Array], chex.Numeric]
  reduction: str
  accumulator_dtype: chex.ArrayDType | None
  skip_fn: optax.ShouldSkipUpdateFunction | None
  axis_name: Any
  differentiable: bool

  def init(self, params: optax.Params) -> AccumulateState:
    """An empty cycle, and `inner`'s own state."""
    # One array a field: a state in which one zero stands twice cannot be donated.
    gradient_step = jnp.zeros((), jnp.int32)
    skip_state = ()
    if self.skip_fn is not None:
      like = jax.eval_shape(self._skip, _gradients_like(params), gradient_step, params)[1]
      skip_state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    state = AccumulateState(
      mini_step=jnp.zeros((), jnp.int32),
      gradient_step=gradient_step,
      inner_opt_state=self.inner.init(params),
      acc_grads=() if self.every_k == 1 else self._accumulators(params),
      skip_state=skip_state,
      acc_weight=jnp.zeros((), jnp.result_type(float)),
      has_updated=jnp.zeros((), jnp.bool_),
    )
    return self._stored(state)

  def update(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    *,
    weight: chex.Numeric = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    """Adds `updates` up; gives `inner`'s updates when the cycle emits, and zeros before."""
    step = self._add(updates, state, params, weight, flush)
    run = functools.partial(self._run_inner, step.weight, updates, params, extra_args)
    if step.emit is True:
      updates, inner_state = run(step.total, state.inner_opt_state)
      return updates, self._stored(step.state._replace(inner_opt_state=inner_state))

    like, _ = jax.eval_shape(run, step.total, state.inner_opt_state)
    slots, in_place = _slots.find(step.total, like)

    # The sum goes in and the updates come out in the same buffers.
    def emit(operand: Any) -> Any:
      slots, inner_state = operand
      new, inner_state = run(_slots.choose(in_place, slots, step.total), inner_state)
      return jax.tree.leaves(new), inner_state

    slots, inner_state = _conditional.update_if(
      step.emit, emit, (slots, state.inner_opt_state), self.differentiable
    )
    acc_grads = () if self.every_k == 1 else _slots.choose(in_place, slots, step.total)
    updates = jax.tree.unflatten(
      jax.tree.structure(like),
      [
        _reduce.select(step.emit, slot.astype(x.dtype), jnp.zeros_like(slot, x.dtype))
        for slot, x in zip(slots, jax.tree.leaves(like), strict=True)
      ],
    )
    state = step.state._replace(acc_grads=acc_grads, inner_opt_state=inner_state)
    return updates, self._stored(state)

  def apply(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params,
    *,
    weight: chex.Numeric = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[optax.Params, AccumulateState]:
    """`update` and `optax.apply_updates`, with both inside the conditional."""
    if params is None:
      raise ValueError("apply(updates, state, params) got params=None; it needs the parameters.")
    step = self._add(updates, state, params, weight, flush)

    def emit(operand: Any) -> Any:
      params, inner_state = operand
      new, inner_state = self._run_inner(
        step.weight, updates, params, extra_args, step.total, inner_state
      )
      return optax.apply_updates(params, new), inner_state

    params, inner_state = _conditional.update_if(
      step.emit, emit, (params, state.inner_opt_state), self.differentiable
    )
    return params, self._stored(step.state._replace(inner_opt_state=inner_state))

  def _add(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None,
    weight: chex.Numeric,
    flush: bool | jax.Array,
  ) -> _MiniStep:
    """Adds one microbatch's gradients, and decides whether the cycle emits."""
    self._check_accumulator(updates, state)
    if self.axis_name is not None:
      _check_local(updates, self.axis_name)
      state = _map_local(_own, state)
    _validate.weight("The caller of update", weight)
    # A weight that is known and not zero settles that the cycle's total is not zero either.
    if not isinstance(weight, (int, float)) or weight == 0:
      weight = _reduce.as_weight(weight).astype(state.acc_weight.dtype)
    flush = _validate.flush(flush)
    skip: bool | jax.Array = False
    skip_state = state.skip_state
    if self.skip_fn is not None:
      skip, info = self._skip(updates, state.gradient_step, params)
      if isinstance(weight, jax.Array):  # what has no weight may be NaN, and is not skipped for it
        skip = skip & _reduce.counts(weight)
      skip_state = jax.tree.map(lambda x, old: x.astype(old.dtype), info, skip_state)

    skip, flush, new = self._agree(skip, flush, weight, state.acc_weight.dtype)
    if not isinstance(skip, bool):
      weight = jnp.where(skip, 0, weight).astype(state.acc_weight.dtype)
      new = jnp.where(skip, 0, new).astype(state.acc_weight.dtype)
    mini_step, done = self._count(state, skip, flush)
    emit = done & (state.acc_weight + new != 0) if isinstance(new, jax.Array) else done
    total, total_weight = self._sum(updates, state, weight, new)

    state = state._replace(
      gradient_step=_reduce.select(
        emit, optax.safe_increment(state.gradient_step), state.gradient_step
      ),
      skip_state=skip_state,
      has_updated=jnp.asarray(emit),
    )
    if self.every_k != 1:
      state = state._replace(
        mini_step=jnp.where(done, 0, mini_step),
        acc_grads=total,
        acc_weight=jnp.where(done, jnp.zeros_like(total_weight), total_weight),
      )
    return _MiniStep(total, total_weight, emit, state)

  def _agree(
    self,
    skip: bool | jax.Array,
    flush: bool | jax.Array,
    weight: _reduce.Weight,
    dtype: chex.ArrayDType,
  ) -> tuple[bool | jax.Array, bool | jax.Array, _reduce.Weight]:
    """What the devices decide together: any that skips or flushes, and their sum of weights."""
    if self.axis_name is None:
      return skip, flush, weight
    values = (skip, flush, weight)
    traced = [jnp.asarray(x).astype(dtype) for x in values if isinstance(x, jax.Array)]
    if traced:  # one reduction, of up to three numbers
      local = _reduce.varying(jnp.stack(traced), self.axis_name)
      sums = iter(lax.psum(local, self.axis_name))
    return (
      next(sums) > 0 if isinstance(skip, jax.Array) else skip,
      next(sums) > 0 if isinstance(flush, jax.Array) else flush,
      next(sums) if isinstance(weight, jax.Array) else weight * lax.axis_size(self.axis_name),
    )

  def _count(
    self, state: AccumulateState, skip: bool | jax.Array, flush: bool | jax.Array
  ) -> tuple[jax.Array, bool | jax.Array]:
    """The counted mini steps, and whether the cycle is over."""
    counted = jnp.logical_not(skip)
    if self.every_k == 1:
      return state.mini_step, True if skip is False else counted
    mini_step = state.mini_step + counted.astype(jnp.int32)
    schedule = self.every_k
    k = _validate.cycle_length(schedule(state.gradient_step)) if callable(schedule) else schedule
    return mini_step, (counted & (mini_step >= k)) | (flush & (mini_step > 0))

  def _sum(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    weight: _reduce.Weight,
    new: _reduce.Weight,
  ) -> tuple[optax.Updates, _reduce.Weight]:
    """The cycle's weighted sum of gradients on this device, and of weights on all devices.

    `weight` is what the microbatch of this device counts, and `new` those of all.
    """
    if self.every_k != 1:
      self._check(updates, state.acc_grads)
      first = state.mini_step == 0
      # The first mini step overwrites: selecting is free where zeroing after the cycle costs
      # a pass over the accumulators, and an inf cannot get past it.
      total = jax.tree.map(
        lambda acc, g: jnp.where(first, 0, acc) + _reduce.weigh(g, weight, acc.dtype),
        state.acc_grads,
        updates,
      )
      return total, state.acc_weight + new
    if self.axis_name is None:
      if self.reduction == "mean":
        return updates, 1.0
      return jax.tree.map(lambda g: _reduce.weigh(g, weight, g.dtype), updates), new
    if self.reduction == "mean" and isinstance(weight, (int, float)):
      weight, new = 1.0, lax.axis_size(self.axis_name)
    total = jax.tree.map(
      lambda g: _reduce.weigh(
        g, weight, _reduce.accumulator_dtype(g.dtype, self.accumulator_dtype)
      ),
      updates,
    )
    return total, new

  def _run_inner(
    self,
    weight: _reduce.Weight,
    updates: optax.Updates,
    params: optax.Params | None,
    extra_args: dict[str, Any],
    total: optax.Updates,
    inner_state: optax.OptState,
  ) -> tuple[optax.Updates, optax.OptState]:
    """One step of `inner` on the cycle's gradient, in the dtypes of one microbatch's."""
    if self.axis_name is not None:
      total = jax.tree.map(lambda x: _reduce.across_devices("mean", x, self.axis_name), total)
    if self.reduction == "sum":
      weight = 1.0
    reduced = jax.tree.map(lambda x, g: _reduce.mean(x, weight, g.dtype), total, updates)
    return self.inner.update(reduced, inner_state, params, **extra_args)

  def _skip(
    self, updates: optax.Updates, gradient_step: jax.Array, params: optax.Params | None
  ) -> tuple[jax.Array, chex.ArrayTree]:
    assert self.skip_fn is not None
    skip, info = _validate.skip(self.skip_fn(updates, gradient_step, params))
    return skip, jax.tree.map(jnp.asarray, info)

  def _accumulators(self, params: optax.Params) -> chex.ArrayTree:
    def zeros(path: Any, leaf: jax.Array) -> jax.Array:
      name, dtype = _validate.leaf_name("params", path), jnp.result_type(leaf)
      _validate.holds_dtype(name, dtype, self.accumulator_dtype)
      return _zeros_like(leaf, _reduce.accumulator_dtype(dtype, self.accumulator_dtype))

    return jax.tree_util.tree_map_with_path(zeros, _gradients_like(params))

  def _stored(self, state: AccumulateState) -> AccumulateState:
    """`state` with an axis of devices in front of what each of them has for itself."""
    if self.axis_name is None:
      return state
    state = _map_local(lambda x: jnp.expand_dims(x, 0), state)
    if not _validate.is_bound(self.axis_name):
      return state
    return _map_local(lambda x: _reduce.varying(x, self.axis_name), state)

  def _check_accumulator(self, updates: optax.Updates, state: AccumulateState) -> None:
    """Checks that the state is of an `every_k` like this one: 1, or not."""
    accumulates = bool(jax.tree.leaves(state.acc_grads))
    if jax.tree.leaves(updates) and accumulates != (self.every_k != 1):
      raise ValueError(
        f"every_k={self.every_k!r}, and the state {'has' if accumulates else 'lacks'} an"
        f" accumulator, because it was made with every_k {'above' if accumulates else 'of'} 1:"
        " end the cycle with the old every_k and flush=True, and replace acc_grads by that of a new"
        " init."
      )

  def _check(self, updates: optax.Updates, acc_grads: optax.Updates) -> None:
    """Checks the gradients against the accumulators that `init` made."""
    _validate.same_tree("updates", updates, acc_grads, "the parameters that init was given")
    accs = jax.tree.leaves(acc_grads)
    paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, g), acc in zip(paths, accs, strict=True):
      _validate.accumulates(
        _validate.leaf_name("updates", path), g.dtype, acc.dtype, self.accumulator_dtype
      )


def _gradients_like(params: optax.Params) -> optax.Updates:
  # optax.lookahead steps two copies of the parameters by the gradients of one.
  return params.fast if isinstance(params, optax.LookaheadParams) else params


def _map_local(fun: Callable[[jax.Array], jax.Array], state: AccumulateState) -> AccumulateState:
  """`state`, with `fun` applied to what `axis_name` leaves to each device."""
  acc_grads, skip_state = jax.tree.map(fun, (state.acc_grads, state.skip_state))
  return state._replace(acc_grads=acc_grads, skip_state=skip_state)


def _own(x: jax.Array) -> jax.Array:
  """What this device stored."""
  if x.shape[:1] != (1,):
    raise ValueError(
      f"acc_grads or skip_state has a leaf of shape {x.shape} on a device; with axis_name it starts"
      " with an axis of length 1, as init makes it: in jax.shard_map, run init and update with the"
      " specs of optax_accum.accumulate_specs."
    )
  return jnp.squeeze(x, 0)


def _zeros_like(leaf: jax.Array, dtype: chex.ArrayDType) -> jax.Array:
  """Zeros that are sharded as `leaf`, also under jit."""
  if not isinstance(leaf, jax.core.Tracer):
    return jnp.zeros_like(leaf, dtype)
  # The compiler shards results after the arguments that they are computed from. Zeros that are
  # computed from nothing end up on one device, or in whole on each.
  no = lax.optimization_barrier(jnp.zeros((), jnp.bool_))
  return jnp.where(no, leaf.astype(dtype), jnp.zeros((), dtype))


def _check_local(updates: optax.Updates, axis_name: Any) -> None:
  """Checks that gradients were not reduced over the devices yet, where the types say so."""
  _validate.bound_axis(axis_name)
  # Types say which axes a value varies over in shard_map with check_vma=True, and nowhere else.
  known = _reduce.varying_axes(_reduce.varying(jnp.zeros(()), axis_name))
  leaves = jax.tree.leaves(updates)
  missing = known.difference(*map(_reduce.varying_axes, leaves))
  if leaves and missing:
    raise ValueError(
      f"The gradients are the same on all devices of the axes {sorted(missing)} of"
      f" axis_name={axis_name!r}, so they were reduced in this microbatch, and accumulate would"
      " reduce them again. Gradients of parameters that are the same on all devices are *summed*"
      " by JAX: differentiate with respect to"
      f' jax.lax.pcast(params, {axis_name!r}, to="varying"), and leave lax.pmean out.'
    )
