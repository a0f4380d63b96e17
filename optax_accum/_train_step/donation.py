"""Which arrays a step can donate: those not deleted, and whose buffers nothing else holds."""

from collections.abc import Callable, Mapping
import operator
from typing import TypeAlias
import weakref

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic.trees import Leaf, Leaves, Tree

Shard: TypeAlias = tuple[tuple[int, ...], jnp.dtype]


class Known:
  """Arrays of the last call, by weak references (an id may be used again). Others are new."""

  def __init__(self, leaves: Leaves) -> None:
    self._references = list(map(weakref.ref, arrays(leaves)))

  def new(self, leaves: Leaves) -> Leaves:
    """The arrays that are not what was there in the same place."""
    leaves, known = arrays(leaves), list(map(operator.call, self._references))
    if len(leaves) != len(known):
      return leaves
    return [x for x, before in zip(leaves, known, strict=True) if x is not before]


def check_alive(leaves: Leaves, arguments: Callable[[], Mapping[str, Tree]]) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process."""
  if not any(x.is_deleted() for x in arrays(leaves)):
    return
  for argument, tree in arguments().items():
    for name, x in _validate.named_leaves(argument, tree):
      if arrays([x]) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: an earlier step updated parameters and state in place. Use"
          " what that step returned, or make the step with donate=False."
        )


def distinct(donated: Leaves, others: Leaves, new: Leaves) -> Leaves:
  """What can be donated: `donated`, with a copy of each array whose buffer is passed twice.

  A buffer can be donated once. Over several devices JAX ends the process if it is used twice, as in
  a state of optax's `lbfgs`, or by a teacher that starts as the parameters. Two arrays can share
  one: `jax.device_put` puts an array on a mesh without a copy for the device that has it (with
  ``may_alias=False`` too). Comparing buffers is slow. Those of what a step returned were new then,
  so only arrays like one that came since are compared.

  Args:
    donated: Parameters and state, as they were put on the mesh.
    others: All else that the step is passed, which is not donated.
    new: What was passed, and the last call neither returned nor was passed.
  """
  shards = _shards(new)
  held = arrays(donated) if shards else []
  # Told from the few types that there are: asking each array for its shard takes longer.
  alike = {aval for aval in {x.aval for x in held} if any(_holds(aval, *shard) for shard in shards)}
  suspects = shards & _shards([x for x in held if x.aval in alike]) if alike else set()
  if not suspects:
    return donated

  def buffers(x: Leaf) -> set[int]:
    return _buffers(x) if _shards([x]) & suspects else set()

  used = set[int]().union(*map(buffers, others))
  leaves = []
  for x in donated:
    mine = buffers(x)
    leaves.append(x if used.isdisjoint(mine) else _copied(x))
    used |= mine
  return leaves


def arrays(leaves: Leaves) -> Leaves:
  """Those that have buffers."""
  # Asked of types, of which there are few. Tracers are copied by the compiler where they must be.
  kinds = {x for x in set(map(type, leaves)) if issubclass(x, jax.Array)}
  kinds -= {x for x in kinds if issubclass(x, jax.core.Tracer)}
  return [x for x in leaves if type(x) in kinds]


def _shards(leaves: Leaves) -> set[Shard]:
  """Shape and dtype of what one device has: arrays that share a buffer are alike in both."""
  kinds = {(x.aval, x.sharding) for x in arrays(leaves)}
  return {(sharding.shard_shape(aval.shape), aval.dtype) for aval, sharding in kinds}


def _holds(aval: jax.core.ShapedArray, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
  """Whether an array of this type could be cut into such a shard."""
  alike = (aval.ndim, aval.dtype) == (len(shape), dtype)
  return alike and all(map(operator.ge, aval.shape, shape))


def _buffers(x: jax.Array) -> set[int]:
  """Where the array is in the memory of each device of this process."""
  try:
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
  except jax.errors.JaxRuntimeError:  # not every runtime tells
    return {id(x)}


def _copied(x: jax.Array) -> jax.Array:
  """A copy that is sharded as `x`, in the same words: else the step would compile again."""
  copy = jnp.copy(x)
  return copy if copy.sharding == x.sharding else jax.device_put(copy, x.sharding)
