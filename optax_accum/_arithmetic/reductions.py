"""The reductions of a function's outputs over microbatches and devices: one object for each.

A loop calls `start`, `add` with every microbatch, `join`, `over_devices` if rows are sharded over
an axis, and `finish`. Where one microbatch is the whole batch, it calls `only`. What is `held` of
an output is what the loop carries of it from one microbatch to the next.
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
# What all devices hold together, from what is held, the devices, and whether this one had a
# microbatch that counts.
OverDevices: TypeAlias = Callable[..., Any]

# Where users name reductions, for messages.
_OPTIONS = (
  "aux_reduction, grad_reduction, carry_reduction, grad_metrics_reduction, or reduction of"
  " microbatch"
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Reduction:
  """Combines the values that one output has in all microbatches."""

  name = ""
  ordered = False  # whether it matters which microbatch comes last
  collected = False  # whether every value is kept for `join`, and nothing held
  summed = False  # whether what is held is a sum
  over_devices: OverDevices = lambda held, *_: held
  is_default: bool = False  # whether nobody asked for it

  def __repr__(self) -> str:
    return repr(self.name)

  def check(
    self, name: str, like: Type, rows: int, dtype: DTypeLike | None
  ) -> None:
    """Checks that outputs of a type, of `rows` rows, can be reduced, in `dtype` if given."""

  def start(self, like: Type, dtype: DTypeLike | None):
    """What is held before the first microbatch."""
    return across_devices.full_like(like, 0)

  def resumed(self, held):
    """What the loop begins with, of what is held after the microbatches before."""
    return held

  def unhoisted(self, held, shapes: hoisting.Shapes):
    """What is held, such that XLA reduces arrays of these shapes over devices in the loop."""
    return hoisting.unhoisted(held, shapes)

  def add(self, held, value: jax.Array, weight: Weight):
    """What is held after one more microbatch. A weight of zero changes nothing."""
    return held

  def join(self, held, collected, tail=None):
    """What is held in the end; `tail` is what was collected of the smaller last one, or None."""
    return held

  def both(self, first, second, counted: bool | jax.Array):
    """What is held of two devices; `counted`: whether the second had a microbatch that counts."""
    return first

  def finish(self, held, weight: Weight, like: Type) -> jax.Array:
    """The reduced value, in the dtype of `like`; `weight` is the total over devices."""
    return held

  def only(self, value: jax.Array) -> jax.Array:
    """The reduced value where there is one microbatch, which counts."""
    return value


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Sum(Reduction):
  """The plain sum. Sums over devices come before the division, as weights do."""

  name = "sum"
  summed = True
  over_devices: OverDevices = lambda held, devices, _: devices.sum(held)
  # Reduces what a microbatch adds over devices, in every microbatch.
  reduce_term: Callable[..., jax.Array] | None = None
  # Whether it is in float32 or better, whatever `accumulator_dtype` is.
  wide: bool = False
  # Whether values were weighed before, and none is to be left out.
  is_weighed: bool = False

  def check(self, name, like, rows, dtype):
    dtypes.check_holds(name, like.dtype, dtype)

  def start(self, like, dtype):
    if self.wide:
      dtype = None
    dtype = dtypes.accumulator_dtype(like.dtype, dtype)
    zeros = across_devices.full_like(like, 0, dtype)
    if self.reduce_term is None:
      return zeros
    reduced = jax.make_jaxpr(self.reduce_term, return_shape=True)(zeros)
    return across_devices.zeros_like(across_devices.types(reduced))

  def term(
    self, value: jax.Array, weight: Weight, dtype: DTypeLike
  ) -> jax.Array:
    """What one microbatch adds if it counts."""
    return value.astype(dtype)

  def add(self, held, value, weight):
    if self.is_weighed:
      weight = 1.0
    term = self.term(value, weight, held.dtype)
    if self.reduce_term is None:
      # XLA for GPU keeps a second gradient where the term is selected and not the sum.
      total = held + term
      return weighted_mean.select(weighted_mean.counts(weight), total, held)
    counted = weighted_mean.counts(weight)
    term = weighted_mean.select(counted, term, jnp.zeros_like(term))
    # Without the barrier XLA for TPU adds up full values and reduces after the loop.
    return held + lax.optimization_barrier(self.reduce_term(term))

  def both(self, first, second, counted):
    return first + second

  def finish(self, held, weight, like):
    if jnp.issubdtype(like.dtype, jnp.inexact):
      return held.astype(like.dtype)
    return held

  def only(self, value):
    if jnp.issubdtype(value.dtype, jnp.inexact):
      return value
    return value.astype(dtypes.accumulator_dtype(value.dtype))


class Mean(Sum):
  """The weighted mean."""

  name = "mean"

  def check(self, name, like, rows, dtype):
    if not jnp.issubdtype(like.dtype, jnp.inexact):
      raise TypeError(
        f'{name} has dtype {like.dtype}, which "mean" cannot keep: cast it to a float in the'
        ' function, or reduce it with "sum", "max", "min", "last", "stack" or "concat", in'
        f" {_OPTIONS}."
      )
    super().check(name, like, rows, dtype)

  def term(self, value, weight, dtype):
    return weighted_mean.product(value, weight, dtype)

  def finish(self, held, weight, like):
    return weighted_mean.mean(held, weight, like.dtype)


class Ratio(Mean):
  """The sum over that of the weights: of totals, the weighted mean."""

  term = Sum.term


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Extreme(Reduction):
  """The largest value, or the smallest, element by element."""

  name: str
  choose: Callable[..., jax.Array]
  # The value that all others replace, and what `jnp.finfo` and `jnp.iinfo` call it.
  limit: float
  limit_name: str

  def check(self, name, like, rows, dtype):
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
      raise TypeError(
        f'{name} has dtype {like.dtype}, which has no {self!r}: use "mean" or "sum", in'
        f" {_OPTIONS}."
      )

  def start(self, like, dtype):
    limit = self.limit
    if like.dtype == jnp.bool_:
      limit = limit > 0
    elif jnp.issubdtype(like.dtype, jnp.integer):
      limit = int(getattr(jnp.iinfo(like.dtype), self.limit_name))
    elif dtypes.is_float8(like.dtype):  # some have no infinity
      limit = float(getattr(jnp.finfo(like.dtype), self.limit_name))
    return across_devices.full_like(like, limit)

  def add(self, held, value, weight):
    counted = weighted_mean.counts(weight)
    chosen = self.choose(held, value)
    return weighted_mean.select(counted, chosen, held)

  def both(self, first, second, counted):
    return self.choose(first, second)


class Last(Reduction):
  """The value of the last microbatch that counts."""

  name = "last"
  ordered = True

  def add(self, held, value, weight):
    return weighted_mean.select(weighted_mean.counts(weight), value, held)

  def both(self, first, second, counted):
    return weighted_mean.select(counted, second, first)


class Stack(Reduction):
  """Every microbatch's value, on a new leading axis."""

  name = "stack"
  collected = True

  def start(self, like, dtype):
    return None

  def join(self, held, collected, tail=None):
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

  def join(self, held, collected, tail=None):
    # Microbatch i has rows i, i + N, ... of the batch, so the index is the fast axis.
    rows = lax.collapse(jnp.moveaxis(collected, 0, 1), 0, 2)
    if tail is None:
      return rows
    return jnp.concatenate([rows, tail])

  def only(self, value):
    return value


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Merge(Reduction):
  """A function of the user that makes one value of two. A value may be a tree of arrays.

  What is held is a value, and whether there is one yet: before, it is zeros, which do not count.
  """

  fun: MergeFn
  ordered = True

  @classmethod
  def by(cls, fun: MergeFn) -> "Merge":
    """The reduction by a function."""
    return cls(fun=fun, over_devices=functools.partial(_merged_devices, fun))

  @property
  def name(self) -> str:  # type: ignore[override]
    """What the function is called."""
    return getattr(self.fun, "__qualname__", repr(self.fun))

  def check(self, name, like, rows, dtype):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    try:
      merged = jax.eval_shape(self.fun, like, like)
    except Exception as error:
      error.add_note(
        f"{name} is reduced by {self.name}(a, b), which was given two of {like}."
      )
      raise
    returned = f"what {self.name}(a, b) returned"
    _validate.check_alike(returned, name, merged, like)

  def start(self, like, dtype):
    zeros = across_devices.zeros_like(like)
    one = jax.tree.leaves(zeros)[0]
    return zeros, across_devices.vary_like(jnp.asarray(False), one)

  def add(self, held, value, weight):
    value = jax.tree.map(_refusing_derivatives, value)
    return _merged(self.fun, held, (value, weighted_mean.counts(weight)))

  def both(self, first, second, counted):
    return _merged(self.fun, first, second)

  def finish(self, held, weight, like):
    return held[0]


