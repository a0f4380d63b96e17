"""Parameters that every device holds a part of: gathered for use, their gradients scattered."""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arithmetic import across_devices, reduction_words
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Params, Tree


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
