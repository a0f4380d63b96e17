"""Which arrays a step can donate: those not deleted, each once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic.trees import Tree


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


def check_alive(given: Sequence[tuple[str, Tree]]) -> None:
  """Checks that no array was donated to a step before. Over devices JAX would end the process."""
  # This test is quick; names of leaves are made only for the message.
  if not any(x.is_deleted() for x in arrays(given)):
    return
  for root, tree in given:
    for name, x in _validate.named_leaves(root, tree):
      if arrays(x) and x.is_deleted():
        raise RuntimeError(
          f"{name} has been deleted: an earlier step updated parameters and state in place. Use"
          " what that step returned, or make the step with donate=False."
        )


def check_memory(leaves) -> None:
  """Checks that what is in the host's memory has a type that says so: else JAX ends the process."""
  if "pinned_host" not in {x.sharding.memory_kind for x in leaves}:
    return
  for x in leaves:
    is_on_host = x.sharding.memory_kind == "pinned_host"
    if is_on_host and x.aval.memory_space != jax.memory.Space.Host:
      raise RuntimeError(
        f"An array of parameters or state is in the host's memory, and its type, {x.aval}, does not"
        " say so. Orbax restores such arrays on one device without a mesh: restore them to the"
        " device, into the shapes of jax.eval_shape, and jax.device_put them."
      )


def committed(updated, leaves):
  """`updated`, with all of `leaves`, its arrays, committed to their device if only some are.

  A program commits all of its results if some argument is committed. Without this the next call,
  which is given these results, would compile the program again.
  """
  # All are committed, or none is: the next call finds them alike.
  if {x.committed for x in leaves} != {True, False}:
    return updated
  devices: set[jax.Device] = set()
  for x in leaves:
    devices |= x.sharding.device_set
  if len(devices) > 1:
    return updated  # JAX copies the uncommitted to where they are needed

  def commit(x):
    if not arrays(x):
      return x
    # An array that is put where it is already becomes committed.
    return jax.device_put(x, x.sharding)

  return jax.tree.map(commit, updated)


def distinct(updated, leaves, others):
  """What can be donated: `updated`, with a copy of each array, `leaves`, that is passed twice.

  A buffer can be donated once, and over several devices JAX ends the process if it is used twice,
  as in a state of optax's `lbfgs`, or by a teacher that starts as the parameters. `others` are not
  donated.
  """
  seen = set(map(id, others))
  # The lengths agree if no array is twice in `leaves`, or in it and in `others`.
  if len(seen.union(map(id, leaves))) == len(seen) + len(leaves):
    return updated

  def once(x):
    # A leaf without a buffer, such as a number, may be passed twice.
    if id(x) in seen and arrays(x):
      copy = jnp.copy(x)
      # `device_put` would commit it, so a copy of an uncommitted array goes without.
      if not x.committed:
        return copy
      # Sharded as `x`, in the same words: else the step would compile again.
      return jax.device_put(copy, x.sharding)
    seen.add(id(x))
    return x

  return jax.tree.map(once, updated)
