"""ZeRO-1: which part of a gradient each device keeps, told from the shards of the optimizer state.

The leaves of the state that follow a parameter are found by their paths, which end in that of the
parameter: in Adam's moments, in an accumulator, and within any transformation around them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def gradient_specs(
  params: Any, opt_state: Any, specs: Sequence[PartitionSpec]
) -> list[PartitionSpec | None]:
  """For each parameter the spec of its gradient; None where it is sharded as the parameter.

  `specs` are those of the leaves of both trees, over the data axes alone. The gradient is sharded
  as the state if all leaves that follow the parameter have its shape and one sharding. A number
  for each parameter does not count. What is found by mistake changes where the step computes, and
  not what.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  paths = [_words(path) for path, _ in leaves]
  following: dict[Any, set[Any]] = {path: set() for path in paths}
  state = jax.tree_util.tree_leaves_with_path(opt_state)
  for (path, x), spec in zip(state, specs[len(leaves) :], strict=True):
    words = _words(path)
    ends = (words[i:] for i in range(len(words) + 1))  # the longest first
    parameter = next((end for end in ends if end in following), None)
    if parameter is not None and jnp.ndim(x):
      following[parameter].add((jnp.shape(x), spec))

  def spec_of(path: Any, x: Any, own: PartitionSpec) -> PartitionSpec | None:
    if len(following[path]) != 1:
      return None
    [(shape, spec)] = following[path]
    return spec if spec and spec != own and shape == jnp.shape(x) else None

  both = zip(paths, leaves, specs, strict=False)
  return [spec_of(path, x, own) for path, (_, x), own in both]


def _words(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(map(str, path))
