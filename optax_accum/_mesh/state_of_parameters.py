"""Which leaves of an optimizer state belong to which parameter, and how they are sharded.

The path of such a leaf ends with that of its parameter, as in Adam's moments.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def followed(params, opt_state) -> list[int | None]:
  """For each leaf of the state the number of the parameter that it follows, or None."""

  def words_of(path):
    # As text: a container may name its children by objects of any type.
    return tuple(map(str, path))

  paths = jax.tree_util.tree_leaves_with_path(params)
  numbers = {words_of(path): i for i, (path, _) in enumerate(paths)}

  def number_of(path, x):
    # A scalar has no axis to shard, also if there is one for each parameter.
    if not jnp.ndim(x):
      return None
    words = words_of(path)
    # The longest end first. The last is (): the path of `params` itself, if that is one array.
    for i in range(len(words) + 1):
      end = words[i:]
      if end in numbers:
        return numbers[end]
    return None

  state = jax.tree_util.tree_leaves_with_path(opt_state)
  return [number_of(path, x) for path, x in state]


def specs_of_states(
  params, opt_state, specs: Sequence[PartitionSpec]
) -> list[PartitionSpec | None]:
  """For each parameter, the one sharding of the leaves of the state that follow it.

  None, if they have several, or another shape than the parameter. `specs` begins with those of the
  leaves of both trees. A leaf found by mistake changes where the step is computed, and not the
  result.
  """
  leaves = jax.tree.leaves(params)
  state = jax.tree.leaves(opt_state)
  # For each parameter the different (shape, spec) of the leaves that follow it.
  kinds: list[set[Any]] = [set() for _ in leaves]
  of_state = specs[len(leaves) :]
  numbers = followed(params, opt_state)
  # Without `strict`: there may be further specs.
  for number, x, spec in zip(numbers, state, of_state, strict=False):
    if number is not None:
      kinds[number].add((jnp.shape(x), spec))
  single: list[PartitionSpec | None] = []
  for x, kind in zip(leaves, kinds, strict=True):
    only = None
    if len(kind) == 1:
      ((shape, spec),) = kind
      if shape == jnp.shape(x):
        only = spec
    single.append(only)
  return single
