"""Batches that differ from the given one in one respect, which may have hidden a defect.

A mean over a mask of ones is the plain mean, and so is a mean over valid labels where all are
valid. Here a part of row 0 is changed, which makes microbatches uneven that were even. A mean over
what one row alone has adds up as a sum does. So row 0 and the last are changed too, which no split
keeps together.

Nothing is drawn at random. A named key becomes one of which every draw is the same number, or no
row would have the same noise in a microbatch as in the whole batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.random import define_prng_impl
import jax.numpy as jnp
import numpy as np

Arguments = tuple[Any, ...]
# What `jax.random.uniform` draws from a key itself: of the given batch, as other noise, and of the
# varied batch. Dropout keeps, drops, and keeps what is kept rarely.
LEVELS = (0.3, 0.7, 0.05)
FIXED = "key<fixed>"  # the dtype of such keys


class Probe(NamedTuple):
  """One way to call the loss."""

  name: str
  args: Arguments
  source: int | None = None  # 0: the given call with rows changed, 1: the varied one


class BatchLeaf(NamedTuple):
  """One array of the batch: where it is, and which axis has the rows."""

  argnum: int
  position: int  # among the leaves of its argument
  name: str  # as Python writes it: "batch['mask']", "batch.mask"
  axis: int  # counted from the left
  value: Any


def batch_leaves(
  args: Arguments, batch: Mapping[int, int], names: Mapping[int, str]
) -> list[BatchLeaf]:
  """The arrays of the batch: of the arguments `batch`, with their axes and `names`."""
  return [
    BatchLeaf(i, position, names[i] + jax.tree_util.keystr(path), axis % leaf.ndim, leaf)
    for i, axis in batch.items()
    for position, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(args[i]))
  ]


def of_call(
  args: Arguments,
  batch: Mapping[int, int],
  argnums: Sequence[int],
  keys: Sequence[int],
  rows: int,
  numbers: tuple[Sequence[int], Sequence[float]],
  names: Mapping[int, str],
) -> Iterator[Probe]:
  """The given call, and those with something changed.

  `numbers` are the integers, and the floats, that may say that an entry does not count.
  """
  yield Probe("as given", args, 0)
  yield Probe("parameters moved", move(args, argnums, 1))
  if keys:
    yield Probe("other noise", with_noise(args, keys, LEVELS[1]))
  # On the given floats, which may be all alike, and on others, of which a loss may have no value.
  varied = vary(args, batch)
  is_varied = any(x is not y for x, y in zip(*map(jax.tree.leaves, (args, varied)), strict=True))
  varied = with_noise(move(varied, argnums, 1), keys, LEVELS[2])
  for number, (source, ending) in enumerate([(args, ""), (varied, ", all floats varied")]):
    if number:
      yield Probe(f"as given{ending}", source, number)
    again = take_rows(source, batch, np.arange(rows) ** 2 // rows)
    yield Probe(f"rows drawn again{ending}", again, number)
    for leaf in batch_leaves(source, batch, names):
      # Where no float is varied, other parameters alone tell no more about each number.
      for name, value in list(_changes(leaf, *numbers))[: None if is_varied or number else 1]:
        yield Probe(f"{name}{ending}", _with_leaf(source, leaf, value), number)


def _changes(
  leaf: BatchLeaf, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[tuple[str, np.ndarray]]:
  """What becomes of a leaf by one change in row 0, or in the first row and the last."""
  name, x = leaf.name, leaf.value
  if is_key(x):
    return
  new: list[tuple[str, Any]] = [("inverted", x == 0)] if is_mask(x) else []
  if is_integer(x):
    limits = np.iinfo(x.dtype)
    new += [(f"= {n}", n) for n in integers if limits.min <= n <= limits.max]
  elif np.issubdtype(x.dtype, np.floating):
    new += [(f"= {n:g}", n) for n in floats]
  last = x.shape[leaf.axis] - 1
  for change, value in new:
    yield f"{name} {change} in row 0", _put(leaf, value, [0])
    yield f"{name} {change} in rows 0 and {last}", _put(leaf, value, [0, last])
  if not is_mask(x):
    change, value = ("doubled", x * 2) if is_integer(x) else ("halved", x / 2)
    yield f"{name} {change} in row 0", _put(leaf, value, [0])
  if _has_longer_rows(leaf):
    empty = next((n for n in integers if n not in (0, -1)), 0) if is_integer(x) else 0
    yield f"{name} = {empty} in all of row 0", _put(leaf, empty, [0], is_whole=True)


def _put(leaf: BatchLeaf, value: Any, rows: list[int], is_whole: bool = False) -> np.ndarray:
  """A leaf with other rows, but for the first entry of longer ones."""
  out = np.array(leaf.value)
  to, source = (np.moveaxis(x, leaf.axis, 0) for x in (out, np.broadcast_to(value, out.shape)))
  at: Any = (rows, ..., slice(1, None)) if _has_longer_rows(leaf) and not is_whole else rows
  to[at] = source[at]
  return out


def _with_leaf(args: Arguments, leaf: BatchLeaf, value: Any) -> Arguments:
  treedef: Any
  leaves, treedef = jax.tree.flatten(args[leaf.argnum])
  leaves[leaf.position] = value
  return (*args[: leaf.argnum], treedef.unflatten(leaves), *args[leaf.argnum + 1 :])


def _has_longer_rows(leaf: BatchLeaf) -> bool:
  """Whether the entries of a row can be told apart."""
  shape = np.moveaxis(leaf.value, leaf.axis, 0).shape
  return len(shape) > 1 and shape[-1] > 1


def map_leaves(args: Arguments, argnums: Any, fun: Callable[[int, Any], Any]) -> Arguments:
  """The arguments with `fun` of every leaf of those at `argnums`."""
  return tuple(
    jax.tree.map(lambda leaf, i=i: fun(i, leaf), x) if i in argnums else x
    for i, x in enumerate(args)
  )


def take_rows(args: Arguments, batch: Mapping[int, int], rows: Any) -> Arguments:
  """The arguments with some rows of the batch, in the order of `rows`."""
  return map_leaves(args, batch, lambda i, x: x[(slice(None),) * (batch[i] % x.ndim) + (rows,)])


def _map_floats(args: Arguments, argnums: Any, new: Callable[[Any, Any], Any]) -> Arguments:
  """The arguments with other floats; `new` gets an array, and the place of each number in it."""

  def fun(_: int, x: Any) -> Any:
    if is_key(x) or not np.issubdtype(x.dtype, np.inexact):
      return x
    return new(x, np.arange(x.size).reshape(x.shape)).astype(x.dtype, copy=False)

  return map_leaves(args, argnums, fun)


def move(args: Arguments, argnums: Sequence[int], number: int) -> Arguments:
  """The arguments with others at `argnums`, by a tenth: a weight does not depend on parameters."""
  size = lambda x: 0.1 * (np.sqrt(np.mean(np.abs(x) ** 2)) or 1.0)  # noqa: E731
  return _map_floats(args, argnums, lambda x, i: x + size(x) * np.sin(number * (1.0 + i)))


def nudge(args: Arguments, argnums: Sequence[int]) -> Arguments:
  """The arguments with the last bits of those at `argnums` changed."""
  unit = lambda x, i: 2 * np.finfo(x.dtype).eps * np.sign(np.sin(1.0 + i))  # noqa: E731
  return _map_floats(args, argnums, lambda x, i: x * (1 + unit(x, i)))


def vary(args: Arguments, batch: Mapping[int, int]) -> Arguments:
  """The arguments with each float of the batch made smaller, by factors that are all different.

  Masks of floats stay as they are, unless there are no other floats.
  """
  leaves = [x for x in jax.tree.leaves([args[i] for i in batch]) if not is_key(x)]
  others = any(np.issubdtype(x.dtype, np.inexact) and not is_mask(x) for x in leaves)
  varied = lambda x, i: x * (0.6 + 0.4 * np.sin(1.7 * i))  # noqa: E731
  return _map_floats(args, batch, lambda x, i: x if others and is_mask(x) else varied(x, i))


def all_rows_alike(args: Arguments, batch: Mapping[int, int]) -> Arguments:
  """The arguments with the masks, labels and counts of row 0 in every row."""

  def alike(i: int, x: Any) -> Any:
    counts = not is_key(x) and (is_mask(x) or is_integer(x))
    return np.broadcast_to(x.take([0], batch[i]), x.shape) if counts else x

  return map_leaves(args, batch, alike)


def negative_labels(args: Arguments, batch: Mapping[int, int]) -> list[int]:
  """The least number of each integer leaf that has a negative one."""
  leaves = [x for x in jax.tree.leaves([args[i] for i in batch]) if not is_key(x)]
  return [int(x.min()) for x in leaves if is_integer(x) and x.size and x.min() < 0]


def is_mask(x: np.ndarray) -> bool:
  """Whether an array holds nothing but 0 and 1."""
  return x.dtype == bool or bool(np.all((x == 0) | (x == 1)))


def is_integer(x: np.ndarray) -> bool:
  """Whether an array holds integers, which may be labels or counts."""
  return np.issubdtype(x.dtype, np.integer)


def is_key(x: Any) -> bool:
  """Whether `x` is an array of typed keys."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def may_be_raw_key(x: Any) -> bool:
  """Whether `x` looks like an array of raw keys."""
  return getattr(x, "dtype", None) == jnp.uint32 and jnp.shape(x)[-1:] in ((2,), (4,))


