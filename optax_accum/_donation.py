"""Which arrays a step can be donated: those that are there, and are not given a second time."""

from typing import Any

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


def distinct(donated: Any, others: Any, suspects: set[Any] | None) -> Any:
  """`donated`, with a copy of each array that stands in it before, or in `others`.

  XLA wants to be donated a buffer once, and over several devices JAX ends the process if it is
  used twice. A state of optax's `lbfgs` is such a case, and a teacher that starts as the
  parameters. What is in `others` too is donated as a copy, so that it lives on.

  Two arrays can share a buffer: `jax.device_put` puts an array on a mesh without a copy for the
  device that has it (with ``may_alias=False`` too). `suspects` are the arrays that are looked at
  for that, by `_one_shard`; None are all. It is slow; what a step returns is distinct.
  """
  leaves = jax.tree.leaves((donated, others))
  if suspects == set() and len(set(map(id, leaves))) == len(leaves):
    return donated  # soon found: every call comes here

  def marks(x: Any) -> tuple[Any, ...]:
    if not _has_buffers(x):
      return ()
    return _buffers(x) if suspects is None or _one_shard(x) in suspects else (id(x),)

  used = set[Any]().union(*map(marks, jax.tree.leaves(others)))

  def once(x: Any) -> Any:
    mine = marks(x)
    if not used.isdisjoint(mine):
      return _copied(x)
    used.update(mine)
    return x

  return jax.tree.map(once, donated)


def placed_as_it_was(before: Any, after: Any) -> set[Any]:
  """The shards of arrays in `after` that may be the buffers of other arrays in `before`."""
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  moved = [(x, _one_shard(y)) for x, y in pairs if x is not y and _has_buffers(x)]
  # Rows that are spread over devices are new arrays.
  return {shard for x, shard in moved if shard[0] == x.shape}


def _has_buffers(x: Any) -> bool:
  # Tracers are copied by the compiler where they must be.
  return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _one_shard(x: jax.Array) -> tuple[Any, ...]:
  """Shape and dtype of what one device has. Arrays that share a buffer are alike in both."""
  return x.sharding.shard_shape(x.shape), x.dtype


def _buffers(x: jax.Array) -> tuple[int, ...]:
  """Where the array is in the memory of each device of this process."""
  try:
    parts = [x.addressable_data(i) for i in range(len(x.sharding.addressable_devices))]
    return tuple(part.unsafe_buffer_pointer() for part in parts)
  except jax.errors.JaxRuntimeError:  # not every runtime tells
    return (id(x),)


def _copied(x: jax.Array) -> jax.Array:
  """A copy that is sharded as `x`, in the same words: else the step would be compiled anew."""
  copy = jnp.copy(x)
  return copy if copy.sharding == x.sharding else jax.device_put(copy, x.sharding)
