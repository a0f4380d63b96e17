"""Random keys whose draws are all the same, so that a row's noise does not depend on its place."""

from typing import Any

import jax
from jax.extend.random import define_prng_impl
import jax.numpy as jnp

# A draw of `jax.random.uniform` from the key itself: dropout keeps, and with the other one drops.
LEVELS = (0.3, 0.7)


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  # All children are one, because rows may have a key each. It is not the parent, because loops that
  # draw until they like what they drew would not end.
  child = key * jnp.uint32(747796405) + jnp.uint32(2891336453)
  return jnp.broadcast_to(child, (*shape, 1))


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  dtype = jnp.dtype(f"uint{width}")
  if width < 32:
    bits = (key[0] >> jnp.uint32(32 - width)).astype(dtype)
  else:
    bits = key[0].astype(dtype) << jnp.asarray(width - 32, dtype)
  return jnp.full(shape, bits)


_FIXED = define_prng_impl(
  key_shape=(1,),
  seed=lambda seed: jnp.zeros((1,), jnp.uint32),
  split=_split,
  random_bits=_random_bits,
  fold_in=lambda key, data: key,
  name="fixed",
  tag="fixed",
)


def is_key(x: Any) -> bool:
  """Whether `x` is an array of typed keys."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def may_be_raw_key(x: Any) -> bool:
  """Whether `x` looks like an array of raw keys."""
  return getattr(x, "dtype", None) == jnp.uint32 and jnp.shape(x)[-1:] in ((2,), (4,))


def fixed_keys(keys: Any, level: float) -> jax.Array:
  """As many keys as in an array of typed or raw ones, all of which draw `level`."""
  shape = jnp.shape(keys) if is_key(keys) else jnp.shape(keys)[:-1]
  data = jnp.full((*shape, 1), int(level * 2**32), jnp.uint32)
  return jax.random.wrap_key_data(data, impl=_FIXED)
