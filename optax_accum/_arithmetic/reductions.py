"""The reductions of a function's outputs over microbatches and devices: one object for each.

An accumulator calls `start`, `add` with every microbatch, `join`, `over_devices` if rows are
sharded over an axis, and `finish`; `merge` joins what two accumulators have. Where one microbatch
is the whole batch, it calls `only`. The `state` of an output is what the loop carries of it.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  hoisting,
  weighted_mean,
)
from optax_accum._arithmetic.weighted_mean import Weight

Type: TypeAlias = jax.ShapeDtypeStruct  # of an output
# Makes one value of two values of an output, or of a tree of outputs.
MergeFn: TypeAlias = Callable[[Any, Any], Any]

# Where users name reductions, for messages.
_OPTIONS = "aux_reduction, carry_reduction, or reduction of microbatch"


class Reduction:
  """Combines the values that one output has in all microbatches."""

  name = ""
  ordered = False  # whether it matters which microbatch comes last
  # Whether every value is kept for `join`, and there is no state.
  collected = False
  is_default = False  # whether nobody asked for it

  def __repr__(self) -> str:
    return repr(self.name)

  def check(
    self, name: str, like: Type, rows: int, dtype: DTypeLike | None
  ) -> None:
    """Checks that outputs of a type, of `rows` rows, can be reduced, in `dtype` if given."""

  def start(self, like: Type, dtype: DTypeLike | None):
    """The state before the first microbatch."""
    return None

  def resumed(self, state):
    """The state that the loop begins with, after microbatches of other calls."""
    return state

  def unhoisted(self, state, shapes: hoisting.Shapes):
    """The state, such that XLA reduces arrays of these shapes over devices in the loop."""
    return hoisting.unhoisted(state, shapes)

  def add(self, state, value: jax.Array, weight: Weight, finite):
    """The state after one more microbatch. What has a weight of zero changes nothing.

    `finite` says whether gradients were found finite; True where nobody looked.
    """
    return state

  def join(self, state, collected, tail=None):
    """The state in the end; `tail` is what was collected of the smaller last one, or None."""
    return state

  def merge(self, first, second):
    """The state of the microbatches of two states."""
    return first

  def over_devices(self, state, devices):
    """The state of the microbatches of all devices."""
    return state

  def finish(self, state, weight: Weight, like: Type) -> jax.Array:
    """The reduced value, in the dtype of `like`; `weight` is the total over devices."""
    return state

  def only(self, value: jax.Array) -> jax.Array:
    """The reduced value where there is one microbatch, which counts."""
    return value


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Sum(Reduction):
  """The plain sum. Sums over devices come before the division, as weights do."""

  name = "sum"
  is_default: bool = False
  # Whether it is in float32 or better, whatever `accumulator_dtype` is.
  wide: bool = False
  # Whether values were weighed already.
  weighed: bool = False
  # Whether values are gradients. Those of weight zero are zero or not finite, unless the losses of
  # other devices depend on these rows; so `add` counts what is finite.
  of_gradients: bool = False
  # Sums over devices; where a device keeps a part of the sum, in another way. A field, so that it
  # is called without `self`.
  sum_over: Callable[..., jax.Array] = lambda state, devices: devices.sum(state)

  def check(self, name, like, rows, dtype):
    dtypes.check_holds(name, like.dtype, dtype)

  def start(self, like, dtype):
    if self.wide:
      dtype = None
    dtype = dtypes.accumulator_dtype(like.dtype, dtype)
    return across_devices.full_like(like, 0, dtype)

  def term(
    self, value: jax.Array, weight: Weight, dtype: DTypeLike
  ) -> jax.Array:
    """What one microbatch adds if it counts."""
    return value.astype(dtype)

  def add(self, state, value, weight, finite):
    counted = weighted_mean.counts(weight)
    if self.of_gradients:
      if finite is not True:
        # Somebody looked, so whether the gradients were found finite decides alone.
        counted = finite
      # A Python True says already when tracing that it counts.
      elif counted is not True:
        counted = counted | jnp.isfinite(value)
    # XLA for GPU keeps a second gradient where the term is selected and not the sum.
    total = state + self.term(value, weight, state.dtype)
    return weighted_mean.select(counted, total, state)

  def merge(self, first, second):
    return first + second

  def over_devices(self, state, devices):
    return self.sum_over(state, devices)

  def finish(self, state, weight, like):
    if dtypes.is_inexact(like):
      return state.astype(like.dtype)
    return state

  def only(self, value):
    if dtypes.is_inexact(value):
      return value
    return value.astype(dtypes.accumulator_dtype(value.dtype))


class Mean(Sum):
  """The weighted mean."""

  name = "mean"

  def check(self, name, like, rows, dtype):
    if not dtypes.is_inexact(like):
      raise TypeError(
        f'{name} has dtype {like.dtype}, which "mean" cannot keep: cast it to a float in the'
        ' function, or reduce it with "sum", "max", "min", "last", "stack" or "concat", in'
        f" {_OPTIONS}."
      )
    super().check(name, like, rows, dtype)

  def term(self, value, weight, dtype):
    if self.weighed:
      return value.astype(dtype)
    return weighted_mean.product(value, weight, dtype)

  def finish(self, state, weight, like):
    return weighted_mean.mean(state, weight, like.dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Fold(Reduction):
  """Two values become one, in the order of the microbatches: the largest, smallest or last value.

  The state is a value, and whether there is one yet: before, it is zeros, which do not count.
  """

  name: str
  fun: MergeFn
  ordered: bool = False

  def check(self, name, like, rows, dtype):
    # Complex numbers have no largest or smallest, but an ordered fold ("last") does not compare.
    if jnp.issubdtype(like.dtype, jnp.complexfloating) and not self.ordered:
      raise TypeError(
        f'{name} has dtype {like.dtype}, which has no {self!r}: use "mean" or "sum", in'
        f" {_OPTIONS}."
      )

  def start(self, like, dtype):
    zeros = across_devices.zeros_like(like)
    # The flag differs between devices as the values do, of which one tells.
    one, *_ = jax.tree.leaves(zeros)
    return zeros, across_devices.vary_like(jnp.asarray(False), one)

  def add(self, state, value, weight, finite):
    # One microbatch is a state too: its value, which is there if it counts.
    own = value, weighted_mean.counts(weight)
    return self.merge(state, own)

  def merge(self, first, second):
    a, has_a = first
    b, has_b = second
    # A value without a partner stands on both sides, and `merged` leaves it as it is.
    either = _where(has_b, b, a)
    one = _where(has_a, a, either)
    value = self.merged(has_a & has_b, one, either)
    return value, has_a | has_b

  def merged(self, has_both: jax.Array, one, other):
    """Both values as one. If there is only one, it stands on both sides and is the result."""
    return self.fun(one, other)

  def over_devices(self, state, devices):
    # Each device puts its state into its own place, and the sum over devices has all of them.
    numbers = jnp.arange(devices.size, dtype=jnp.int32)
    own = numbers == lax.axis_index(devices.axis_name)

    def gathered(x):
      # True in this device's place on a new first axis; the axes of `x` follow, of length 1.
      ones = [1] * x.ndim
      place = own.reshape(-1, *ones)
      return across_devices.of_one(x[None], devices.axis_name, place)

    def add(state, other):
      # None, since the scan collects nothing.
      return self.merge(state, other), None

    each = jax.tree.map(gathered, state)  # on a new first axis
    first = jax.tree.map(lambda x: x[0], each)
    others = jax.tree.map(lambda x: x[1:], each)
    # The devices merge in their order.
    merged, _ = lax.scan(add, first, others)
    return merged

  def finish(self, state, weight, like):
    value, _ = state
    return value


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Merge(Fold):
  """A function of the user that makes one value of two. A value may be a tree of arrays."""

  name: str = ""
  ordered: bool = True

  def __repr__(self) -> str:
    return getattr(self.fun, "__qualname__", repr(self.fun))

  def check(self, name, like, rows, dtype):
    # Shapes and dtypes alone: the function may change a sharding or a weak type.
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    merged = jax.eval_shape(self.fun, like, like)
    returned = f"what {self!r}(a, b) returned"
    _validate.check_alike(returned, name, merged, like)

  def add(self, state, value, weight, finite):
    value = jax.tree.map(_refusing_derivatives, value)
    return super().add(state, value, weight, finite)

  def merged(self, has_both, one, other):
    # A branch, and no selection: `fun` of zeros, or of padding, may be NaN, and so would be the
    # gradient of what it closes over, selected or not.
    # Where only one value is there, it stands on both sides, so either would do.
    return lax.cond(has_both, self.fun, lambda a, b: b, one, other)


class Stack(Reduction):
  """Every microbatch's value, on a new leading axis."""

  name = "stack"
  collected = True

  def join(self, state, collected, tail=None):
    if tail is None:
      return collected
    return jnp.concatenate([collected, tail[None]])

  def only(self, value):
    return value[None]


