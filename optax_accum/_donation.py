"""Which arrays a step can be donated: those that are there, and are not given a second time."""

from collections.abc import Mapping
import functools
import operator
from typing import Any, TypeAlias
import weakref

import jax
import jax.numpy as jnp

from optax_accum import _validate

Leaves: TypeAlias = list[Any]
Placed: TypeAlias = tuple[Leaves, Leaves]  # as they were passed, and as they were put on a mesh


def check_alive(leaves: Leaves, arguments: Mapping[str, Any]) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process.

  `leaves` are those of the `arguments`, which messages call by these names.
  """
  if not any(map(operator.methodcaller("is_deleted"), _arrays(leaves))):
    return
  for argument, tree in arguments.items():
    for name, x in _validate.named_leaves(argument, tree):
      if _has_buffers(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: a step updates parameters and state in place, and deletes what"
          " it is given. Use what that step returned, or donate=False."
        )


class Donation:
  """What a step is donated, call after call: arrays whose buffers nothing else has.

  XLA wants to be donated a buffer once, and over several devices JAX ends the process if it is
  used twice. A state of optax's `lbfgs` is such a case, and a teacher that starts as the
  parameters. What is passed elsewhere too is donated as a copy, so that it lives on.

  Two arrays can share a buffer: `jax.device_put` puts an array on a mesh without a copy for the
  device that has it (with ``may_alias=False`` too). To look at buffers is slow. What a step
  returned is in buffers that nothing else had then, so only arrays that are new are looked at.
  """

  def __init__(self) -> None:
    self._returned: list[Any] = []
    self._others: list[Any] = []

  def remember(self, returned: Leaves, others: Leaves) -> None:
    """Remembers a call: what it returned in place of what it was donated, and what else it took."""
    self._returned, self._others = _references(returned), _references(others)

  def goes_on(self, donated: Leaves) -> bool:
    """Whether these are the arrays that the last call returned, each in its place."""
    held = [reference() for reference in self._returned]
    return bool(held) and len(held) == len(donated) and all(map(operator.is_, donated, held))

  def distinct(self, donated: Placed, others: Placed, goes_on: bool) -> Leaves:
    """What is to be donated, with a copy of each array that is passed a second time."""
    new = [x for x, _ in _new(others, self._others) if _has_buffers(x)]
    if goes_on and not new:
      return donated[1]  # soon found: every call comes here
    new += [] if goes_on else [y for _, y in _new(donated, self._returned) if _has_buffers(y)]
    ids = list(map(id, _arrays([*donated[0], *others[0]])))
    # What is donated is what was placed. Others live on as they were passed.
    suspects = _possible(set(map(_one_shard, new)), donated[1])
    if not suspects and len(set(ids)) == len(ids):
      return donated[1]

    def marks(x: Any, held: Any) -> set[Any]:
      if not _has_buffers(x):
        return set()
      return {id(x), *(_buffers(held) if _one_shard(held) in suspects else ())}

    used = set[Any]().union(*(marks(x, x) for x in others[0]))
    leaves = []
    for x, y in zip(*donated, strict=True):
      mine = marks(x, y)
      leaves.append(y if used.isdisjoint(mine) else _copied(y))
      used |= mine
    return leaves


def _references(leaves: Leaves) -> list[Any]:
  """Weak references to the arrays. An id alone may be another array's, later."""
  if len(_arrays(leaves)) == len(leaves):
    return list(map(weakref.ref, leaves))
  return [weakref.ref(x) if _has_buffers(x) else lambda: None for x in leaves]


def _new(leaves: Placed, known: list[Any]) -> list[tuple[Any, Any]]:
  """The leaves that are not those that are known in their places, as passed and as placed."""
  if len(known) != len(leaves[0]):
    return list(zip(*leaves, strict=True))
  return [(x, y) for x, y, was in zip(*leaves, known, strict=True) if x is not was()]


def _arrays(leaves: Leaves) -> Leaves:
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


def _one_shard(x: jax.Array) -> tuple[Any, ...]:
  """Shape and dtype of what one device has. Arrays that share a buffer are alike in both."""
  return x.sharding.shard_shape(x.shape), x.dtype


def _possible(shards: set[Any], leaves: Leaves) -> set[Any]:
  """Those of the shards that a leaf may be of, which they then divide."""
  kinds = {x.aval for x in _arrays(leaves)} if shards else ()

  def divide(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) and all(
      part == n or (part and n % part == 0) for part, n in zip(shape, whole, strict=True)
    )

  def is_possible(shape: tuple[int, ...], dtype: Any) -> bool:
    return any(a.dtype == dtype and divide(shape, a.shape) for a in kinds)

  return {shard for shard in shards if is_possible(*shard)}


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
