"""Batches that differ from the given one in one respect, which may have hidden a defect.

A mean over a mask of ones is the plain mean, and so is one over valid labels where all are valid.
Here a part of row 0 is changed, which makes microbatches uneven that were even. A mean over what
one row alone has adds up as a sum does: so row 0 and the last, which no split keeps together.

Nothing is drawn at random. A named key becomes one of which every draw is the same number, or no
row would have the same noise in a microbatch as in the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf, Leaves, Tree
from optax_accum._microbatches.options import Slot
from optax_accum._microbatches.roles import (
  Arguments,
  by_slot,
  Roles,
  Signature,
)

# What `jax.random.uniform` draws from a key itself: of the given batch, as other noise, and of the
# varied batch. Dropout keeps, drops, and keeps what is kept rarely.
LEVELS = (0.3, 0.7, 0.05)
FIXED = "key<fixed>"  # the dtype of such keys


class Array(NamedTuple):
  """One array of a call: NumPy's, unless it holds keys."""

  value: Leaf
  role: str  # "params", "batch", "rng", "carry" or "shared"
  slot: Slot
  argument: str  # what the loss calls it
  name: str  # as Python writes it: "batch['mask']", "batch.mask"
  axis: int  # of the rows, counted from the left

  @property
  def kind(self) -> str:
    """As NumPy has it, such as "f" for floats, or "key"."""
    return "key" if is_key(self.value) else self.value.dtype.kind

  @property
  def is_mask(self) -> bool:
    return self.kind != "key" and bool(
      np.all((self.value == 0) | (self.value == 1))
    )

  @property
  def may_be_key(self) -> bool:
    """Whether it is a key, or has the words of a raw one."""
    x = self.value
    return self.kind == "key" or (
      x.dtype == np.uint32 and x.shape[-1:] in ((2,), (4,))
    )

  @property
  def has_longer_rows(self) -> bool:
    """Whether the entries of a row can be told apart."""
    shape = np.moveaxis(self.value, self.axis, 0).shape
    return len(shape) > 1 and shape[-1] > 1

  def moved(self, number: int, size: float) -> np.ndarray:
    """Other floats, by `size` of what they are, or the inverse of flags."""
    if self.kind == "b":
      return ~self.value
    by = size * (np.sqrt(np.mean(np.abs(self.value) ** 2)) or 1.0)
    return self.value + by * np.sin(number * (1.0 + self.places))

  @property
  def places(self) -> np.ndarray:
    """A number for each place in it."""
    return np.arange(self.value.size).reshape(self.value.shape)


