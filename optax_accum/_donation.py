"""Which arrays a step can be donated: those that are there, and are not given a second time."""

from collections.abc import Iterable
import functools
from typing import Any, TypeAlias
import weakref

import jax
import jax.numpy as jnp

from optax_accum import _validate

Reference: TypeAlias = weakref.ref[Any]


def check_alive(args: Any, kwargs: Any) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process."""
  if not any(_has_buffers(x) and x.is_deleted() for x in jax.tree.leaves((args, kwargs))):
    return
  for slot, tree in {**dict(enumerate(args)), **kwargs}.items():
    for name, x in _validate.named_leaves(f"argument {slot!r}", tree):
      if _has_buffers(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: a step updates parameters and state in place, and deletes what"
          " it is given: use what that step returned, or donate=False."
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
    self._returned, self._others = _references(()), _references(())

  def remember(self, returned: Any, others: Any) -> None:
    """Remembers a call: the parameters and the state that it returned, and what else it took."""
    self._returned, self._others = _references(returned), _references(others)

  def distinct(self, before: Any, after: Any) -> Any:
    """What is to be donated, with a copy of each array that is passed a second time.

    `before` and `after` are ``(donated, others)``, as they were passed and as they were placed.
    """
    held, others = map(jax.tree.leaves, before)
    if all(_are(self._returned, held)) and self._is_apart(held, others, after[1]):
      return after[0]  # soon found: every call comes here
    leaves, treedef = jax.tree.flatten(after[0])
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    arrays = [id(x) for x, _ in pairs if _has_buffers(x)]
    returned, known = _ids(self._returned), _ids((*self._others, *self._returned))
    new = [pair for pair in pairs[: len(leaves)] if id(pair[0]) not in returned]
    new += [pair for pair in pairs[len(leaves) :] if id(pair[0]) not in known]
    # Rows that are spread over devices are in new buffers: their shards are of another shape.
    suspects = {_one_shard(x) for x, y in new if _has_buffers(x) and _one_shard(x) == _one_shard(y)}
    if not suspects and len(set(arrays)) == len(arrays):
      return after[0]

    def marks(x: Any, y: Any) -> set[Any]:
      if not _has_buffers(x):
        return set()
      return {id(x), *(_buffers(y) if _one_shard(y) in suspects else ())}

    used = set[Any]().union(*(marks(x, y) for x, y in pairs[len(leaves) :]))
    for i, (x, y) in enumerate(pairs[: len(leaves)]):
      mine = marks(x, y)
      leaves[i] = y if used.isdisjoint(mine) else _copied(y)
      used |= mine
    return jax.tree.unflatten(treedef, leaves)

  def _is_apart(self, held: list[Any], others: list[Any], placed: Any) -> bool:
    """Whether `others` surely share no buffer with what the last step returned."""
    known = _are(self._others, others)
    new = [x for x, is_known in zip(jax.tree.leaves(placed), known, strict=True) if not is_known]
    shards = {_one_shard(x) for x in new if _has_buffers(x)}
    shapes, ids = {shape for shape, _ in shards}, set(map(id, held))
    if any(id(x) in ids for x in others):
      return False
    near = [x for x in held if shapes and (x.shape in shapes or not _is_whole(x))]
    return not any(_one_shard(x) in shards for x in near)


def _references(tree: Any) -> list[Reference | None]:
  """The arrays of a tree, None for other leaves. They are not kept alive."""
  return [weakref.ref(x) if _has_buffers(x) else None for x in jax.tree.leaves(tree)]


def _are(references: list[Reference | None], leaves: list[Any]) -> list[bool]:
  """For each leaf whether it is the array that was there before, if as many were."""
  if len(references) != len(leaves):
    return [not _has_buffers(x) for x in leaves] or [False]
  both = zip(references, leaves, strict=True)
  return [not _has_buffers(x) if ref is None else ref() is x for ref, x in both]


def _ids(references: Iterable[Reference | None]) -> set[int]:
  """The ids of arrays that are still there: that of another may be another's by now."""
  return {id(x) for ref in references if ref and (x := ref()) is not None}


def _has_buffers(x: Any) -> bool:
  # Every call asks of every leaf. To ask isinstance takes ten times as long.
  kind = type(x)
  known = _kinds.get(kind)
  if known is None:
    # Tracers are copied by the compiler where they must be.
    known = _kinds[kind] = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
  return known


_kinds: dict[type, bool] = {}


def _one_shard(x: jax.Array) -> tuple[Any, ...]:
  """Shape and dtype of what one device has. Arrays that share a buffer are alike in both."""
  return x.shape if _is_whole(x) else _shard_shape(x.sharding, x.shape), x.dtype


def _is_whole(x: jax.Array) -> bool:
  return type(x.sharding) is jax.sharding.SingleDeviceSharding


@functools.lru_cache(maxsize=4096)  # ten times as fast as JAX's own
def _shard_shape(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
  return sharding.shard_shape(shape)


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
