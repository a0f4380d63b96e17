"""Keys of which every draw is the same number, so that a row has the same noise in any part."""

import functools

import jax
import jax.numpy as jnp

FIXED = "key<fixed>"  # the dtype of such keys


def fixed_keys(shape: tuple[int, ...], level: float) -> jax.Array:
  """Keys of which `jax.random.uniform` draws `level`."""
  data = jnp.full((*shape, 1), int(level * 2**32), jnp.uint32)
  return jax.random.wrap_key_data(data, impl=_one_number())


def _split(key, shape: tuple[int, ...]) -> jax.Array:
  # All children are one, because rows may have a key each. It is not the parent, because loops that
  # draw until they like what they drew would not end.
  child = key * jnp.uint32(747796405) + jnp.uint32(2891336453)
  return jnp.broadcast_to(child, (*shape, 1))


def _random_bits(key, width: int, shape: tuple[int, ...]) -> jax.Array:
  dtype = jnp.dtype(f"uint{width}")
  word = (key[0] >> jnp.uint32(max(32 - width, 0))).astype(dtype)
  return jnp.full(shape, word << jnp.asarray(max(width - 32, 0), dtype))


@functools.cache
def _one_number():
  """The implementation of keys of which every draw is one number."""
  from jax.extend.random import define_prng_impl  # training does without

  return define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros((1,), jnp.uint32),
    split=_split,
    random_bits=_random_bits,
    fold_in=lambda key, data: key,
    name="fixed",
    tag="fixed",
  )