class Concat(Stack):
  """Every row's value, in the order of the batch, on the first axis of the output."""

  name = "concat"

  def check(self, name, like, rows, dtype):
    if like.shape[:1] != (rows,):
      raise ValueError(
        f'{name} has shape {like.shape}; "concat" needs the {rows} rows of a microbatch as its'
        ' leading axis: move them there by jnp.moveaxis, or use "stack" for one value per'
        " microbatch."
      )

  def join(self, state, collected, tail=None):
    # Microbatch i has rows i, i + N, ... of the batch, so the index is the fast axis.
    by_row = jnp.moveaxis(collected, 0, 1)
    rows = lax.collapse(by_row, 0, 2)
    if tail is None:
      return rows
    # The smaller last microbatch has the last rows of the batch.
    return jnp.concatenate([rows, tail])

  def only(self, value):
    return value


def _where(flag: bool | jax.Array, value, other):
  """One of two trees."""
  choose = functools.partial(weighted_mean.select, flag)
  return jax.tree.map(choose, value, other)


def refusing_derivatives(
  error: type[Exception], message: str
) -> Callable[[jax.Array], jax.Array]:
  """The identity, which raises this where it has a derivative."""
  identity = jax.custom_jvp(lambda x: x)

  @functools.partial(identity.defjvp, symbolic_zeros=True)
  def refuse(primals, tangents):
    # JAX gives a `SymbolicZero` where `x` depends on nothing that is differentiated.
    if not isinstance(tangents[0], SymbolicZero):
      raise error(message)
    # There is one of each: the value and its zero tangent.
    return *primals, *tangents

  return identity


# Of what a function of the user reduces.
_refusing_derivatives = refusing_derivatives(
  NotImplementedError,
  "An output that is reduced by a function of your own, merge(a, b), depends on what you"
  " differentiate: return jax.lax.stop_gradient of it, or reduce it by a word.",
)


def _second(a, b):
  """What "last" makes of two values."""
  return b


REDUCTIONS: dict[str, Reduction] = {
  "mean": Mean(),
  "sum": Sum(),
  "max": Fold(name="max", fun=jnp.maximum),
  "min": Fold(name="min", fun=jnp.minimum),
  "last": Fold(name="last", fun=_second, ordered=True),
  "stack": Stack(),
  "concat": Concat(),
}
