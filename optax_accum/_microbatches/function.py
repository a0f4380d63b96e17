"""Any function in microbatches: on one device, or on each of the devices of an axis."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from optax_accum._arithmetic.trees import Tree
from optax_accum._microbatches.call import Microbatches
from optax_accum._microbatches.loop import run_in_microbatches, runner
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.recompute import Recomputed
from optax_accum._microbatches.roles import RolesOf


class LocalFunction(NamedTuple):
  """A function on one device, or on each of the devices of an `axis_name`."""

  fun: Callable[..., Tree]
  split: Split
  roles_of: RolesOf
  reductions: Tree  # a prefix tree of the outputs

  def outputs(self, weights, args, kwargs):
    """The combined outputs. `weights` are those of the microbatches, if they are known."""
    roles = self.roles_of(args, kwargs)
    call = Microbatches(self.split, roles, args, kwargs, weights)

    def run_fn(_, *inputs):
      args, kwargs = call.arguments(inputs)
      return None, None, self.fun(*args, **kwargs)

    run = runner(call, run_fn)
    if not call.is_whole:
      kinds = jax.tree.leaves(self.reductions)
      keeps_all = any(kind.collected for kind in kinds)
      run = Recomputed(call, run, keeps_all)
    return run_in_microbatches(call, run, self.reductions).outputs
