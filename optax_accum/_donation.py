"""Which arrays a step can be donated: those that are there, and are not given a second time."""

from typing import Any
import weakref

import jax
import jax.numpy as jnp

from optax_accum import _validate


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
    self._returned, self._others = _ids(()), _ids(())

  def remember(self, returned: Any, others: Any) -> None:
    """Remembers a call: the parameters and the state that it returned, and what else it took."""
    self._returned, self._others = _ids(returned), _ids(others)

  def distinct(self, before: Any, after: Any) -> Any:
    """What is to be donated, with a copy of each array that is passed a second time.

    `before` and `after` are ``(donated, others)``, as they were passed and as they were placed.
    """
    leaves, treedef = jax.tree.flatten(after[0])
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    arrays = [id(x) for x, _ in pairs if _has_buffers(x)]
    new = [pair for pair in pairs[: len(leaves)] if not _is_in(self._returned, pair[0])]
    others = {**self._others, **self._returned}
    new += [pair for pair in pairs[len(leaves) :] if not _is_in(others, pair[0])]
    # Rows that are spread over devices are in new buffers: their shards are of another shape.
    suspects = {_one_shard(x) for x, y in new if _has_buffers(x) and _one_shard(x) == _one_shard(y)}
    if not suspects and len(set(arrays)) == len(arrays):
      return after[0]  # soon found: every call comes here

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


def _ids(tree: Any) -> dict[int, weakref.ref[Any]]:
  """The arrays of a tree, by id. An id alone may be another array's, later."""
  return {id(x): weakref.ref(x) for x in jax.tree.leaves(tree) if _has_buffers(x)}


def _is_in(ids: dict[int, weakref.ref[Any]], x: Any) -> bool:
  found = ids.get(id(x))
  return found is not None and found() is x


def _has_buffers(x: Any) -> bool:
  # Tracers are copied by the compiler where they must be.
  return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _one_shard(x: jax.Array) -> tuple[Any, ...]:
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
