"""A call of a loss as arrays, and the same call with others in their place."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Leaf, Leaves, Tree
from optax_accum._check_split.noise import fixed_keys
from optax_accum._microbatches.options import Slot
from optax_accum._microbatches.roles import (
  Arguments,
  by_slot,
  Roles,
  Signature,
)


class Array(NamedTuple):
  """One array of a call: NumPy's, unless it holds keys."""

  value: Leaf
  role: str  # "params", "batch", "rng", "carry", "shared" or "held"
  slot: Slot
  argument: str  # what the loss calls it
  name: str  # as Python writes it: "batch['mask']", "batch.mask"

  @property
  def kind(self) -> str:
    """As NumPy has it, such as "f" for floats, or "key"."""
    return "key" if is_key(self.value) else self.value.dtype.kind

  @property
  def is_mask(self) -> bool:
    return self.kind != "key" and bool(np.isin(self.value, (0, 1)).all())

  @property
  def may_be_key(self) -> bool:
    """Whether it is a key, or has the words of a raw one."""
    x = self.value
    is_raw = x.dtype == np.uint32 and x.shape[-1:] in ((2,), (4,))
    return is_raw or is_key(x)

  @property
  def has_longer_rows(self) -> bool:
    """Whether the entries of a row can be told apart."""
    shape = self.value.shape
    return len(shape) > 1 and shape[-1] > 1

  @property
  def places(self) -> np.ndarray:
    """A number for each place in it."""
    return np.arange(self.value.size).reshape(self.value.shape)

  def moved(self, number: int, size: float) -> np.ndarray:
    """Other floats, by `size` of what they are, or the inverse of flags."""
    if self.kind == "b":
      return ~self.value
    usual = np.sqrt(np.mean(np.abs(self.value) ** 2)) or 1.0
    return self.value + size * usual * np.sin(number * (1.0 + self.places))


class Call(NamedTuple):
  """The arguments of a loss."""

  name: str  # how they differ from those that were given
  arrays: tuple[Array, ...]
  roles: Roles
  arguments: Arguments  # as they were given
  # Of a function of the arguments, and arrays in the place of these: what it returns.
  called: Callable[[Callable[..., Tree], Leaves], Tree]
  taken: Any = None  # which rows it has of another call
  # 1: it has integers that no given row has; 2: they may mean nothing, such as a length of -1.
  oddity: int = 0

  @classmethod
  def of(cls, signature: Signature, args, kwargs, roles: Roles) -> "Call":
    """The given call, in the dtypes of the check. What is no array is a constant."""
    role_of = dict.fromkeys(roles.batch, "batch")
    role_of |= dict.fromkeys(roles.rng, "rng")
    role_of |= dict.fromkeys(roles.carry, "carry")
    role_of |= dict.fromkeys(roles.shared, "shared")
    role_of |= dict.fromkeys(roles.of_step, "held")
    given = by_slot(args, kwargs)
    slots = [*given]
    leaves, treedef = jax.tree_util.tree_flatten_with_path([*given.values()])
    arrays = {}
    for n, (path, x) in enumerate(leaves):
      slot = slots[path[0].idx]
      role = role_of.get(slot, "params")
      is_array = isinstance(x, (jax.Array, np.ndarray, np.generic))
      if is_array or role in ("params", "batch"):
        argument = signature.name(slot).replace("...", f"batch_{slot}")
        name = argument + jax.tree_util.keystr(path[1:])
        value = _in_check_dtype(x)
        arrays[n] = Array(value, role, slot, argument, name)

    def called(fun, values):
      new = dict(zip(arrays, values, strict=True))
      all_leaves = [new.get(n, x) for n, (_, x) in enumerate(leaves)]
      trees = jax.tree.unflatten(treedef, all_leaves)
      named = dict(zip(kwargs, trees[len(args) :], strict=True))
      return fun(*trees[: len(args)], **named)

    return cls("as given", tuple(arrays.values()), roles, given, called)

  @property
  def values(self):
    return [x.value for x in self.arrays]

  @property
  def batch(self) -> list[Array]:
    return [x for x in self.arrays if x.role == "batch"]

  @property
  def rows(self) -> int:
    first, *_ = self.batch
    return len(first.value)

  def mapped(self, role: str, fun: Callable[[Array], Leaf]) -> "Call":
    """The call with `fun` of every array of this role, in its dtype, or keys."""

    def new(x):
      if x.role != role:
        return x
      value = fun(x)
      if not is_key(value):
        value = np.asarray(value, x.value.dtype)
      return x._replace(value=value)

    return self._replace(arrays=tuple(map(new, self.arrays)))

  def put(self, name: str, array: Array, value) -> "Call":
    """The call, by another name, with another value of one array."""
    new = self.mapped(
      array.role, lambda x: value if x.name == array.name else x.value
    )
    return new._replace(name=name)

  def take(self, rows: Sequence[int] | np.ndarray, name: str = "") -> "Call":
    """The call with some rows of the batch."""
    part = self.mapped("batch", lambda x: x.value[rows])
    return part._replace(name=name, taken=rows)

  def moved(self, number: int, size: float = 0.1) -> "Call":
    """The call with other parameters, by a tenth: a weight does not depend on parameters."""
    return self.mapped("params", lambda x: x.moved(number, size))

  def nudged(self) -> "Call":
    """The call with the last bits of the parameters changed."""

    def nudge(x):
      unit = np.finfo(x.value.dtype).eps * np.sign(np.sin(1.0 + x.places))
      return x.value * (1 + 2 * unit)

    return self.mapped("params", nudge)

  def with_noise(self, role: str, level: float) -> "Call":
    """The call with keys of which every draw is the same: typed ones, and those that are named."""

    def fixed(x):
      if x.kind == "key":
        return fixed_keys(x.value.shape, level)
      if role == "rng" and x.may_be_key:
        return fixed_keys(x.value.shape[:-1], level)
      return x.value

    return self.mapped(role, fixed)


def _in_check_dtype(x):
  """An array as NumPy's, its floats in float32, or float64 where x64 is enabled."""
  if is_key(x):
    return x
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.inexact):
    dtype = complex if jnp.iscomplexobj(x) else float
    x = x.astype(dtype)
  return np.asarray(x)
