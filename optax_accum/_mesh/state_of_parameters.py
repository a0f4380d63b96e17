"""Which leaves of an optimizer state belong to which parameter, and how they are sharded.

The path of such a leaf ends with that of its parameter, as in Adam's moments.
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from optax_accum._arithmetic.trees import Leaf, OptState, Params, Path

Dims: TypeAlias = tuple[tuple[str, ...], ...]  # the mesh axes that each dimension is spread over


def followed(params: Params, opt_state: OptState) -> list[int | None]:
  """For each leaf of the state the number of the parameter that it follows, or None."""
  paths = jax.tree_util.tree_leaves_with_path(params)
  numbers = {_words(path): i for i, (path, _) in enumerate(paths)}

  def parameter(path: Path, x: Leaf) -> int | None:
    words = _words(path)
    ends = (words[i:] for i in range(len(words) + 1))  # the longest first
    # A number for each parameter follows none.
    return next((numbers[end] for end in ends if end in numbers), None) if jnp.ndim(x) else None

  state = jax.tree_util.tree_leaves_with_path(opt_state)
  return [parameter(path, x) for path, x in state]


def spread_as_parameters(
  params: Params, opt_state: OptState, dims: Sequence[Dims]
) -> list[Dims | None]:
  """For each parameter, the sharding that its state has; None if that is not one sharding.

  ZeRO-1: each device keeps this part of the gradient. `dims` are those of the leaves of both trees.
  All leaves of a parameter must have its shape. A leaf found by mistake changes where the step is
  computed, and not the result.
  """
  leaves, state = jax.tree.leaves(params), jax.tree.leaves(opt_state)
  following: list[set[tuple[tuple[int, ...], Dims]]] = [set() for _ in leaves]
  spreads = dims[len(leaves) :]
  for number, x, spread in zip(followed(params, opt_state), state, spreads, strict=True):
    if number is not None:
      following[number].add((jnp.shape(x), spread))

  def dims_of(found: set[tuple[tuple[int, ...], Dims]], x: Leaf) -> Dims | None:
    if len(found) != 1:
      return None
    [(shape, spread)] = found
    return spread if shape == jnp.shape(x) else None

  return list(map(dims_of, following, leaves))


def _words(path: Path) -> tuple[str, ...]:
  return tuple(map(str, path))
