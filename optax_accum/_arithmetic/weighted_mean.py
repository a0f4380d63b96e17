"""The weighted mean of microbatches, and the dtypes that it is taken in.

Streaming, scan, ragged, weighted and multi-device accumulation are all

    sum_i w_i g_i / sum_i w_i

A loop holds the plain sum. Dividing once, after it, rounds as the whole batch does, and lets
devices be reduced over once per cycle.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np

from optax_accum._arithmetic import dtypes

# A Python number is a weight known when tracing: it costs nothing when it is 1.
Weight = float | jax.Array

# The weights that float32 can weigh with, and the largest sum of them that it can divide by: to XLA
# numbers below 1.2e-38, reciprocals included, are zero.
LEAST = 1e-30
MOST = 1e30
MOST_IN_TOTAL = 1e36


def check_weight(source: str, value) -> None:
  """Checks a microbatch's weight: a real scalar, not negative where that can be seen."""
  shape = getattr(value, "shape", ())
  kind = getattr(value, "dtype", type(value))
  given = f"the weight {value!r}"
  if hasattr(value, "dtype"):
    given = f"a weight of shape {shape} and dtype {kind}"
  message = (
    f"{source} gave {given}; it must be a real scalar, such as jnp.sum(mask)."
  )
  is_complex = jnp.issubdtype(kind, jnp.complexfloating)
  is_number = jnp.issubdtype(kind, jnp.number) and not is_complex
  if not is_number and not jnp.issubdtype(kind, jnp.bool_):
    raise TypeError(message)
  if shape != ():
    raise ValueError(message)
  if isinstance(value, jax.core.Tracer):
    return
  # Python compares an int of any size with a float.
  number = value if isinstance(value, (int, float)) else float(value)
  if number and not LEAST <= number <= MOST:
    raise ValueError(
      f"{source} gave the weight {value}; it must be 0, or from {LEAST} to {MOST}, which float32"
      " can divide by. In a mean their ratios alone matter, so all of them can be rescaled."
    )


def as_weight(weight: ArrayLike) -> jax.Array:
  """A weight as a scalar of the default float: float32, or float64 where x64 is enabled.

  A traced weight below 0 becomes NaN; a known one was refused before. The derivative with respect
  to a weight of 0 is 0, because what does not count may be NaN.
  """
  dtype = jnp.result_type(float)
  if not isinstance(weight, jax.Array):
    # Cast by NumPy, as JAX would wrap an int to 32 bits.
    return jnp.asarray(np.asarray(weight).astype(dtype))
  weight = weight.astype(dtype)
  return jnp.where(weight > 0, weight, jnp.sqrt(lax.stop_gradient(weight)))


class WeightSum(NamedTuple):
  """A sum of weights, rounded once, and what that rounding took from it (Knuth's TwoSum).

  A float32 sum of token counts stops being exact at 2**24. With `rest` it is exact to 2**47.
  """

  total: jax.Array
  rest: jax.Array

  def add(self, weight: jax.Array) -> "WeightSum":
    """The sum with one more weight."""
    owed = weight + self.rest
    total = self.total + owed
    grown = total - self.total
    return WeightSum(total, (self.total - (total - grown)) + (owed - grown))

  def both(self, other: "WeightSum") -> "WeightSum":
    """The sum of two."""
    total, rest = self.add(other.total)
    return WeightSum(total, rest + other.rest)

  def over_devices(self, axis_name: Hashable | Sequence[Hashable]) -> jax.Array:
    """The sum over devices: multiples of 4096 and the rest apart, so that counts stay exact."""
    low = lax.rem(self.total, jnp.full_like(self.total, 4096))
    high, low = lax.psum((self.total - low, low + self.rest), axis_name)
    return high + low


def in_first_units(
  unit: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The unit that weights are counted in, and `weight` in it.

  A `unit` of 0 says that there is none yet, since no microbatch has counted: this one may set it.

  The unit is the first weight that is not 0, or 1 if that weight is extreme. Equal weights are then
  1, and round as the plain mean does. Otherwise a sum over a million microbatches of 51 tokens has
  a relative error of 1e-4, because every addition rounds in the same direction.
  """
  # 1e-30 / 1e7 is a normal float32. Divided by more, the least weight would be 0.
  usual = (weight >= 1e-3) & (weight <= 1e7)
  # A weight of 0 sets none, but 0 again.
  usual = usual | (weight == 0)
  is_none = unit == 0
  first = jnp.where(usual, weight, jnp.ones_like(weight))
  unit = jnp.where(is_none, first, unit)
  return unit, in_units(weight, unit)


def in_units(weight: jax.Array, unit: jax.Array) -> jax.Array:
  """A weight, or a sum of weights, in units."""
  return weight / jnp.where(
    unit == 0, jnp.ones_like(unit), lax.stop_gradient(unit)
  )


def counts(weight: Weight) -> bool | jax.Array:
  """Whether a microbatch of this weight counts. One whose weight is NaN does: the NaN shows."""
  return weight != 0


def select(
  counted: bool | jax.Array, value: jax.Array, other: jax.Array
) -> jax.Array:
  """`value` where the microbatch counted, else `other`. A Python bool adds no operation."""
  if isinstance(counted, bool):
    return value if counted else other
  return jnp.where(counted, value, other)


def product(value: jax.Array, weight: Weight, dtype: DTypeLike) -> jax.Array:
  """``weight * value`` in `dtype`; taken in float32, as bfloat16 holds few counts above 256."""
  if isinstance(weight, (int, float)) and weight == 1:
    return value.astype(dtype)
  wide = dtypes.promote(value.dtype, dtype, jnp.float32)
  if isinstance(weight, jax.Array):
    weight = weight.astype(wide)
  return (value.astype(wide) * weight).astype(dtype)


def weigh(value: jax.Array, weight: Weight, dtype: DTypeLike) -> jax.Array:
  """``weight * value`` in `dtype`, and zero where the weight is zero, even for NaN."""
  # Selected before it is multiplied: 0 * nan is nan, and a loss of padding alone is 0/0.
  value = select(counts(weight), value, jnp.zeros_like(value))
  return product(value, weight, dtype)


def usable(weight: jax.Array) -> jax.Array:
  """Whether sums of this weight can be divided by it: it is 0, or in range, and no NaN."""
  is_large = jnp.abs(weight) >= LEAST
  is_small = jnp.abs(weight) <= MOST_IN_TOTAL
  return is_large & is_small | (weight == 0)


def mean(total: jax.Array, weight: Weight, dtype: DTypeLike) -> jax.Array:
  """``total / weight`` in `dtype`; zero where the weight is zero, NaN where it is out of range.

  Multiplies by the reciprocal: XLA gives a quotient a buffer of its own, and fuses a product.
  """
  if isinstance(weight, (int, float)) and weight == 1:
    return total.astype(dtype)
  wide = dtypes.promote(total.dtype, jnp.float32)
  total = total.astype(wide)
  if not isinstance(weight, jax.Array):
    return (total * (1 / weight)).astype(dtype)
  one = jnp.ones((), wide)
  inverse = one / jnp.where(weight == 0, one, weight.astype(wide))
  inverse = jnp.where(usable(weight), inverse, jnp.nan)
  inverse = jnp.where(weight == 0, jnp.zeros((), wide), inverse)
  return (total * inverse).astype(dtype)
