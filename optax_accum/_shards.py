"""Parameters that every device holds a part of: gathered for use, their gradients scattered."""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_accum import _reductions


@dataclasses.dataclass(frozen=True)
class Shards:
  """How a tree of parameters is sharded over one mesh axis, inside `shard_map`.

  ``spread`` is a tree like the parameters, of `_reductions.Spread`.
  """

  spread: Any
  axis_name: str
  every_microbatch: bool

  def gather(self, params: Any) -> Any:
    """The whole parameters."""

    def whole(x: jax.Array, spread: _reductions.Spread) -> jax.Array:
      if spread.scatter is None:
        return x
      return lax.all_gather(x, self.axis_name, axis=spread.scatter, tiled=True)

    return jax.tree.map(whole, params, self.spread)

  def gather_in_loop(self, params: Any, *others: Any) -> Any:
    """The whole parameters, gathered anew in every trip of the loop that this stands in.

    Tied to the microbatch, because a compiler would otherwise move the gathering out of
    the loop, and keep what should be dropped between microbatches.
    """
    numbers = [
      x for x in jax.tree.leaves(others) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    return self.gather(lax.optimization_barrier((params, numbers))[0])