class Call(NamedTuple):
  name: str
  arrays: tuple[Array, ...]
  roles: Roles
  arguments: Arguments
  called: Callable[
    [Callable[..., Tree], Leaves], Tree
  ]  # a function of the arguments, on arrays
  taken: np.ndarray | None = None  # which rows it has of another call
  # 1: it has integers that no given row has; 2: they may mean nothing, such as a length of -1.
  oddity: int = 0

  @classmethod
  def of(
    cls, signature: Signature, args: Args, kwargs: Kwargs, roles: Roles
  ) -> "Call":
    """The given call, in the dtypes of the check. What is no array is a constant."""
    role_of = {
      slot: role
      for role in ("batch", "rng", "carry", "shared")
      for slot in getattr(roles, role)
    }
    slots: list[Slot] = [*range(len(args)), *kwargs]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
      [*args, *kwargs.values()]
    )
    arrays = {}
    for n, (path, leaf) in enumerate(leaves):
      slot = slots[path[0].idx]
      role, argument = role_of.get(slot, "params"), signature.name(slot)
      if role in ("params", "batch") or isinstance(
        leaf, (jax.Array, np.ndarray, np.generic)
      ):
        argument = argument.replace("...", f"batch_{slot}")
        value, name = (
          _in_check_dtype(leaf),
          argument + jax.tree_util.keystr(path[1:]),
        )
        axis = roles.batch.get(slot, 0) % (value.ndim or 1)
        arrays[n] = Array(value, role, slot, argument, name, axis)

    def called(fun: Callable[..., Tree], values: Leaves) -> Tree:
      new, count = dict(zip(arrays, values, strict=True)), len(args)
      trees = jax.tree.unflatten(
        treedef, [new.get(n, x) for n, (_, x) in enumerate(leaves)]
      )
      return fun(
        *trees[:count], **dict(zip(kwargs, trees[count:], strict=True))
      )

    arguments = by_slot(args, kwargs)
    return cls("as given", tuple(arrays.values()), roles, arguments, called)

  @property
  def values(self) -> Leaves:
    return [x.value for x in self.arrays]

  @property
  def batch(self) -> list[Array]:
    return [x for x in self.arrays if x.role == "batch"]

  @property
  def rows(self) -> int:
    return self.batch[0].value.shape[self.batch[0].axis]

  def mapped(self, role: str, fun: Callable[[Array], Leaf]) -> "Call":
    """The call with `fun` of every array of this role, in its dtype, or keys."""
    new = lambda x, y: y if is_key(y) else np.asarray(y, x.value.dtype)  # noqa: E731
    each = [
      x._replace(value=new(x, fun(x))) if x.role == role else x
      for x in self.arrays
    ]
    return self._replace(arrays=tuple(each))

  def take(self, rows: np.ndarray, name: str = "") -> "Call":
    """The call with some rows of the batch."""
    part = self.mapped(
      "batch", lambda x: x.value[(slice(None),) * x.axis + (rows,)]
    )
    return part._replace(name=name, taken=rows)

  def moved(self, number: int, size: float = 0.1) -> "Call":
    """The call with other parameters, by a tenth: a weight does not depend on parameters."""
    return self.mapped("params", lambda x: x.moved(number, size))

  def moved_carry(self, name: str, size: float) -> "Call":
    """The call with another value of one array of the carry."""
    return self.mapped(
      "carry", lambda x: x.moved(1, size) if x.name == name else x.value
    )

  def nudged(self) -> "Call":
    """The call with the last bits of the parameters changed."""

    def units(x):
      return 2 * np.finfo(x.value.dtype).eps * np.sign(np.sin(1.0 + x.places))

    return self.mapped("params", lambda x: x.value * (1 + units(x)))

  def varied(self) -> "Call":
    """The call with each float of the batch made smaller, by factors that are all different.

    Masks of floats stay as they are, unless there are no other floats.
    """
    floats = [x for x in self.batch if x.kind in "fc"]
    names = {x.name for x in floats if not x.is_mask} or {
      x.name for x in floats
    }

    def factors(x):
      return 0.6 + 0.4 * np.sin(1.7 * x.places) if x.name in names else 1

    return self.mapped(
      "batch", lambda x: x.value if x.kind == "key" else x.value * factors(x)
    )

  def with_noise(self, role: str, level: float) -> "Call":
    """The call with keys of which every draw is the same: typed ones, and those that are named."""

    def fixed(x: Array) -> Leaf:
      if not (x.may_be_key if role == "rng" else x.kind == "key"):
        return x.value
      shape = x.value.shape if x.kind == "key" else x.value.shape[:-1]
      data = jnp.full((*shape, 1), int(level * 2**32), jnp.uint32)
      return jax.random.wrap_key_data(data, impl=_one_number())

    return self.mapped(role, fixed)


def _in_check_dtype(x: Leaf) -> Leaf:
  """An array as NumPy's, its floats in float32, or float64 where x64 is enabled."""
  if is_key(x):
    return x
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.inexact):
    x = x.astype(complex if jnp.iscomplexobj(x) else float)
  return np.asarray(x)


