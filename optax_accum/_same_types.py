"""A new state in the types of the one before it, or an error that names the leaf that changed.

The two come out of one conditional, so a leaf has one shape and one dtype for ever.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _validate, _weighted_mean


def same_types(name: str, new: Any, old: Any) -> Any:
  """`new` in the dtypes of `old`. A change of tree, shape or dtype that could lose is an error.

  Messages call the leaves ``name[0].mu``.
  """
  olds, news = (dict(_validate.named_leaves(name, tree)) for tree in (old, new))
  fix = "the optimizer's init and update must return states of one tree and the same shapes."
  for leaf in olds:
    if leaf not in news:
      raise ValueError(f"{leaf} is missing after an update: {fix}")
  for leaf in news:
    if leaf not in olds:
      raise ValueError(f"{leaf} is new after an update: {fix}")
    before, after = jnp.shape(olds[leaf]), jnp.shape(news[leaf])
    if before != after:
      raise ValueError(f"{leaf} has shape {before}, and {after} after an update: {fix}")
  trees: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
  if trees[0] != trees[1]:
    raise ValueError(f"{name} is a {trees[0]}, and a {trees[1]} after an update: {fix}")
  return trees[0].unflatten(_cast(leaf, news[leaf], olds[leaf]) for leaf in olds)


def _cast(name: str, new: Any, old: Any) -> Any:
  """One leaf in the dtype that it had."""
  to, dtype = jnp.result_type(old), jnp.result_type(new)
  if dtype == to:
    return new
  if _holds(to, dtype):
    return jnp.asarray(new).astype(to)
  fix = f"have the optimizer's init return {dtype} there."
  if all(jnp.issubdtype(d, jnp.inexact) for d in (to, dtype)):
    fix = (
      "give init parameters of the gradients' dtype, as in"
      f" tx.init(jax.tree.map(lambda p: p.astype(jnp.{dtype}), params)), and go on with the"
      " parameters as they are; or cast the gradients to the parameters' dtype; or use an option"
      " of the optimizer's own, such as mu_dtype of optax.lion or accumulator_dtype of optax.sgd."
    )
  raise TypeError(
    f"{name} has dtype {to}, and {dtype} after an update. The state keeps its dtypes, and {to}"
    f" would lose some of that in every step: {fix}"
  )


def _holds(to: Any, dtype: Any) -> bool:
  """Whether `to` has every value of `dtype`, by JAX's rules of promotion."""
  extended = any(jnp.issubdtype(d, jax.dtypes.extended) for d in (to, dtype))
  return not extended and _weighted_mean.promote(to, dtype) == to
