"""Which arrays a step can donate: those not deleted, and whose buffers nothing else holds."""

from collections.abc import Callable, Iterable, Mapping
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
    self._references = list(map(weakref.ref, leaves))

  def new(self, leaves: Leaves) -> Leaves:
    """The arrays that are not what was there in the same place."""
    known = list(map(operator.call, self._references))
    if len(leaves) != len(known):
      return leaves
    if all(map(operator.is_, leaves, known)):
      return []
    return [
      x for x, before in zip(leaves, known, strict=True) if x is not before
    ]


def arrays(tree: Tree) -> Leaves:
  """The leaves that have buffers."""
  leaves = jax.tree.leaves(tree)
  # Asked of types, of which there are few. Tracers are copied by the compiler where they must be.
  kinds = set(map(type, leaves))
  others = {
    x
    for x in kinds
    if not issubclass(x, jax.Array) or issubclass(x, jax.core.Tracer)
  }
  return [x for x in leaves if type(x) not in others] if others else leaves


def check_alive(
  leaves: Leaves, arguments: Callable[[], Mapping[str, Tree]]
) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process."""
  if not any(x.is_deleted() for x in leaves):
    return
  for argument, tree in arguments().items():
    for name, x in _validate.named_leaves(argument, tree):
      if arrays(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: an earlier step updated parameters and state in place. Use"
          " what that step returned, or make the step with donate=False."
        )


def distinct(donated: Tree, held: Leaves, others: Leaves, new: Leaves) -> Tree:
  """What can be donated: `donated`, with a copy of each array whose buffer is passed twice.

  A buffer can be donated once, and over several devices JAX ends the process if it is used twice,
  as in a state of optax's `lbfgs`, or by a teacher that starts as the parameters. Two arrays can
  share one: `jax.device_put` puts an array on a mesh without a copy for the device that has it
  (with ``may_alias=False`` too). Comparing buffers is slow, and those of what a step returned were
  new then. So `held`, the arrays in `donated`, and `others`, which are not donated, are compared
  only where they are like an array that is `new`: not of the last call.
  """
  shards = _shards(new)

  def holds(aval: jax.core.ShapedArray) -> bool:
    """Whether an array of this type could be cut into such a shard."""
    like = (
      shape
      for shape, dtype in shards
      if (len(shape), dtype) == (aval.ndim, aval.dtype)
    )
    return any(all(map(operator.ge, aval.shape, shape)) for shape in like)

  # Told from the few types that there are: asking each array for its shard takes longer.
  alike = set(filter(holds, {x.aval for x in held}))
  suspects = (
    shards & _shards(x for x in held if x.aval in alike) if alike else set()
  )
  if not suspects:
    return donated

  def buffers(x: Leaf) -> set[int]:
    return _buffers(x) if _shards(arrays(x)) & suspects else set()

  used = set[int]().union(*map(buffers, others))

  def once(x: Leaf) -> Leaf:
    mine = buffers(x)
    copy = not used.isdisjoint(mine)
    used.update(mine)
    return _copied(x) if copy else x

  return jax.tree.map(once, donated)


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