def with_noise(
  args: Arguments, argnums: Sequence[int], level: float, raw: bool = True
) -> Arguments:
  """The arguments with keys at `argnums`, `raw` ones too, of which every draw is the same."""

  def fixed(_: int, x: Any) -> Any:
    if not is_key(x) and not (raw and may_be_raw_key(x)):
      return x
    shape = jnp.shape(x) if is_key(x) else jnp.shape(x)[:-1]
    data = jnp.full((*shape, 1), int(level * 2**32), jnp.uint32)
    return jax.random.wrap_key_data(data, impl=_FIXED)

  return map_leaves(args, argnums, fixed)


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  # All children are one, because rows may have a key each. It is not the parent, because loops that
  # draw until they like what they drew would not end.
  child = key * jnp.uint32(747796405) + jnp.uint32(2891336453)
  return jnp.broadcast_to(child, (*shape, 1))


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  word = key[0] >> jnp.uint32(max(32 - width, 0))
  dtype = jnp.dtype(f"uint{width}")
  return jnp.full(shape, word.astype(dtype) << jnp.asarray(max(width - 32, 0), dtype))


_FIXED = define_prng_impl(
  key_shape=(1,),
  seed=lambda seed: jnp.zeros((1,), jnp.uint32),
  split=_split,
  random_bits=_random_bits,
  fold_in=lambda key, data: key,
  name="fixed",
  tag="fixed",
)
