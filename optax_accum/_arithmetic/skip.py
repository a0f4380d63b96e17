"""Microbatches that are left out, such as those with a NaN: `skip_nonfinite` and `skip_fn`."""

import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.trees import Params, Tree
from optax_accum._arithmetic.weighted_mean import Weight


def asks_to_skip(
  skip_fn: optax.ShouldSkipUpdateFunction | None,
  updates,
  gradient_step: jax.Array,
  params: Params | None,
  weight: Weight,
) -> tuple[bool | jax.Array, Tree]:
  """What `skip_fn` says of gradients of this weight; without one they are not skipped."""
  if skip_fn is None:
    # The empty tuple is a tree of no info.
    return False, ()
  should_skip, info = skip_fn(updates, gradient_step, params)
  should_skip = jnp.asarray(should_skip)
  # A weight that tracing knows is never 0.
  if isinstance(weight, jax.Array):
    # What has no weight may be NaN, and is no cause to skip.
    should_skip = should_skip & weighted_mean.counts(weight)
  return should_skip, jax.tree.map(jnp.asarray, info)


def is_finite(tree) -> jax.Array:
  """Whether all numbers of a tree are."""
  leaves = filter(dtypes.is_inexact, jax.tree.leaves(tree))
  each = [jnp.all(jnp.isfinite(x)) for x in leaves]
  return jnp.all(jnp.stack(each))


def leave_out(
  weight: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """A microbatch's weight, 0 where its results are not `finite`; and 1 if that did it."""
  # A microbatch of padding may be 0/0. It has no weight, and nothing is wrong with it.
  skipped = jnp.logical_not(finite) & weighted_mean.counts(weight)
  weight = jnp.where(finite, weight, jnp.zeros_like(weight))
  return weight, skipped.astype(jnp.int32)