def _merged(fun: MergeFn, first, second):
  """What is held of two, of which there may be none yet."""
  (a, has_a) = first
  (b, has_b) = second
  either = _where(has_b, b, a)
  has_both = has_a & has_b
  one = _where(has_a, a, either)

  def of_both(a, b):
    a, b = jax.tree.map(lambda x: x, (a, b))  # containers that it may change
    return fun(a, b)

  # A branch, as the gradient of what `fun` closes over is NaN by zeros, or the NaN of padding,
  # although they are not selected. Where `vmap` runs both, one value is merged with itself.
  both = lax.cond(has_both, of_both, lambda a, b: either, one, either)
  return both, has_a | has_b


def _merged_devices(fun: MergeFn, held, devices, counted: object):
  """What is held of all devices, in the order of the mesh."""
  axis_name = devices.axis_name
  numbers = jnp.arange(devices.size, dtype=jnp.int32)
  own = numbers == lax.axis_index(axis_name)

  def gathered(x):
    row = x[None]
    place = own.reshape(-1, *[1] * x.ndim)
    return across_devices.of_one(row, axis_name, place)

  def add(held, other):
    return _merged(fun, held, other), None

  each = jax.tree.map(gathered, held)  # on a new first axis
  first = jax.tree.map(lambda x: x[0], each)
  others = jax.tree.map(lambda x: x[1:], each)
  return lax.scan(add, first, others)[0]


