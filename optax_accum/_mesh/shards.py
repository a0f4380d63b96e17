"""Parameters that every device holds a part of: gathered for use, their gradients scattered."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arithmetic import across_devices, reduction_words
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Params, Tree


class Shards(NamedTuple):
  """How each parameter and its gradient are sharded over the data axes, and over others."""

  held: Tree  # a PartitionSpec for each parameter, over the data axes
  gradients: Tree  # the same for each gradient
  automatic: Tree  # the same over further axes, that are left to the compiler

  def gather(self, params: Params) -> Params:
    """The full parameters, on each device."""
    return jax.tree.map(
      across_devices.gathered, params, self.held, self.automatic
    )

  def gather_in_loop(self, params: Params, *others: Tree) -> Params:
    """The same in every microbatch, whose arguments are `others`."""
    # Tied to the microbatch, because a compiler would otherwise move the gathering out of
    # the loop, and keep what should be dropped between microbatches.
    key = jax.dtypes.prng_key
    numbers = [
      x for x in jax.tree.leaves(others) if not jnp.issubdtype(x.dtype, key)
    ]
    return self.gather(lax.optimization_barrier((params, numbers))[0])

  def scattered(self, reductions: Tree) -> Tree:
    """The reduction of each gradient, from a prefix tree of them: a device keeps its part."""

    def scatter(
      kind: Reduction, spec: PartitionSpec, automatic: PartitionSpec
    ) -> Reduction:
      return kind.scattered(spec, automatic) if spec else kind

    each = reduction_words.match(
      "grad_reduction", reductions, self.gradients, "gradients"
    )
    return jax.tree.map(scatter, each, self.gradients, self.automatic)
