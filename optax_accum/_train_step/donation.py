"""Which arrays a step can donate: those not deleted, and not passed a second time."""

from collections.abc import Callable, Mapping
import functools
import operator
from typing import Any, TypeAlias
import weakref

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic.trees import Leaf, Leaves, Tree

Shard: TypeAlias = tuple[tuple[int, ...], jnp.dtype]


class Known:
  """The arrays of the last call, by weak references (an id may be used again). Others are new."""

  def __init__(self, leaves: Leaves) -> None:
    alike = len(arrays(leaves)) == len(leaves)
    reference = weakref.ref if alike else lambda x: weakref.ref(x) if _has_buffers(x) else _nothing
    self._references = list(map(reference, leaves))

  def new(self, leaves: Leaves) -> Leaves:
    """Those that are not what was there in the same place."""
    if len(leaves) != len(self._references):
      return leaves
    known = list(map(operator.call, self._references))
    if all(map(operator.is_, leaves, known)):
      return []
    return [x for x, before in zip(leaves, known, strict=True) if x is not before]


def check_alive(leaves: Leaves, arguments: Callable[[], Mapping[str, Tree]]) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process."""
  if not any(map(operator.methodcaller("is_deleted"), arrays(leaves))):
    return
  for argument, tree in arguments().items():
    for name, x in _validate.named_leaves(argument, tree):
      if _has_buffers(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: an earlier step updated parameters and state in place. Use"
          " what that step returned, or make the step with donate=False."
        )


def distinct(passed: Leaves, placed: Leaves, others: Leaves, new: Leaves) -> Leaves:
  """The arrays to donate, with a copy of each that is passed a second time.

  A buffer can be donated once. Over several devices JAX ends the process if it is used twice, as in
  a state of optax's `lbfgs`, or by a teacher that starts as the parameters. An array that another
  argument holds too is donated as a copy, so that it lives on.

  Two arrays can share a buffer: `jax.device_put` puts an array on a mesh without a copy for the
  device that has it (with ``may_alias=False`` too). Comparing buffers is slow. Those of what a step
  returned were new then, so only arrays like one that came since are compared.

  Args:
    passed: Parameters and state, which are donated, as they were passed.
    placed: The same, as they were put on the mesh.
    others: All other arrays that the step is passed, and that live on as they were passed.
    new: Those of all these that the last call neither returned nor was passed.
  """
  shards = _shards(new)
  suspects = shards & _shards(_like_one(shards, placed))
  ids = list(map(id, arrays([*passed, *others])))
  if not suspects and len(set(ids)) == len(ids):
    return placed

  def marks(x: Leaf, held: Leaf) -> set[int]:
    if not _has_buffers(x):
      return set()
    return {id(x), *(_buffers(held) if _shards([held]) & suspects else ())}

  used = set[int]().union(*(marks(x, x) for x in others))
  leaves = []
  for x, y in zip(passed, placed, strict=True):
    mine = marks(x, y)
    leaves.append(y if used.isdisjoint(mine) else _copied(y))
    used |= mine
  return leaves


def arrays(leaves: Leaves) -> Leaves:
  """Those that have buffers."""
  if all(map(_is_array, set(map(type, leaves)))):  # as in most calls
    return leaves
  return list(filter(_has_buffers, leaves))


def _has_buffers(x: Leaf) -> bool:
  kind: Any = type(x)
  return _is_array(kind)


@functools.cache
def _is_array(kind: type) -> bool:
  # Tracers are copied by the compiler where they must be.
  return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def _nothing() -> None:
  """In place of a weak reference to what can have none."""


def _shards(leaves: Leaves) -> set[Shard]:
  """Shape and dtype of what one device has: arrays that share a buffer are alike in both."""
  kinds = {(x.aval, x.sharding) for x in arrays(leaves)}
  return {(sharding.shard_shape(aval.shape), aval.dtype) for aval, sharding in kinds}


def _like_one(shards: set[Shard], leaves: Leaves) -> Leaves:
  """The arrays that could be cut into one of these shards. Asking each for its own takes longer."""
  if not shards:
    return []

  def holds_one(aval: jax.core.ShapedArray) -> bool:
    alike = [shape for shape, dtype in shards if (len(shape), dtype) == (aval.ndim, aval.dtype)]
    return any(all(map(operator.ge, aval.shape, shape)) for shape in alike)

  avals = set(map(operator.attrgetter("aval"), arrays(leaves)))
  alike = set(filter(holds_one, avals))
  return [x for x in arrays(leaves) if x.aval in alike] if alike else []


def _buffers(x: jax.Array) -> tuple[int, ...]:
  """Where the array is in the memory of each device of this process."""
  try:
    return tuple(shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards)
  except jax.errors.JaxRuntimeError:  # not every runtime tells
    return (id(x),)


def _copied(x: jax.Array) -> jax.Array:
  """A copy that is sharded as `x`, in the same words: else the step would be compiled anew."""
  copy = jnp.copy(x)
  return copy if copy.sharding == x.sharding else jax.device_put(copy, x.sharding)
