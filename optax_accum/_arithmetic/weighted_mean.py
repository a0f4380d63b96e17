"""The weighted mean of microbatches, and the dtypes that it is taken in.

Streaming, scan, ragged, weighted and multi-device accumulation are all

    sum_i w_i g_i / sum_i w_i

A loop holds the plain sum. Dividing once, after it, rounds as the whole batch does, and lets
devices be reduced over once per cycle.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np

from optax_accum._arithmetic import dtypes

# A Python number is a weight that tracing knows. It is never 0, since a 0 is made an array, and it
# costs nothing when it is 1.
Weight = float | jax.Array


def check_weight(source: str, value) -> None:
  """Checks a microbatch's weight: a real scalar, not negative where that can be seen."""
  # A Python number has neither a shape nor a dtype.
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
  # A bool is a weight of 0 or 1, and is not among the numbers of NumPy.
  if not is_number and not jnp.issubdtype(kind, jnp.bool_):
    raise TypeError(message)
  if shape != ():
    raise ValueError(message)
  # Its sign is not known when tracing; `as_weight` makes NaN of what is below 0.
  if isinstance(value, jax.core.Tracer):
    return
  # Written so that NaN is refused too.
  if not float(value) >= 0:
    raise ValueError(
      f"{source} gave the weight {value}; it must be 0 or more: it is how much a microbatch counts."
    )


def as_weight(weight: ArrayLike) -> jax.Array:
  """A weight as a scalar of the default float: float32, or float64 where x64 is enabled.

  A traced weight below 0 becomes NaN; a known one was refused before. The derivative with respect
  to a weight of 0 is 0, because what does not count may be NaN.
  """
  dtype = jnp.result_type(float)
  if not isinstance(weight, jax.Array):
    # Cast by NumPy, as JAX would wrap an int to 32 bits.
    number = np.asarray(weight).astype(dtype)
    return jnp.asarray(number)
  weight = weight.astype(dtype)
  is_positive = weight > 0
  # The root of 0 is 0, and that of a negative number or of NaN is NaN.
  root = jnp.sqrt(lax.stop_gradient(weight))
  return jnp.where(is_positive, weight, root)


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
  # A Python 1 is known when tracing, so nothing is multiplied.
  if isinstance(weight, (int, float)) and weight == 1:
    return value.astype(dtype)
  wide = dtypes.promote(value.dtype, dtype, jnp.float32)
  if isinstance(weight, jax.Array):
    weight = weight.astype(wide)
  term = value.astype(wide) * weight
  return term.astype(dtype)


def weigh(value: jax.Array, weight: Weight, dtype: DTypeLike) -> jax.Array:
  """``weight * value`` in `dtype`, and zero where the weight is zero, even for NaN."""
  # Selected before it is multiplied: 0 * nan is nan, and a loss of padding alone is 0/0.
  value = select(counts(weight), value, jnp.zeros_like(value))
  return product(value, weight, dtype)


def mean(total: jax.Array, weight: Weight, dtype: DTypeLike) -> jax.Array:
  """``total / weight`` in `dtype`; zero where the weight is zero.

  Multiplies by the reciprocal: XLA gives a quotient a buffer of its own, and fuses a product.
  """
  # A Python 1 is known when tracing, so nothing is divided.
  if isinstance(weight, (int, float)) and weight == 1:
    return total.astype(dtype)
  wide = dtypes.promote(total.dtype, jnp.float32)
  total = total.astype(wide)
  inverse: Weight
  if isinstance(weight, jax.Array):
    one = jnp.ones((), wide)
    # A weight of zero is replaced by one: the total is zero then, and 0/0 would be NaN.
    inverse = one / jnp.where(weight == 0, one, weight.astype(wide))
  else:
    # A weight that tracing knows is never 0: see `Weight`. Tracing takes its reciprocal.
    inverse = 1 / weight
  quotient = total * inverse
  return quotient.astype(dtype)