def probes_of(
  given: Call, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[Call]:
  """The given call, and changed ones; the numbers may say that an entry does not count."""
  yield given
  yield given.moved(1)._replace(name="parameters moved")
  if any(x.role == "rng" for x in given.arrays):
    yield given.with_noise("rng", LEVELS[1])._replace(name="other noise")
  # On the given floats, which may be all alike, and on others, of which a loss may have no value.
  varied, again = given.varied(), np.arange(given.rows) ** 2 // given.rows
  varied = varied.moved(1).with_noise("rng", LEVELS[2])
  for source, ending in [(given, ""), (varied, ", all floats varied")]:
    if source is varied:
      yield source._replace(name=f"as given{ending}")
    yield source.take(again, f"rows drawn again{ending}")
    for n, x in enumerate(source.arrays):
      for name, value in (
        _changes(x, integers, floats) if x.role == "batch" else ()
      ):
        arrays = (
          *source.arrays[:n],
          x._replace(value=value),
          *source.arrays[n + 1 :],
        )
        yield source._replace(
          name=f"{name}{ending}", arrays=arrays, oddity=_oddity(x, value)
        )


def _oddity(x: Array, changed: np.ndarray) -> int:
  """How odd an array is, as `Call` counts it, that was `x`."""
  if x.kind not in "iu" or not x.value.size:
    return 0
  least, most = np.min(x.value), np.max(x.value)
  if np.any(changed < min(least, 0)) or np.any(changed > max(most, 0)):
    return 2
  return int(not x.is_mask and bool(np.any(changed < least)))


def _changes(
  x: Array, integers: Sequence[int], floats: Sequence[float]
) -> Iterator[tuple[str, np.ndarray]]:
  """What becomes of an array by one change: in row 0, in the first and the last, or in others."""
  if x.kind == "key":
    return
  name, value, last = x.name, x.value, x.value.shape[x.axis] - 1
  new: list[tuple[str, ArrayLike]] = (
    [("inverted", value == 0)] if x.is_mask else []
  )
  if x.kind in "iu":
    limits = np.iinfo(value.dtype)
    new += [(f"= {n}", n) for n in integers if limits.min <= n <= limits.max]
  elif x.kind == "f":
    new += [(f"= {n:g}", n) for n in floats]
  for change, entry in new:
    yield f"{name} {change} in row 0", _put(x, entry, [0])
    yield f"{name} {change} in rows 0 and {last}", _put(x, entry, [0, last])
  if x.kind in "iu" and not x.is_mask:  # then row 0 has the largest
    less = np.where(value > np.min(value, initial=0), value - 1, value)
    yield f"{name} 1 less in all rows but 0", _put(x, less, range(1, last + 1))
  elif not x.is_mask:
    yield f"{name} halved in row 0", _put(x, value / 2, [0])
  if x.has_longer_rows:
    empty = (
      next((n for n in integers if n not in (0, -1)), 0)
      if x.kind in "iu"
      else 0
    )
    yield (
      f"{name} = {empty} in all of row 0",
      _put(x, empty, [0], is_whole=True),
    )


def _put(
  x: Array, entry: ArrayLike, rows: Sequence[int], is_whole: bool = False
) -> np.ndarray:
  """An array with other rows, but for the first entry of longer ones."""
  out = np.array(x.value)
  to, source = (
    np.moveaxis(y, x.axis, 0) for y in (out, np.broadcast_to(entry, out.shape))
  )
  at = (
    ([*rows], ..., slice(1, None))
    if x.has_longer_rows and not is_whole
    else ([*rows],)
  )
  to[at] = source[at]
  return out


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  # All children are one, because rows may have a key each. It is not the parent, because loops that
  # draw until they like what they drew would not end.
  child = key * jnp.uint32(747796405) + jnp.uint32(2891336453)
  return jnp.broadcast_to(child, (*shape, 1))


def _random_bits(
  key: jax.Array, width: int, shape: tuple[int, ...]
) -> jax.Array:
  word, dtype = (
    key[0] >> jnp.uint32(max(32 - width, 0)),
    jnp.dtype(f"uint{width}"),
  )
  return jnp.full(
    shape, word.astype(dtype) << jnp.asarray(max(width - 32, 0), dtype)
  )


@functools.cache
def _one_number() -> Any:
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
