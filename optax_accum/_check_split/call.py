"""A call of a loss as arrays, and altered calls, which show what the given one may hide.

A mean over a mask of ones is the plain mean, and so is one over labels that are all valid. So
altered batches have other floats and parameters, and each has a part of a mask turned over, a
number that the loss compares with, or smaller integers.

Nothing is drawn at random. A named key becomes one of which every draw is the same number, or no
row would have the same noise in a microbatch as in the whole batch.
"""

from collections.abc import Callable, Iterator
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Args, Kwargs, Leaf, Leaves
from optax_accum._microbatches.roles import Roles, Signature

FIXED = "key<fixed>"  # the dtype of keys of which every draw is one number
# What `jax.random.uniform` draws of them: in the given batch, in altered ones, and in one more. So
# dropout keeps, keeps what is kept rarely, and drops.
_GIVEN, _RARE, _OTHER = 0.3183, 0.0517, 0.7071


class Array(NamedTuple):
  """One array of a call: NumPy's, unless it holds keys."""

  value: Leaf
  role: str  # a field of `Roles`
  argument: str  # what the loss calls it
  name: str  # as Python writes it: "batch['mask']", "batch.mask"

  @property
  def kind(self) -> str:
    """As NumPy has it, such as "f" for floats, or "key"."""
    if is_key(self.value):
      return "key"
    return self.value.dtype.kind.replace("V", "f")  # of bfloat16

  @property
  def is_mask(self) -> bool:
    """Whether it has zeros and ones alone, in any dtype."""
    return self.kind != "key" and bool(np.isin(self.value, (0, 1)).all())

  def waves(self, speed: float) -> np.ndarray:
    """A number between -1 and 1 for each place in it, in its dtype."""
    places = np.arange(1, self.value.size + 1).reshape(self.value.shape)
    return np.sin(speed * places).astype(self.value.dtype)

  def moved(self, size: float) -> np.ndarray:
    """Other floats, by `size` of what they are."""
    usual = np.sqrt(np.mean(np.abs(self.value) ** 2)) or 1.0
    moved = self.value + size * usual * self.waves(1.0)
    return moved.astype(self.value.dtype)


