"""ZeRO-1: which part of a gradient each device keeps, told from the shards of the optimizer state.

The leaves of the state that follow a parameter are found by their paths, which end in that of the
parameter: in Adam's moments, in an accumulator, and within any transformation around them.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Dims: TypeAlias = tuple[tuple[str, ...], ...]  # the mesh axes that each dimension is spread over


def of_parameters(params: Any, opt_state: Any, dims: Sequence[Dims]) -> list[Dims | None]:
  """For each parameter how the state that follows it is spread; None where that is not one way.

  `dims` are those of the leaves of both trees. All leaves that follow the parameter must have its
  shape. A number for each parameter does not count. What is found by mistake changes where the step
  computes, and not what.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  paths = [_words(path) for path, _ in leaves]
  following: dict[Any, set[Any]] = {path: set() for path in paths}
  state = jax.tree_util.tree_leaves_with_path(opt_state)
  for (path, x), spread in zip(state, dims[len(leaves) :], strict=True):
    words = _words(path)
    ends = (words[i:] for i in range(len(words) + 1))  # the longest first
    parameter = next((end for end in ends if end in following), None)
    if parameter is not None and jnp.ndim(x):
      following[parameter].add((jnp.shape(x), spread))

  def dims_of(path: Any, x: Any) -> Dims | None:
    if len(following[path]) != 1:
      return None
    [(shape, spread)] = following[path]
    return spread if shape == jnp.shape(x) else None

  return [dims_of(path, x) for path, (_, x) in zip(paths, leaves, strict=True)]


def _words(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(map(str, path))
