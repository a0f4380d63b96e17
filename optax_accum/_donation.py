"""Which arrays a step can be donated: those that it is not given a second time."""

from typing import Any

import jax
import jax.numpy as jnp


def distinct(donated: Any, others: Any, by_buffer: bool) -> Any:
  """`donated`, with a copy of each array that stands in it before, or in `others`.

  XLA wants to be donated a buffer once, and over several devices JAX ends the process if it is
  used twice. A state of optax's `lbfgs` is such a case, and a teacher that starts as the
  parameters. What is in `others` too is donated as a copy, so that it lives on.

  Two arrays can share a buffer: `jax.device_put` puts an array on a mesh without a copy for the
  device that has it (with ``may_alias=False`` too). `by_buffer` finds these as well. It is slow,
  so it is for calls that such arrays may be new to; what a step returns is distinct.
  """
  leaves = jax.tree.leaves((donated, others))
  if not by_buffer and len(set(map(id, leaves))) == len(leaves):
    return donated  # soon found: every call comes here
  marks = _buffers if by_buffer else _itself
  used = set[Any]().union(*map(marks, jax.tree.leaves(others)))

  def once(x: Any) -> Any:
    mine = marks(x)
    if not used.isdisjoint(mine):
      return _copied(x)
    used.update(mine)
    return x

  return jax.tree.map(once, donated)


def placed_anew(before: Any, after: Any) -> bool:
  """Whether an array of `before` is another one in `after`, whose buffer it may share."""
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  return any(isinstance(x, jax.Array) for x, y in pairs if x is not y)


def _itself(x: Any) -> tuple[int, ...]:
  # Tracers are copied by the compiler where they must be.
  return (id(x),) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else ()


def _buffers(x: Any) -> tuple[int, ...]:
  """Where the array is in the memory of each device of this process."""
  if not _itself(x):
    return ()
  try:
    parts = [x.addressable_data(i) for i in range(len(x.sharding.addressable_devices))]
    return tuple(part.unsafe_buffer_pointer() for part in parts)
  except jax.errors.JaxRuntimeError:  # not every runtime tells
    return _itself(x)


def _copied(x: jax.Array) -> jax.Array:
  """A copy that is sharded as `x`, in the same words: else the step would be compiled anew."""
  copy = jnp.copy(x)
  return copy if copy.sharding == x.sharding else jax.device_put(copy, x.sharding)