class Call(NamedTuple):
  """The arguments of a loss."""

  name: str  # how they differ from those that were given
  arrays: tuple[Array, ...]
  # Of arrays in the place of these: the arguments.
  arguments: Callable[[Leaves], tuple[Args, Kwargs]]

  @classmethod
  def of(cls, signature: Signature, args, kwargs, roles: Roles) -> "Call":
    """The given call. What is no array is a constant."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    arrays = {}
    for n, ((kind, first, *path), x) in enumerate(leaves):
      slot = first.key if kind.idx else first.idx
      role = next(
        role for role in roles._fields if slot in getattr(roles, role)
      )
      if hasattr(x, "dtype") or role in ("differentiated", "batch"):
        argument = signature.name(slot).replace("...", f"batch_{slot}")
        name = argument + jax.tree_util.keystr(tuple(path))
        arrays[n] = Array(_copied(x), role, argument, name)

    def arguments(values):
      new = dict(zip(arrays, values, strict=True))
      return jax.tree.unflatten(
        treedef, [new.get(n, x) for n, (_, x) in enumerate(leaves)]
      )

    call = cls("as given", tuple(arrays.values()), arguments)
    return call.with_noise("as given", _GIVEN)

  @property
  def values(self) -> list[Leaf]:
    return [x.value for x in self.arrays]

  def of_role(self, *roles: str) -> list[Array]:
    return [x for x in self.arrays if x.role in roles]

  def mapped(
    self, name: str, fun: Callable[[Array], Leaf], *roles: str
  ) -> "Call":
    """The call with `fun` of every array of these roles."""
    arrays = [
      x._replace(value=fun(x)) if x.role in roles else x for x in self.arrays
    ]
    return self._replace(name=name, arrays=tuple(arrays))

  def put(self, change: str, array: Array, numbers, where) -> "Call":
    """The call with other numbers in some places of one array."""
    value = np.array(array.value)
    value[where] = np.broadcast_to(numbers, value.shape)[where]
    name = f"{array.name} {change}"
    return self.mapped(
      name, lambda x: value if x is array else x.value, array.role
    )

  def take(self, rows: np.ndarray) -> "Call":
    """The call with some rows of the batch."""
    return self.mapped(self.name, lambda x: x.value[rows], "batch")

  def moved(self, size: float) -> "Call":
    """The call with other parameters: a weight does not depend on them."""
    return self.mapped(self.name, lambda x: x.moved(size), "differentiated")

  def with_noise(
    self, name: str, level: float, descends: bool = False
  ) -> "Call":
    """The call with keys of which every draw is one number, or descends from row to row.

    These are typed keys, and those that are named.
    """

    def fixed(x):
      if x.kind == "key":
        return _fixed_keys(x.value.shape, level, descends)
      if x.role == "rng" and x.kind == "u":  # the words of a raw key
        return _fixed_keys(x.value.shape[:-1], level, descends)
      return x.value

    return self.mapped(name, fixed, "rng", "carry", "of_step")

  def varied(
    self, name: str, speed: float = 1.7, middle: float = 0.6
  ) -> "Call":
    """The call with other parameters and noise, and smaller floats, each by another factor."""

    def vary(x):
      if x.kind in "fc" and not x.is_mask:
        value = x.value * (middle + (1 - middle) * x.waves(speed))
        return value.astype(x.value.dtype)
      return x.value

    varied = self.mapped(name, vary, "batch")
    return varied.moved(speed / 10).with_noise(name, _RARE)

  def altered(self, facts, microbatch: np.ndarray) -> Iterator["Call"]:
    """Calls that differ from this one in one respect. `microbatch` has the rows of one."""
    yield self.varied("floats of other signs", 2.3, 0.0)
    if facts.keys:
      # A loss that sorts may put rows in an order that it draws.
      yield self.with_noise("other noise", _OTHER, descends=facts.sorts)
    for x in self.of_role("batch"):
      # But for the first entry, or weights of all entries and of the next ones would be alike.
      most: Any = ()
      if x.value.ndim > 1 and x.value.shape[-1] > 1:
        most = ..., np.s_[1:]
      if x.is_mask:
        yield self.put("inverted in row 0", x, x.value == 0, (0, *most))
        for number in (0, 1):
          change = f"= {number} in a microbatch"
          yield self.put(change, x, number, microbatch)
      elif x.kind in "iu":
        half = np.where(x.value > 0, x.value - x.value // 2, x.value)
        yield self.put("halved but in row 0", x, half, np.s_[1:])
      if x.kind in "iu":
        for number in facts.numbers:
          change = f"= {number} in the first and last row"
          yield self.put(change, x, number, ([0, -1], *most))


def _copied(x):
  """A copy on the host. It is no view: a step could not donate what has one."""
  if is_key(x):
    data = jnp.array(np.array(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return np.array(x, jnp.result_type(x))


def _fixed_keys(
  shape: tuple[int, ...], level: float, descends: bool
) -> jax.Array:
  """Keys of which `jax.random.uniform` draws `level`, and then, if it descends, ever less."""
  # A step that float32 resolves: it keeps 23 of the 32 bits.
  words = jnp.array([int(level * 2**32), descends << 9], jnp.uint32)
  data = jnp.broadcast_to(words, (*shape, 2))
  return jax.random.wrap_key_data(data, impl=_one_number())


def _split(key, shape: tuple[int, ...]) -> jax.Array:
  # All children are one, because rows may have a key each. It is not the parent, because loops that
  # draw until they like what they drew would not end.
  child = key[0] * jnp.uint32(747796405) + jnp.uint32(2891336453)
  return jnp.broadcast_to(jnp.stack([child, key[1]]), (*shape, 2))


def _random_bits(key, width: int, shape: tuple[int, ...]) -> jax.Array:
  rows = jax.lax.broadcasted_iota(jnp.uint32, shape or (1,), 0)
  words = (key[0] - key[1] * rows).reshape(shape)
  if width > 32:
    return words.astype(jnp.uint64) << jnp.uint64(32)
  return (words >> jnp.uint32(32 - width)).astype(f"uint{width}")


@functools.cache
def _one_number():
  """The implementation of keys of which every draw is one number."""
  from jax.extend.random import define_prng_impl  # training does without

  return define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.zeros((2,), jnp.uint32),
    split=_split,
    random_bits=_random_bits,
    fold_in=lambda key, data: key,
    name="fixed",
    tag="fixed",
  )
