"""Batches that differ from the given one in one respect, which may have hidden a defect.

A mean over a mask of ones is the plain mean, and so is one over valid labels where all are valid.
Here a part of row 0 is changed, which makes microbatches uneven that were even. A mean over what
one row alone has adds up as a sum does: so row 0 and the last, which no split keeps together.

Nothing is drawn at random. A named key becomes one of which every draw is the same number, or no
row would have the same noise in a microbatch as in the whole batch.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from optax_accum._check_split.call import Array, Call

# What `jax.random.uniform` draws from a key itself: of the given batch, as other noise, and of the
# varied batch. Dropout keeps, drops, and keeps what is kept rarely.
LEVELS = (0.3, 0.7, 0.05)


def probes_of(
  given: Call, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[Call]:
  """Changed batches; the numbers may say that an entry does not count."""
  yield given.moved(1)._replace(name="parameters moved")
  if any(x.role == "rng" for x in given.arrays):
    yield given.with_noise("rng", LEVELS[1])._replace(name="other noise")
  # On the given floats, which may be all alike, and on others, of which a loss may have no value.
  yield from _altered(given, integers, floats, "")
  varied = _varied(given).moved(1).with_noise("rng", LEVELS[2])
  ending = ", all floats varied"
  yield varied._replace(name=f"as given{ending}")
  yield from _altered(varied, integers, floats, ending)


def _varied(call: Call) -> Call:
  """The call with each float of the batch made smaller, by factors that are all different.

  Masks of floats stay as they are, unless there are no other floats.
  """
  floats = [x for x in call.batch if x.kind in "fc"]
  names = [x.name for x in floats if not x.is_mask]
  names = names or [x.name for x in floats]

  def vary(x):
    if x.name not in names:
      return x.value
    return x.value * (0.6 + 0.4 * np.sin(1.7 * x.places))

  return call.mapped("batch", vary)


def _altered(
  call: Call, integers: Sequence[int], floats: Sequence[float], ending: str
) -> Iterator[Call]:
  """Other rows, and one change in each array of the batch."""
  again = np.arange(call.rows) ** 2 // call.rows
  yield call.take(again, f"rows drawn again{ending}")
  for x in call.batch:
    if x.kind == "key":
      continue
    for change, value in _changes(x, integers, floats):
      new = call.put(f"{x.name} {change}{ending}", x, value)
      yield new._replace(oddity=_oddity(x, value))


def _oddity(x: Array, changed: np.ndarray) -> int:
  """How odd an array is, as `Call` counts it, that was `x`."""
  if x.kind not in "iu" or not x.value.size:
    return 0
  least = np.min(x.value)
  most = np.max(x.value)
  if np.any(changed < min(least, 0)) or np.any(changed > max(most, 0)):
    return 2
  return int(not x.is_mask and bool(np.any(changed < least)))


def _changes(
  x: Array, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[tuple[str, np.ndarray]]:
  """What becomes of an array by one change: in row 0, in the first and the last, or in others."""
  value = x.value
  last = len(x.value) - 1
  is_integer = x.kind in "iu"
  empty = 0
  entries = list[tuple[str, ArrayLike]]()
  if x.is_mask:
    entries += [("inverted", value == 0)]
  if is_integer:
    limits = np.iinfo(value.dtype)
    entries += [
      (f"= {n}", n) for n in integers if limits.min <= n <= limits.max
    ]
    empty = next((n for n in integers if n not in (0, -1)), 0)
  elif x.kind == "f":
    entries += [(f"= {n:g}", n) for n in floats]
  for change, entry in entries:
    yield f"{change} in row 0", _put(x, entry, [0])
    yield f"{change} in rows 0 and {last}", _put(x, entry, [0, last])
  if is_integer and not x.is_mask:  # then row 0 has the largest
    less = np.where(value > np.min(value, initial=0), value - 1, value)
    yield "1 less in all rows but 0", _put(x, less, range(1, last + 1))
  elif not x.is_mask:
    yield "halved in row 0", _put(x, value / 2, [0])
  if x.has_longer_rows:
    yield f"= {empty} in all of row 0", _put(x, empty, [0], is_whole=True)


def _put(
  x: Array, entry: ArrayLike, rows: Sequence[int], is_whole: bool = False
) -> np.ndarray:
  """An array with other rows, but for the first entry of longer ones."""
  out = np.array(x.value)
  to = out
  source = np.broadcast_to(entry, out.shape)
  if x.has_longer_rows and not is_whole:
    to, source = to[..., 1:], source[..., 1:]
  to[[*rows]] = source[[*rows]]
  return out
