"""The scan: one call's function, run microbatch by microbatch and reduced."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _reduce, _reductions
from optax_accum._split import Call, Split


class MicrobatchStats(NamedTuple):
  """What a cycle counted."""

  total_weight: jax.Array  # float32 scalar: the sum of the weights that went into the mean
  skipped_microbatches: jax.Array  # int32 scalar: left out because they were not finite


class _State(NamedTuple):
  carry: tuple[Any, ...]  # the threaded argument; empty where there is none
  held: dict[int, jax.Array]  # partial reductions
  weight: jax.Array | None  # total so far; None where it is known when tracing
  skipped: jax.Array | None  # count so far; None where nothing can be skipped


class _Step(NamedTuple):
  carry: tuple[Any, ...]
  outputs: Any
  weight: jax.Array | None
  skipped: jax.Array | None


def run_cycle(
  call: Call,
  reduction: Any,
  *,
  root: str = "output",
  finite: Callable[[Any], Any] | None = None,
  spread: Any = None,
) -> tuple[Any, Any, MicrobatchStats]:
  """Runs the call's function, which returns ``(new_carry, outputs)``, by microbatches.

  Args:
    call: The function, its arguments, and how they are split.
    reduction: Prefix tree over the outputs, of names in `_reduce.REDUCTIONS`.
    root: What messages call the outputs.
    finite: The part of the outputs that ``skip_nonfinite`` looks at.
    spread: Prefix tree over the outputs, of `_reductions.Spread`: how devices share them.

  Returns:
    The last carry, the reduced outputs, and the `MicrobatchStats`.
  """
  split = call.split
  full, tail_rows = divmod(call.rows, call.size)
  if call.rows == call.size and not split.weighs and split.axis_name is None:
    carry, outputs = call.run(0, call.carry, call.batch)
    reduce = _reductions.Reductions(reduction, outputs, root, call.size)
    reduce.check_accumulators(split.accumulator_dtype)
    return carry, reduce.only(outputs), _stats(split, 1, None, call.size)

  def one(index: chex.Numeric, carry: Any, batch: Any, rows: int) -> _Step:
    carry, outputs = call.run(index, carry, batch)
    if not split.weighs:
      return _Step(carry, outputs, None, None)
    weight, skipped = call.weight(batch, rows), None
    if split.skip_nonfinite:
      ok = _reduce.all_finite(outputs if finite is None else finite(outputs))
      skipped = jnp.logical_not(ok) & _reduce.counts(weight)  # padding is not broken
      skipped = skipped.astype(jnp.int32)
      weight = jnp.where(ok, weight, jnp.zeros_like(weight))
    return _Step(carry, outputs, weight, skipped)

  def absorb(state: _State, index: chex.Numeric, batch: Any, rows: int) -> tuple[_State, Any]:
    new = one(index, state.carry, batch, rows)
    weight = rows / call.size if new.weight is None else new.weight
    keep = functools.partial(_reduce.select, _reduce.counts(weight))
    with jax.named_scope("accumulate"):
      held, collected = reduce.step(state.held, new.outputs, weight)
      totals = jax.tree.map(jnp.add, state[2:], new[2:])
      return _State(jax.tree.map(keep, new.carry, state.carry), held, *totals), collected

  take, tail = call.microbatches(full)
  like = jax.eval_shape(lambda: one(0, call.carry, take(0), call.size))
  reduce = _reductions.Reductions(reduction, like.outputs, root, call.size, split.axis_name, spread)
  held = reduce.start(split.accumulator_dtype)
  state = _State(call.carry, held, *jax.tree.map(lambda x: _reduce.full_like(x, 0), like[2:]))
  # With the smaller microbatch first its backward pass does not run beside a full sum.
  tail_first = not call.carry and "last" not in reduce.kinds
  last = None
  with jax.named_scope("microbatches"):
    if tail_rows:
      reduce.check_tail(jax.eval_shape(lambda: one(0, call.carry, tail, tail_rows)).outputs)
    if tail_rows and tail_first:
      state, last = absorb(state, full, tail, tail_rows)
    state, collected = lax.scan(
      lambda state, index: absorb(state, index, take(index), call.size),
      state,
      jnp.arange(full, dtype=jnp.int32),
      unroll=split.unroll,
    )
    if tail_rows and not tail_first:
      state, last = absorb(state, full, tail, tail_rows)
  carry, skipped = state.carry, state.skipped
  weight = full + tail_rows / call.size if state.weight is None else state.weight
  counted = _reduce.counts(weight)
  if split.axis_name is not None:
    weight, skipped = lax.psum((weight, skipped), split.axis_name)
    carry = jax.tree.map(functools.partial(_device_mean, axis_name=split.axis_name), carry)
  outputs = reduce.finish(state.held, collected, last, weight, counted)
  return carry, outputs, _stats(split, weight, skipped, call.size)


def _stats(
  split: Split, weight: chex.Numeric, skipped: jax.Array | None, size: int
) -> MicrobatchStats:
  if not split.weighs:  # weights were counted in microbatches, not in rows
    weight = weight * size
  return MicrobatchStats(
    jnp.asarray(weight, jnp.float32),
    jnp.zeros((), jnp.int32) if skipped is None else skipped,
  )


def _device_mean(x: jax.Array, axis_name: Any) -> jax.Array:
  """The mean over devices of a threaded value; of integers (step counts) the largest."""
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return lax.pmax(x, axis_name)
  total = _reduce.across_devices("mean", x.astype(_reduce.accumulator_dtype(x.dtype)), axis_name)
  return _reduce.mean(total, lax.axis_size(axis_name), x.dtype)
