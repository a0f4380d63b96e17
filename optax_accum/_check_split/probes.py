"""Batches that differ from the given one in one respect, which may have hidden a defect.

A mean over a mask of ones is the plain mean, and so is a mean over valid labels where all are
valid. Here a part of row 0 is changed, which makes microbatches uneven that were even. A mean over
what one row alone has adds up as a sum does. So row 0 and the last are changed too, which no split
keeps together.

Nothing is drawn at random. A named key becomes one of which every draw is the same number, or no
row would have the same noise in a microbatch as in the whole batch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import functools
from typing import NamedTuple, TypeAlias

import jax
from jax.extend.random import define_prng_impl
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Leaf, Leaves

# What `jax.random.uniform` draws from a key itself: of the given batch, as other noise, and of the
# varied batch. Dropout keeps, drops, and keeps what is kept rarely.
LEVELS = (0.3, 0.7, 0.05)
FIXED = "key<fixed>"  # the dtype of such keys

Rows: TypeAlias = np.ndarray  # which of the batch, in their order


class BatchLeaf(NamedTuple):
  """One array of the batch: where it is, and which axis has the rows."""

  argnum: int
  position: int  # among the leaves of its argument
  name: str  # as Python writes it: "batch['mask']", "batch.mask"
  axis: int  # counted from the left
  value: Leaf

  @property
  def has_longer_rows(self) -> bool:
    """Whether the entries of a row can be told apart."""
    shape = np.moveaxis(self.value, self.axis, 0).shape
    return len(shape) > 1 and shape[-1] > 1


class Call(NamedTuple):
  """One way to call the loss, and what each argument is."""

  name: str
  args: Args
  argnums: Sequence[int]  # what is differentiated
  batch: Mapping[int, int]  # what is split, and the axis of its rows
  keys: Collection[int]  # those that are named
  shared: Collection[int]  # what has none of these roles
  names: Sequence[str]  # what the loss calls each argument
  source: int | None = None  # 0: the given call with rows changed, 1: the varied one

  @property
  def leaves(self) -> list[BatchLeaf]:
    """The arrays of the batch."""
    return [
      BatchLeaf(i, position, self.names[i] + jax.tree_util.keystr(path), axis % leaf.ndim, leaf)
      for i, axis in self.batch.items()
      for position, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(self.args[i]))
    ]

  @property
  def rows(self) -> int:
    """How many the batch has."""
    return self.leaves[0].value.shape[self.leaves[0].axis]

  @property
  def plain_arrays(self) -> list[np.ndarray]:
    """What of the batch is no key."""
    return [leaf.value for leaf in self.leaves if not is_key(leaf.value)]

  def mapped(self, argnums: Collection[int], fun: Callable[[int, Leaf], Leaf]) -> "Call":
    """The call with `fun` of every leaf of the arguments at `argnums`."""
    mapped = [
      jax.tree.map(functools.partial(fun, i), x) if i in argnums else x
      for i, x in enumerate(self.args)
    ]
    return self._replace(args=tuple(mapped))

  def take(self, rows: Rows) -> "Call":
    """The call with some rows of the batch."""
    at = lambda i, x: (slice(None),) * (self.batch[i] % x.ndim) + (rows,)  # noqa: E731
    return self.mapped(self.batch, lambda i, x: x[at(i, x)])

  def _with_floats(
    self, argnums: Collection[int], new: Callable[[np.ndarray, np.ndarray], np.ndarray]
  ) -> "Call":
    """The call with other floats; `new` gets an array, and the place of each number in it."""

    def fun(_: int, x: Leaf) -> Leaf:
      if is_key(x) or not np.issubdtype(x.dtype, np.inexact):
        return x
      return new(x, np.arange(x.size).reshape(x.shape)).astype(x.dtype, copy=False)

    return self.mapped(argnums, fun)

  def moved(self, number: int) -> "Call":
    """The call with other parameters, by a tenth: a weight does not depend on parameters."""
    size = lambda x: 0.1 * (np.sqrt(np.mean(np.abs(x) ** 2)) or 1.0)  # noqa: E731
    return self._with_floats(self.argnums, lambda x, i: x + size(x) * np.sin(number * (1.0 + i)))

  def nudged(self) -> "Call":
    """The call with the last bits of the parameters changed."""
    unit = lambda x, i: 2 * np.finfo(x.dtype).eps * np.sign(np.sin(1.0 + i))  # noqa: E731
    return self._with_floats(self.argnums, lambda x, i: x * (1 + unit(x, i)))

  def varied(self) -> "Call":
    """The call with each float of the batch made smaller, by factors that are all different.

    Masks of floats stay as they are, unless there are no other floats.
    """
    others = any(np.issubdtype(x.dtype, np.inexact) and not is_mask(x) for x in self.plain_arrays)
    varied = lambda x, i: x * (0.6 + 0.4 * np.sin(1.7 * i))  # noqa: E731
    return self._with_floats(self.batch, lambda x, i: x if others and is_mask(x) else varied(x, i))

  def alike(self) -> "Call":
    """The call with the masks, labels and counts of row 0 in every row."""

    def alike(i: int, x: Leaf) -> Leaf:
      counts = not is_key(x) and (is_mask(x) or is_integer(x))
      return np.broadcast_to(x.take([0], self.batch[i]), x.shape) if counts else x

    return self.mapped(self.batch, alike)

  def with_noise(self, argnums: Collection[int], level: float, raw: bool = True) -> "Call":
    """The call with keys at `argnums`, `raw` ones too, of which every draw is the same."""

    def fixed(_: int, x: Leaf) -> Leaf:
      if not is_key(x) and not (raw and may_be_raw_key(x)):
        return x
      shape = jnp.shape(x) if is_key(x) else jnp.shape(x)[:-1]
      data = jnp.full((*shape, 1), int(level * 2**32), jnp.uint32)
      return jax.random.wrap_key_data(data, impl=_FIXED)

    return self.mapped(argnums, fixed)


def probes_of(given: Call, integers: Sequence[int], floats: Sequence[float]) -> Iterator[Call]:
  """The given call, and those with something changed.

  `integers` and `floats` are the numbers that may say that an entry does not count.
  """
  yield given._replace(name="as given", source=0)
  yield given.moved(1)._replace(name="parameters moved")
  if given.keys:
    yield given.with_noise(given.keys, LEVELS[1])._replace(name="other noise")
  # On the given floats, which may be all alike, and on others, of which a loss may have no value.
  varied, again = given.varied(), np.arange(given.rows) ** 2 // given.rows
  both = zip(jax.tree.leaves(given.args), jax.tree.leaves(varied.args), strict=True)
  is_varied = any(x is not y for x, y in both)
  varied = varied.moved(1).with_noise(given.keys, LEVELS[2])
  for number, (call, ending) in enumerate([(given, ""), (varied, ", all floats varied")]):
    source = call._replace(source=number)
    if number:
      yield source._replace(name=f"as given{ending}")
    yield source.take(again)._replace(name=f"rows drawn again{ending}")
    for leaf in source.leaves:
      # Where no float is varied, other parameters alone tell no more about each number.
      changes = list(_changes(leaf, integers, floats))[: None if is_varied or number else 1]
      for name, value in changes:
        yield _with_leaf(source, leaf, value)._replace(name=f"{name}{ending}")


def _with_leaf(call: Call, leaf: BatchLeaf, value: np.ndarray) -> Call:
  leaves, treedef = jax.tree.flatten(call.args[leaf.argnum])
  leaves[leaf.position], args = value, list(call.args)
  args[leaf.argnum] = jax.tree.unflatten(treedef, leaves)
  return call._replace(args=tuple(args))


def _changes(
  leaf: BatchLeaf, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[tuple[str, np.ndarray]]:
  """What becomes of a leaf by one change in row 0, or in the first row and the last."""
  name, x, last = leaf.name, leaf.value, leaf.value.shape[leaf.axis] - 1
  if is_key(x):
    return
  new: list[tuple[str, ArrayLike]] = [("inverted", x == 0)] if is_mask(x) else []
  if is_integer(x):
    limits = np.iinfo(x.dtype)
    new += [(f"= {n}", n) for n in integers if limits.min <= n <= limits.max]
  elif np.issubdtype(x.dtype, np.floating):
    new += [(f"= {n:g}", n) for n in floats]
  for change, value in new:
    yield f"{name} {change} in row 0", _put(leaf, value, [0])
    yield f"{name} {change} in rows 0 and {last}", _put(leaf, value, [0, last])
  if not is_mask(x):
    change, value = ("doubled", x * 2) if is_integer(x) else ("halved", x / 2)
    yield f"{name} {change} in row 0", _put(leaf, value, [0])
  if leaf.has_longer_rows:
    empty = next((n for n in integers if n not in (0, -1)), 0) if is_integer(x) else 0
    yield f"{name} = {empty} in all of row 0", _put(leaf, empty, [0], is_whole=True)


def _put(leaf: BatchLeaf, value: ArrayLike, rows: list[int], is_whole: bool = False) -> np.ndarray:
  """A leaf with other rows, but for the first entry of longer ones."""
  out = np.array(leaf.value)
  to, source = (np.moveaxis(x, leaf.axis, 0) for x in (out, np.broadcast_to(value, out.shape)))
  at = (rows, ..., slice(1, None)) if leaf.has_longer_rows and not is_whole else (rows,)
  to[at] = source[at]
  return out


def is_array(x: Leaf) -> bool:
  """Whether `x` is an array, and not a constant of the call."""
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def arrays(args: Args) -> Leaves:
  """The arrays of a call."""
  return [x for x in jax.tree.leaves(args) if is_array(x)]


def is_mask(x: np.ndarray) -> bool:
  """Whether an array holds nothing but 0 and 1."""
  return x.dtype == bool or bool(np.all((x == 0) | (x == 1)))


def is_integer(x: np.ndarray) -> bool:
  """Whether an array holds integers, which may be labels or counts."""
  return np.issubdtype(x.dtype, np.integer)


def may_be_raw_key(x: Leaf) -> bool:
  """Whether `x` looks like an array of raw keys."""
  return getattr(x, "dtype", None) == jnp.uint32 and jnp.shape(x)[-1:] in ((2,), (4,))


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
