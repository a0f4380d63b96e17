"""Which arrays a step can be donated: those that are there, and are not given a second time."""

from collections.abc import Callable, Mapping, Sequence
import functools
import operator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from optax_accum import _validate

Leaves: TypeAlias = list[Any]
Shard: TypeAlias = tuple[Any, Any]  # shape and dtype
Placed: TypeAlias = tuple[Leaves, Leaves]  # as they were passed, and as they were put on a mesh


def check_alive(leaves: Leaves, arguments: Callable[[], Mapping[str, Any]]) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process.

  `leaves` are those of the `arguments`, which messages call by these names.
  """
  if not any(map(operator.methodcaller("is_deleted"), arrays(leaves))):
    return
  for argument, tree in arguments().items():
    for name, x in _validate.named_leaves(argument, tree):
      if _has_buffers(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: a step updates parameters and state in place, and deletes what"
          " it is given. Use what that step returned, or donate=False."
        )


class Shards:
  """Shapes and dtypes of what one device has of the arrays that a step returns.

  They are known when the step is traced, so that no call has to ask every array.
  """

  def __init__(self) -> None:
    self._known: set[Shard] = set()
    self._whole: set[Shard] = set()

  def add(self, leaves: Leaves, shardings: Sequence[Any]) -> None:
    """Adds arrays. One whose sharding is None is sharded as XLA chooses."""
    for x, sharding in zip(leaves, shardings, strict=True):
      if sharding is None:
        self._whole.add((jnp.shape(x), jnp.result_type(x)))
      else:
        self._known.add((sharding.shard_shape(jnp.shape(x)), jnp.result_type(x)))

  def may_have(self, leaves: Leaves) -> bool:
    """Whether one of the `leaves` may share a buffer with what a step returned, before or since."""
    return any(shard in self._known or self._divides(shard) for shard in _shards(leaves))

  def _divides(self, shard: Shard) -> bool:
    def divides(part: int, n: int) -> bool:
      return part == n or (part != 0 and n % part == 0)

    shape, dtype = shard
    return any(
      dtype == kind and len(shape) == len(whole) and all(map(divides, shape, whole))
      for whole, kind in self._whole
    )


def distinct(donated: Placed, others: Leaves, new: Leaves) -> Leaves:
  """What is to be donated, with a copy of each array that is passed a second time.

  XLA wants to be donated a buffer once, and over several devices JAX ends the process if it is
  used twice. A state of optax's `lbfgs` is such a case, and a teacher that starts as the
  parameters. What is passed elsewhere too is donated as a copy, so that it lives on.

  Two arrays can share a buffer: `jax.device_put` puts an array on a mesh without a copy for the
  device that has it (with ``may_alias=False`` too). To look at buffers is slow. What a step
  returned is in buffers that nothing else had then, so only arrays that are new are looked at.

  Args:
    donated: Parameters and state, as they were passed and as they were put on the mesh.
    others: All other arrays that the step is passed, and that live on as they were passed.
    new: Those of all these that are not of the last call.
  """
  passed, placed = donated
  suspects = _shards(new) & _shards(placed)
  ids = list(map(id, arrays([*passed, *others])))
  if not suspects and len(set(ids)) == len(ids):
    return placed

  def marks(x: Any, held: Any) -> set[Any]:
    if not _has_buffers(x):
      return set()
    return {id(x), *(_buffers(held) if _one_shard(held) in suspects else ())}

  used = set[Any]().union(*(marks(x, x) for x in others))
  leaves = []
  for x, y in zip(passed, placed, strict=True):
    mine = marks(x, y)
    leaves.append(y if used.isdisjoint(mine) else _copied(y))
    used |= mine
  return leaves


def arrays(leaves: Leaves) -> Leaves:
  """Those that have buffers."""
  if all(map(_is_array, set(map(type, leaves)))):
    return leaves
  return list(filter(_has_buffers, leaves))


def _has_buffers(x: Any) -> bool:
  kind: Any = type(x)
  return _is_array(kind)


@functools.cache
def _is_array(kind: type) -> bool:
  # Tracers are copied by the compiler where they must be.
  return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def _shards(leaves: Leaves) -> set[Shard]:
  return set(map(_one_shard, arrays(leaves)))


def _one_shard(x: jax.Array) -> Shard:
  """Shape and dtype of what one device has. Arrays that share a buffer are alike in both."""
  return x.sharding.shard_shape(x.shape), x.dtype


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
