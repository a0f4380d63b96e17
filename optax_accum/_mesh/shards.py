"""Parameters and state of which every device holds a part.

Parameters are gathered for use, and their gradients scattered. Which leaves of an optimizer state
belong to which parameter is found by their paths, which end in that of the parameter: in Adam's
moments, in an accumulator, and within any transformation around them.
"""

from collections.abc import Sequence
import dataclasses
from typing import TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arithmetic import across_devices, reduction_words
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Leaf, OptState, Params, Path, Tree

Dims: TypeAlias = tuple[tuple[str, ...], ...]  # the mesh axes that each dimension is spread over


@dataclasses.dataclass(eq=False, repr=False)
class Sharded:
  """Parameters that are sharded over mesh axes, or replicated, leaf by leaf."""

  specs: Tree  # a PartitionSpec for each parameter, over the data axes alone
  gradient_specs: Tree  # the same for each gradient
  automatic: Tree  # the same, over further axes, that are left to the compiler
  axis_name: tuple[str, ...]  # the data axes
  in_loop: bool  # are parameters gathered, and gradients reduced, in every microbatch?

  def _gather(self, params: Params) -> Params:
    return jax.tree.map(across_devices.gathered, params, self.specs, self.automatic)

  def gather_before_loop(self, params: Params) -> Params:
    """The parameters as the loop takes them in."""
    return params if self.in_loop else self._gather(params)

  def gather_in_loop(self, params: Params, *others: Tree) -> Params:
    """The whole parameters, from those that the loop took in; `others` are a microbatch's."""
    if not self.in_loop:
      return params
    # Tied to the microbatch, because a compiler would otherwise move the gathering out of
    # the loop, and keep what should be dropped between microbatches.
    key = jax.dtypes.prng_key
    numbers = [x for x in jax.tree.leaves(others) if not jnp.issubdtype(x.dtype, key)]
    return self._gather(lax.optimization_barrier((params, numbers))[0])

  def gradients(self, reductions: Tree) -> Tree:
    """A tree of the gradients' reductions, from the prefix tree that is asked for."""

    def placed(kind: Reduction, spec: PartitionSpec, automatic: PartitionSpec) -> Reduction:
      kind = kind.scattered(spec, automatic) if spec else kind
      return kind.in_loop(self.axis_name) if self.in_loop else kind

    specs = self.gradient_specs
    each = reduction_words.match("grad_reduction", reductions, specs, "gradients")
    return jax.tree.map(placed, each, specs, self.automatic)


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
  """For each parameter how the state that follows it is spread; None where that is not one way.

  ZeRO-1: this is the part of its gradient that each device keeps. `dims` are those of the leaves of
  both trees. All leaves that follow the parameter must have its shape. What is found by mistake
  changes where the step computes, and not what.
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
