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
  words_of = lambda path: tuple(map(str, path))  # noqa: E731
  paths = jax.tree_util.tree_leaves_with_path(params)
  numbers = {words_of(path): i for i, (path, _) in enumerate(paths)}

  def parameter(path, x) -> int | None:
    words = words_of(path)
    ends = (words[i:] for i in range(len(words) + 1))  # the longest first
    # A number for each parameter follows none.
    return (
      next((numbers[end] for end in ends if end in numbers), None)
      if jnp.ndim(x)
      else None
    )

  state = jax.tree_util.tree_leaves_with_path(opt_state)
  return [parameter(path, x) for path, x in state]


def specs_of_states(
  params, opt_state, specs: Sequence[PartitionSpec]
) -> list[PartitionSpec | None]:
  """For each parameter, the sharding that its state has; None if that is not one sharding.

  `specs` begins with those of the leaves of both trees. All leaves of a parameter must have its
  shape. A leaf found by mistake changes where the step is computed, and not the result.
  """
  leaves = jax.tree.leaves(params)
  state = jax.tree.leaves(opt_state)
  kinds: list[set[Any]] = [set() for _ in leaves]
  of_state = specs[len(leaves) : len(leaves) + len(state)]
  for number, x, spec in zip(
    followed(params, opt_state), state, of_state, strict=True
  ):
    if number is not None:
      kinds[number].add((jnp.shape(x), spec))
  single = [
    next(iter(kind)) if len(kind) == 1 else (None, None) for kind in kinds
  ]
  return [
    spec if shape == jnp.shape(x) else None
    for x, (shape, spec) in zip(leaves, single, strict=True)
  ]
