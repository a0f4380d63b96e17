"""The dtypes that values are added up in."""

import sys

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def promote(*dtypes: DTypeLike) -> jnp.dtype:
  """The dtype that all `dtypes` promote to, also where a user forbids implicit promotion."""
  # JAX promotes 8-bit floats to nothing by itself; float32 holds them all.
  wide = [jnp.float32 if is_float8(d) else jnp.dtype(d) for d in dtypes]
  with jax.numpy_dtype_promotion("standard"):
    return jnp.result_type(*wide)


def is_float8(dtype: DTypeLike) -> bool:
  """Whether `dtype` is a float of 8 bits or fewer."""
  return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1


def is_inexact(x) -> bool:
  """Whether `x` is a floating or complex array or number, which can be differentiated."""
  return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact)


def is_sparse(x) -> bool:
  """Whether `x` is an array of `jax.experimental.sparse`, which is a node with arrays in it."""
  # Not imported here, which takes long: if nobody has imported it, there is no such array.
  sparse = sys.modules.get("jax.experimental.sparse")
  return sparse is not None and isinstance(x, sparse.JAXSparse)


def is_key(x) -> bool:
  """Whether `x` is an array of typed random keys."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def accumulator_dtype(
  dtype: DTypeLike, requested: DTypeLike | None = None
) -> jnp.dtype:
  """The dtype that values of `dtype` are added up in.

  Floating and complex: `requested` (its real part's dtype for real values), or by default `dtype`
  promoted with float32. Integers and bools: at least 32 bits.
  """
  if jnp.issubdtype(dtype, jnp.unsignedinteger):
    return promote(dtype, jnp.uint32)
  # Signed integers and bools, which ignore what is requested, as unsigned ones do.
  if not jnp.issubdtype(dtype, jnp.inexact):
    return promote(dtype, jnp.int32)
  if requested is None:
    return promote(dtype, jnp.float32)
  if jnp.issubdtype(dtype, jnp.floating):
    # Of a complex dtype, that of its parts.
    return jnp.finfo(requested).dtype
  return jnp.dtype(requested)


def requested_dtype(value: DTypeLike | None) -> jnp.dtype | None:
  """The dtype that was asked for; None leaves it to the default of `accumulator_dtype`."""
  return None if value is None else jnp.dtype(value)


def check_holds(
  leaf: str, dtype: DTypeLike, accumulator: DTypeLike | None
) -> None:
  """Checks that accumulating `dtype` in `accumulator` does not lose an imaginary part."""
  # Without a request the default is complex for complex values, and loses nothing.
  if accumulator is None:
    return
  real = jnp.issubdtype(accumulator, jnp.floating)
  if real and jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(
      f"accumulator_dtype={jnp.dtype(accumulator)} would lose the imaginary part of {leaf}, which"
      f" is {jnp.dtype(dtype)}: give a complex dtype, or None."
    )


def check_wide(what: str, x) -> None:
  """Checks that a loss, or a weight, is in float32 or wider, as their product is."""
  dtype = jnp.result_type(x)
  if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
    raise TypeError(
      f"{what} has dtype {dtype}, which would round the weight that the loss is multiplied by:"
      " compute the mean, and count the weight, in float32. Cast the mask, and the logits or the"
      " losses of tokens; not the mean alone, whose gradient would round the weight on its way"
      " back."
    )


def in_dtype_of(x, like):
  """`x` in the dtype of `like`."""
  if jnp.result_type(x) == like.dtype:
    return x
  return jnp.asarray(x).astype(like.dtype)