def _where(flag: bool | jax.Array, value, other):
  return jax.tree.map(
    lambda x, y: weighted_mean.select(flag, x, y), value, other
  )


def refusing_derivatives(
  error: type[Exception], message: str
) -> Callable[[jax.Array], jax.Array]:
  """The identity, which raises this where it has a derivative."""
  identity = jax.custom_jvp(lambda x: x)

  @functools.partial(identity.defjvp, symbolic_zeros=True)
  def refuse(primals, tangents):
    if not isinstance(tangents[0], SymbolicZero):
      raise error(message)
    return *primals, *tangents

  return identity


# Of what a function of the user reduces.
_refusing_derivatives = refusing_derivatives(
  NotImplementedError,
  "An output that is reduced by a function of your own, merge(a, b), depends on what you"
  " differentiate: return jax.lax.stop_gradient of it, or reduce it by a word.",
)


REDUCTIONS: dict[str, Reduction] = {
  "mean": Mean(),
  "sum": Sum(),
  "max": Extreme(
    name="max",
    choose=jnp.maximum,
    limit=-jnp.inf,
    limit_name="min",
    over_devices=across_devices.largest,
  ),
  "min": Extreme(
    name="min",
    choose=jnp.minimum,
    limit=jnp.inf,
    limit_name="max",
    over_devices=across_devices.smallest,
  ),
  "last": Last(over_devices=across_devices.of_last),
  "stack": Stack(),
  "concat": Concat(),
}
