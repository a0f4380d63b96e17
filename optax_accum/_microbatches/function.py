"""Any function in microbatches: on one device, or on each of the devices of an axis."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from optax_accum._arithmetic.trees import Tree
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.loop import reduced, runner
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.recompute import Recomputed, recomputed
from optax_accum._microbatches.roles import RolesOf


class LocalFunction(NamedTuple):
  """A function on one device, or on each of the devices of an `axis_name`."""

  fun: Callable[..., Tree]
  split: Split
  roles_of: RolesOf
  reductions: Tree  # a prefix tree of the outputs

  def outputs(self, /, *args, **kwargs):
    """The combined outputs."""
    roles = self.roles_of(args, kwargs)
    call = Microbatches(self.split, roles, args, kwargs)
    kinds = jax.tree.leaves(self.reductions)
    # A stack keeps outputs of weight zero too, whose gradients `guards` would cut off.
    stacks = any(kind.collected for kind in kinds)
    fun = Recomputed(call, self.fun, guards=not stacks)

    def run_fn(weight, *inputs):
      # No carry, no weight of its own, and nobody asks whether it is finite.
      return None, None, None, fun(weight, *inputs)

    run = recomputed(call, runner(call, run_fn))
    results = reduced(call, run, self.reductions)
    return results.outputs
