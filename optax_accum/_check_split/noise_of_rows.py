"""Random keys whose draws follow the rows, so that rows may meet in what is drawn for them.

A denominator that is counted in a drawn mask, or a permutation of the rows, shows in no noise that
is the same everywhere. Here a row has its number with it, on which its draws depend, wherever it
stands. What is drawn along an axis that has not as many entries as there are rows does not vary
along it: it may be another number of rows, as in pairs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import math
from typing import Any, TypeAlias

import jax
from jax.extend.random import define_prng_impl
import jax.numpy as jnp
import numpy as np

from optax_accum._check_split import probes
from optax_accum._check_split.case import Case
from optax_accum._check_split.fixed_noise import is_key
from optax_accum._check_split.probes import Arguments, Probe
from optax_accum._check_split.report import LeafComparison
from optax_accum._check_split.runs import agree, Runs

Compared: TypeAlias = tuple[str, tuple[LeafComparison, ...]]  # where, and the leaves
_LEVELS = (0.1, 0.2, 0.3)  # what the draws start from
_LOWER, _UPPER = 1 << 16, 2 << 16  # added to the number of a row that draws below, or above, a half
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


def rows_of_a_half(sizes: Iterable[int]) -> int | None:
  """How many rows to take twice: as no axis of the loss has, nor a multiple of it."""
  used = set(sizes) - {0}
  return next((p for p in _PRIMES if all(size % p for size in used)), None)


def disagreements(case: Case, keys: Sequence[int]) -> list[Compared]:
  """Where a loss differs from two microbatches of it, with draws that follow the rows.

  `keys` are the arguments whose keys are replaced. A loss that does not take so many rows raises.
  """
  half = rows_of_a_half(case.facts.sizes)
  if not (case.facts.draws and keys and half) or case.runs.sizes == [{"num_microbatches": 1}]:
    return []
  return [c for c in _compared(case, keys, half) if not agree(c[1])]


def _compared(case: Case, keys: Sequence[int], half: int) -> Iterator[Compared]:
  """The loss of twice `half` rows beside that of two microbatches."""
  slot, order = min(case.batch), list(case.batch)
  calls = [_call(case.args, case.batch, keys, case.rows, half, level) for level in _LEVELS]
  options = {**case.runs.options, "rng_argnums": ()}
  if options["weight_fn"] is not None:
    options["weight_fn"] = _of_pairs(options["weight_fn"], order.index(slot))
  fun = _with_numbers(case.runs.fun, slot, keys)
  split = Runs(fun, calls[0].args, options, [{"microbatch_size": half}])
  for name, whole, (parts,) in split.outcomes(calls):
    yield f"{name}; 2 microbatches of {half} rows", split.compare(whole, parts)


def _call(
  args: Arguments, batch: Mapping[int, int], keys: Any, rows: int, half: int, level: float
) -> Probe:
  """A call of the loss with numbers: twice `half` rows, and what the draws start from."""
  slot = min(batch)
  numbers = np.arange(2 * half, dtype=np.uint32)
  if level == _LEVELS[0]:  # masks that differ for certain
    numbers += np.where(numbers < half, _LOWER, _UPPER).astype(np.uint32)
  axis = batch[slot]
  shape = (1,) * axis + (-1,) if axis >= 0 else (-1,) + (1,) * (-axis - 1)
  args = probes.with_noise(args, keys, level, False)
  args = probes.take_rows(args, batch, np.arange(2 * half) % rows)
  pair = (args[slot], numbers.reshape(shape))
  return Probe(f"noise that follows the rows, {level}", (*args[:slot], pair, *args[slot + 1 :]))


def _with_numbers(fun: Callable[..., Any], slot: int, keys: Sequence[int]) -> Callable[..., Any]:
  """The loss, whose argument `slot` is a pair: with it come the numbers of its rows."""

  @functools.wraps(fun)
  def loss(*args: Any) -> Any:
    argument, numbers = args[slot]
    args = (*args[:slot], argument, *args[slot + 1 :])
    of_rows = lambda _, x: _keys(x, numbers.reshape(-1)) if is_key(x) else x  # noqa: E731
    return fun(*probes.map_leaves(args, keys, of_rows))

  return loss


def _of_pairs(fun: Callable[..., Any], position: int) -> Callable[..., Any]:
  """A `weight_fn` of such arguments."""
  return lambda *b: fun(*b[:position], b[position][0], *b[position + 1 :])


def _keys(keys: jax.Array, numbers: jax.Array) -> jax.Array:
  """Such keys for rows that have these numbers, which start from fixed ones."""
  states = jax.random.key_data(keys)
  numbers = jnp.broadcast_to(numbers, (*keys.shape, numbers.size))
  data = jnp.concatenate([states, numbers], axis=-1)
  return jax.random.wrap_key_data(data, impl=_implementation(numbers.shape[-1]))


@functools.cache
def _implementation(rows: int) -> Any:
  """Keys of a microbatch of so many rows: what to draw from, and the numbers of the rows."""

  def numbers_of(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The number of the row that each draw is of, and zero where it is of none."""
    if rows in shape:
      axis = shape.index(rows)
      return key[1:].reshape([rows if i == axis else 1 for i in range(len(shape))])
    of_one_row = jnp.where(jnp.all(key[1:] == key[1]), key[1], jnp.zeros((), jnp.uint32))
    return of_one_row.reshape((1,) * len(shape))

  def words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    numbers = numbers_of(key, shape)
    mixed = _mixed(numbers * jnp.uint32(0x9E3779B1) ^ _mixed(key[0]))
    half = numbers >> jnp.uint32(16)
    in_half = (mixed >> jnp.uint32(1)) | (
      jnp.maximum(half, jnp.uint32(1)) - jnp.uint32(1)
    ) << jnp.uint32(31)
    return jnp.broadcast_to(jnp.where(half > 0, in_half, mixed), shape)

  def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    count = math.prod(shape)
    is_few = count <= 4 and rows not in shape  # parts of a loss have keys of their own
    salt = jnp.arange(count * is_few or 1, dtype=jnp.uint32)
    salt = salt.reshape(shape if is_few else (1,) * len(shape))
    states = _mixed(_mixed(words(key, shape)) + salt)[..., None]
    numbers = key[1:].reshape((1,) * len(shape) + (rows,))
    if rows in shape:  # each key is of one row, and so is all that is drawn from it
      numbers = numbers_of(key, shape)[..., None]
    return jnp.concatenate([states, jnp.broadcast_to(numbers, (*shape, rows))], axis=-1)

  def random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    dtype = jnp.dtype(f"uint{width}")
    bits = words(key, shape)
    if width < 32:
      return (bits >> jnp.uint32(32 - width)).astype(dtype)
    return bits.astype(dtype) << jnp.asarray(width - 32, dtype)

  return define_prng_impl(
    key_shape=(rows + 1,),
    seed=lambda seed: jnp.zeros((rows + 1,), jnp.uint32),
    split=split,
    random_bits=random_bits,
    fold_in=lambda key, data: key,
    name=f"of_{rows}_rows",
    tag=f"rows{rows}",
  )


def _mixed(x: jax.Array) -> jax.Array:
  """A word that looks random (the last steps of MurmurHash3)."""
  x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> jnp.uint32(16))
