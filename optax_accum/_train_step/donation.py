"""Which arrays a step can donate: those not deleted, and whose buffers nothing else holds."""

from collections.abc import Iterable, Sequence
import operator
from typing import Any, TypeAlias
import weakref

import jax
import jax.numpy as jnp

from optax_accum import _validate

Shard: TypeAlias = tuple[tuple[int, ...], jnp.dtype]


class Known:
  """The arrays of the last call, by weak references: an id may be used again."""

  def __init__(self, leaves) -> None:
    self._references = list(map(weakref.ref, leaves))

  def unknown(self, leaves):
    """The arrays that are not what was there in the same place."""
    known = list(map(operator.call, self._references))
    if len(leaves) != len(known):
      return leaves
    pairs = zip(leaves, known, strict=True)
    return [x for x, before in pairs if x is not before]


def arrays(tree):
  """The leaves that have buffers."""
  leaves = jax.tree.leaves(tree)
  # Asked of types, of which there are few. Tracers are copied by the compiler where they must be.
  kinds = set(map(type, leaves))
  others = {
    kind
    for kind in kinds
    if not issubclass(kind, jax.Array) or issubclass(kind, jax.core.Tracer)
  }
  if others:
    leaves = [x for x in leaves if type(x) not in others]
  return leaves


def check_alive(leaves, names: Sequence[str], args, kwargs) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process."""
  if not any(x.is_deleted() for x in leaves):
    return
  roots = dict[Any, str](enumerate(names))
  for slot, tree in (*enumerate(args), *kwargs.items()):
    root = roots.get(slot, f"argument {slot!r}")
    for name, x in _validate.named_leaves(root, tree):
      if arrays(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: an earlier step updated parameters and state in place. Use"
          " what that step returned, or make the step with donate=False."
        )


def check_memory(leaves: Iterable[jax.Array]) -> None:
  """Checks that what is in the host's memory has a type that says so: else JAX ends the process."""
  kinds = {(x.aval, x.sharding.memory_kind) for x in leaves}
  for aval, memory in kinds:
    if memory == "pinned_host" and aval.memory_space != jax.memory.Space.Host:
      raise RuntimeError(
        f"An array of parameters or state is in the host's memory, and its type, {aval}, does not"
        " say so. Orbax restores such arrays on one device without a mesh: restore them to the"
        " device, into the shapes of jax.eval_shape, and jax.device_put them."
      )


def beside(tree, given):
  """What was computed of no array, on the device where some of the `given` arrays are committed."""
  devices = {
    device for x in given if x.committed for device in x.sharding.device_set
  }
  if len(devices) != 1 or not arrays(tree):
    return tree
  return jax.device_put(tree, *devices)


def committed(updated, held):
  """`updated`, all committed to its device if some of `held`, the arrays in it, are: results are.

  Otherwise the next call would compile the program again, for arguments that are.
  """
  if {x.committed for x in held} != {True, False}:
    return updated
  devices = {device for x in held for device in x.sharding.device_set}
  if len(devices) > 1:
    return updated  # JAX copies the others to where they are needed
  return jax.tree.map(_committed, updated)


def _committed(x):
  if arrays(x):
    return jax.device_put(x, x.sharding)
  return x


def distinct(donated, held, others, new):
  """What can be donated: `donated`, with a copy of each array whose buffer is passed twice.

  A buffer can be donated once, and over several devices JAX ends the process if it is used twice,
  as in a state of optax's `lbfgs`, or by a teacher that starts as the parameters. Two arrays can
  share one: `jax.device_put` puts an array on a mesh without a copy for the device that has it
  (with ``may_alias=False`` too). Comparing buffers is slow, and those of what a step returned were
  new then. So `held`, the arrays in `donated`, and `others`, which are not donated, are compared
  only where they are like an array that is `new`: not of the last call.
  """
  # Which arrays may have a buffer in common: first by their few types, because to ask each array
  # for its shard takes longer, and then by their shards.
  shards = _shards(new)
  types = {x.aval for x in held}
  alike = {t for t in types if any(_may_have(t, shard) for shard in shards)}
  if not alike:
    return donated
  suspects = shards & _shards(x for x in held if x.aval in alike)
  if not suspects:
    return donated

  def is_suspect(x):
    return not suspects.isdisjoint(_shards(arrays(x)))

  # The buffers of these alone are compared. What others have cannot be donated.
  used = set()
  for x in filter(is_suspect, others):
    used |= _buffers(x)

  def once(x):
    if not is_suspect(x):
      return x
    mine = _buffers(x)
    if used & mine:
      return _copied(x)
    used.update(mine)
    return x

  return jax.tree.map(once, donated)


def _may_have(aval: jax.core.ShapedArray, shard: Shard) -> bool:
  """Whether an array of this type could be cut into such a shard."""
  shape, dtype = shard
  same_kind = aval.dtype == dtype and aval.ndim == len(shape)
  return same_kind and all(map(operator.ge, aval.shape, shape))


def _shards(leaves: Iterable[jax.Array]) -> set[Shard]:
  """Shape and dtype of what one device has: arrays that share a buffer are alike in both."""
  kinds = {(x.aval, x.sharding) for x in leaves}
  return {
    (sharding.shard_shape(aval.shape), aval.dtype) for aval, sharding in kinds
  }


def _buffers(x: jax.Array) -> set[int]:
  """Where the array is in the memory of each device of this process."""
  try:
    return {
      shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards
    }
  except jax.errors.JaxRuntimeError:  # not every runtime tells
    return {id(x)}


def _copied(x: jax.Array) -> jax.Array:
  """A copy that is sharded as `x`, in the same words: else the step would compile again."""
  return jax.device_put(jnp.copy(x), x.sharding)
