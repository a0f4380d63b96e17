"""Batches that differ from the given one in one respect, which may have hidden a defect.

A mean over a mask of ones is the plain mean, and so is a mean over valid labels where all are
valid. Here a part of row 0 is changed, which makes microbatches uneven that were even. A mean over
what one row alone has adds up as a sum does. So row 0 and the last are changed too, which no split
keeps together. Nothing is drawn at random.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_accum._check_split.fixed_noise import fixed_keys, is_key, LEVELS, may_be_raw_key

Arguments = tuple[Any, ...]
VARIED = ", all floats varied"  # ends the names of probes with other parameters and other floats


class Probe(NamedTuple):
  """One way to call the loss."""

  name: str
  args: Arguments


class BatchLeaf(NamedTuple):
  """One array of the batch: where it is, and which axis has the rows."""

  argnum: int
  position: int  # among the leaves of its argument
  path: str  # as Python writes it after the argument: "['mask']", ".mask"
  axis: int  # counted from the left
  value: Any


def batch_leaves(args: Arguments, batch: Mapping[int, int]) -> list[BatchLeaf]:
  """The arrays of the batch, which has the arguments `batch` and their axes."""
  return [
    BatchLeaf(argnum, position, jax.tree_util.keystr(path), axis % leaf.ndim, leaf)
    for argnum, axis in batch.items()
    for position, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(args[argnum]))
  ]


def take_rows(args: Arguments, batch: Mapping[int, int], rows: Any) -> Arguments:
  """The arguments with some rows of the batch, in the order of `rows`."""

  def take(argnum: int, x: Any) -> Any:
    return x[(slice(None),) * (batch[argnum] % x.ndim) + (rows,)]

  return map_leaves(args, batch, take)


def move(args: Arguments, argnums: Sequence[int], number: int) -> Arguments:
  """The arguments with others at `argnums`, by a tenth: a weight does not depend on parameters."""

  def moved(argnum: int, x: Any) -> Any:
    if not np.issubdtype(x.dtype, np.inexact):
      return x
    size = np.sqrt(np.mean(np.abs(x) ** 2)) or 1.0
    wave = np.sin(number * (1.0 + np.arange(x.size))).reshape(x.shape)
    return (x + 0.1 * size * wave).astype(x.dtype)

  return map_leaves(args, argnums, moved)


def nudge(args: Arguments, argnums: Sequence[int]) -> Arguments:
  """The arguments with the last bits of those at `argnums` changed."""

  def nudged(_: int, x: Any) -> Any:
    if not np.issubdtype(x.dtype, np.inexact):
      return x
    steps = np.sin(1.0 + np.arange(x.size)).reshape(x.shape)
    return (x * (1 + 2 * np.finfo(x.dtype).eps * np.sign(steps))).astype(x.dtype)

  return map_leaves(args, [i % len(args) for i in argnums], nudged)


def with_noise(
  args: Arguments, argnums: Sequence[int], level: float, raw: bool = True
) -> Arguments:
  """The arguments with keys at `argnums`, `raw` ones too, of which every draw is the same."""
  is_one = lambda x: is_key(x) or (raw and may_be_raw_key(x))  # noqa: E731
  return map_leaves(args, argnums, lambda _, x: fixed_keys(x, level) if is_one(x) else x)


def all_rows_alike(args: Arguments, batch: Mapping[int, int]) -> Arguments:
  """The arguments with the masks, labels and counts of row 0 in every row."""

  def alike(leaf: BatchLeaf) -> Any:
    if is_key(leaf.value) or not (is_mask(leaf.value) or is_integer(leaf.value)):
      return leaf.value
    return np.repeat(leaf.value.take([0], leaf.axis), leaf.value.shape[leaf.axis], leaf.axis)

  for leaf in batch_leaves(args, batch):
    args = _with_leaf(args, leaf, alike(leaf))
  return args


class Change(NamedTuple):
  """What to change in row 0 of a leaf of the batch, or in the first and the last."""

  name: str
  leaf: BatchLeaf
  new: Callable[[Any], Any]
  is_whole: bool = False  # all of the row, and not all but the first entry of longer ones
  and_last: bool = False


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

  `numbers` are the integers, and the floats, that may say that an entry does not count; `names`
  are those of the arguments.
  """
  yield Probe("as given", args)
  yield Probe("parameters moved", move(args, argnums, 1))
  if keys:
    yield Probe("other noise", with_noise(args, keys, LEVELS[1]))
  # On the given floats, which may be all alike, and on others, of which a loss may have no value.
  varied = vary(args, batch)
  is_varied = any(x is not y for x, y in zip(*map(jax.tree.leaves, (args, varied)), strict=True))
  for source, ending in ((args, ""), (move(varied, argnums, 1), VARIED)):
    if ending:
      yield Probe(f"as given{VARIED}", source)
    yield Probe(f"rows drawn again{ending}", take_rows(source, batch, np.arange(rows) ** 2 // rows))
    for leaf in batch_leaves(source, batch):
      changes = list(_changes(leaf, f"{names[leaf.argnum]}{leaf.path}", *numbers))
      # Where no float is varied, other parameters alone tell no more about each number.
      for change in changes if is_varied or ending else changes[:1]:
        yield Probe(change.name + ending, _changed(source, change))


def _changes(
  leaf: BatchLeaf, name: str, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[Change]:
  """What to change in row 0 of a leaf, which is called `name`."""
  x = leaf.value
  if is_key(x):
    return
  if is_mask(x):
    yield from _in_one_and_two_rows(f"{name} inverted", leaf, lambda x: x == 0)
  elif np.issubdtype(x.dtype, np.inexact):
    yield Change(f"{name} halved in row 0", leaf, lambda x: x / 2)
  if is_integer(x):
    limits = np.iinfo(x.dtype)
    for integer in integers:
      if limits.min <= integer <= limits.max:
        yield from _in_one_and_two_rows(f"{name} = {integer}", leaf, _constant(integer))
    if not is_mask(x):
      yield Change(f"{name} doubled in row 0", leaf, lambda x: x * 2)
  elif np.issubdtype(x.dtype, np.floating):
    for number in floats:
      yield from _in_one_and_two_rows(f"{name} = {number:g}", leaf, _constant(number))
  if _has_longer_rows(leaf):
    empty = next((n for n in integers if n not in (0, -1)), 0) if is_integer(x) else 0
    yield Change(f"{name} = {empty} in all of row 0", leaf, _constant(empty), True)


def _in_one_and_two_rows(name: str, leaf: BatchLeaf, new: Callable[[Any], Any]) -> Iterator[Change]:
  yield Change(f"{name} in row 0", leaf, new)
  last = leaf.value.shape[leaf.axis] - 1
  yield Change(f"{name} in rows 0 and {last}", leaf, new, and_last=True)


def vary(args: Arguments, batch: Mapping[int, int]) -> Arguments:
  """The arguments with each float of the batch made smaller, by factors that are all different.

  Masks of floats stay as they are, unless there are no other floats.
  """
  floats = [x for *_, x in batch_leaves(args, batch) if _is_inexact(x)]
  no_others = all(map(is_mask, floats))

  def varied(_: int, x: Any) -> Any:
    if not _is_inexact(x) or (is_mask(x) and not no_others):
      return x
    return (x * (0.6 + 0.4 * np.sin(1.7 * np.arange(x.size))).reshape(x.shape)).astype(x.dtype)

  return map_leaves(args, batch, varied)


def negative_labels(args: Arguments, batch: Mapping[int, int]) -> list[int]:
  """The least number of each integer leaf that has a negative one."""
  leaves = [leaf.value for leaf in batch_leaves(args, batch) if not is_key(leaf.value)]
  return [int(x.min()) for x in leaves if is_integer(x) and x.size and x.min() < 0]


def is_mask(x: np.ndarray) -> bool:
  """Whether an array holds nothing but 0 and 1."""
  return x.dtype == bool or bool(np.all((x == 0) | (x == 1)))


def is_integer(x: np.ndarray) -> bool:
  """Whether an array holds integers, which may be labels or counts."""
  return np.issubdtype(x.dtype, np.integer)


def _constant(number: float) -> Callable[[Any], Any]:
  return lambda x: np.full_like(x, number)


def _is_inexact(x: Any) -> bool:
  return not is_key(x) and bool(np.issubdtype(x.dtype, np.inexact))


def _has_longer_rows(leaf: BatchLeaf) -> bool:
  """Whether the entries of a row can be told apart."""
  row = np.moveaxis(leaf.value, leaf.axis, 0)[:1]
  return bool(row.ndim > 1 and row.shape[-1] > 1)


def _changed(args: Arguments, change: Change) -> Arguments:
  """The arguments with rows of a leaf changed, but for the first entry of longer rows."""
  leaf = change.leaf
  new = np.array(leaf.value)
  rows = np.moveaxis(new, leaf.axis, 0)
  rows = rows[:: len(rows) - 1] if change.and_last else rows[:1]
  part = rows[..., 1:] if _has_longer_rows(leaf) and not change.is_whole else rows
  part[...] = change.new(part).astype(new.dtype)
  return _with_leaf(args, leaf, new)


def _with_leaf(args: Arguments, leaf: BatchLeaf, value: Any) -> Arguments:
  treedef: Any
  leaves, treedef = jax.tree.flatten(args[leaf.argnum])
  leaves[leaf.position] = value
  return (*args[: leaf.argnum], treedef.unflatten(leaves), *args[leaf.argnum + 1 :])


def map_leaves(args: Arguments, argnums: Any, fun: Callable[[int, Any], Any]) -> Arguments:
  """The arguments with `fun` of every leaf of those at `argnums`."""
  return tuple(
    jax.tree.map(lambda leaf, i=i: fun(i, leaf), x) if i in argnums else x
    for i, x in enumerate(args)
  )
