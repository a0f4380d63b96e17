"""A state in types that do not change from one step to the next, or an error that names the leaf.

What comes out of a conditional has one shape, dtype and explicit sharding, a step taken or not.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes

Held = TypeVar("Held")


def same_types(name: str, new: Any, old: Any) -> Any:
  """`new` in the shardings of `old`, and in dtypes that hold both, by JAX's rules of promotion.

  A change of tree or shape is an error. Messages call the leaves ``name[0].mu``.
  """
  olds, news = (dict(_validate.named_leaves(name, tree)) for tree in (old, new))
  fix = "the optimizer's init and update must return states of one tree and the same shapes."
  for leaf in olds:
    if leaf not in news:
      raise ValueError(f"{leaf} is missing after an update: {fix}")
  for leaf in news:
    if leaf not in olds:
      raise ValueError(
        f"{leaf} is new after an update: {fix} (That of optax.monitor does not: optax.snapshot"
        " keeps what it measures from the start.)"
      )
    before, after = jnp.shape(olds[leaf]), jnp.shape(news[leaf])
    if before != after:
      raise ValueError(f"{leaf} has shape {before}, and {after} after an update: {fix}")
  trees: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
  if trees[0] != trees[1]:
    raise ValueError(f"{name} is a {trees[0]}, and a {trees[1]} after an update: {fix}")
  return trees[0].unflatten(_cast(leaf, news[leaf], olds[leaf]) for leaf in olds)


def widened(update: Callable[[Held], Held], held: Held) -> Held:
  """`held` in the dtypes in which `update` gives it back, as `same_types`, in every step.

  Moments of bfloat16 parameters become float32 by the first float32 gradients. What goes into a
  conditional is cast before it: rounding what comes out would lose something in each step.
  """
  while True:
    new = jax.eval_shape(update, held)
    wide = jax.tree.map(dtypes.in_dtype_of, held, new)
    if all(x is y for x, y in zip(*map(jax.tree.leaves, (held, wide)), strict=True)):
      return held
    held = wide  # which the next update may make wider: dtypes end at the widest


def _cast(name: str, new: Any, old: Any) -> Any:
  """One leaf in the sharding that it had, and a dtype that holds it before and after."""
  before, after = jnp.result_type(old), jnp.result_type(new)
  if before == after:
    return across_devices.sharded_like(new, old)
  if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in (before, after)):
    raise TypeError(
      f"{name} has dtype {before}, and {after} after an update: have the optimizer's init return"
      f" {after} there."
    )
  to = dtypes.promote(before, after)
  return across_devices.sharded_like(jnp.asarray(new).astype(to), old)
