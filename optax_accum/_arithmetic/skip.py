"""Microbatches that are left out, such as those with a NaN: `skip_nonfinite` and `skip_fn`."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optax_accum._arithmetic import weighted_mean
from optax_accum._arithmetic.trees import Params, Tree
from optax_accum._arithmetic.weighted_mean import Weight


class SkipFn(Protocol):
  """The type of `accumulate`'s `skip_fn`, which `optax.ShouldSkipUpdateFunction` is one of."""

  def __call__(
    self, updates: Any, gradient_step: Any, params: Any, /
  ) -> tuple[Any, Any]:
    """Returns ``(should_skip, info)`` for the gradients of one call, before they are added up.

    `should_skip` is a bool scalar. True leaves the gradients out, as if the call had not happened.
    `info` is a pytree of arrays, for ``skip_state``. `gradient_step` is an int32 scalar.
    `params` is None if `update` got none.
    """


def asks_to_skip(
  skip_fn: SkipFn | None,
  updates,
  gradient_step: jax.Array,
  params: Params | None,
  weight: Weight,
) -> tuple[bool | jax.Array, Tree]:
  """What `skip_fn` says of gradients of this weight, checked; without one they are not skipped."""
  if skip_fn is None:
    return False, ()
  result = skip_fn(updates, gradient_step, params)
  if not isinstance(result, tuple) or len(result) != 2:
    raise TypeError(
      f"skip_fn returned {result!r}; it must return the pair (should_skip, info)."
    )
  should_skip, info = result
  if jnp.shape(should_skip) != () or jnp.result_type(should_skip) != jnp.bool_:
    raise TypeError(
      f"skip_fn returned should_skip={should_skip!r}; it must be a bool scalar, e.g. jnp.any(...)."
    )
  should_skip = jnp.asarray(should_skip)
  if isinstance(weight, jax.Array):
    # What has no weight may be NaN, and is no cause to skip.
    should_skip = should_skip & weighted_mean.counts(weight)
  return should_skip, jax.tree.map(jnp.asarray, info)


def is_finite(tree) -> jax.Array:
  """Whether all numbers of a tree are."""
  leaves = [
    x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))


def leave_out(
  weight: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """A microbatch's weight, 0 where its results are not `finite`; and 1 if that did it."""
  # A microbatch of padding may be 0/0. It has no weight, and nothing is wrong with it.
  skipped = jnp.logical_not(finite) & weighted_mean.counts(weight)
  return jnp.where(finite, weight, jnp.zeros_like(weight)), skipped.astype(
    jnp.int32
  )
