"""Buffers that the accumulator goes into a conditional in, and the updates come out of it in."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _reduce, _validate


def find(total: optax.Updates, like: optax.Updates) -> tuple[list[jax.Array], list[bool]]:
  """The buffers that updates like `like` come out in, and which of them are accumulators.

  An accumulator serves if it has the shape, can hold the dtype without rounding and, in
  `shard_map`, is as varying (after a reduction over devices it is more so).
  """
  wanted = jax.tree.leaves(like)
  accs: list[Any] = jax.tree.leaves(total)
  if not _validate.same_structure(total, like):
    accs = [None] * len(wanted)
  in_place = [acc is not None and _holds(acc, x) for acc, x in zip(accs, wanted, strict=True)]
  slots = [
    acc if here else _reduce.vary_like(jnp.zeros_like(x), x)
    for acc, here, x in zip(accs, in_place, wanted, strict=True)
  ]
  return slots, in_place


def _holds(acc: jax.Array, like: jax.ShapeDtypeStruct) -> bool:
  return (
    acc.shape == like.shape
    and _reduce.promote(acc.dtype, like.dtype) == acc.dtype
    and jnp.iscomplexobj(acc) == jnp.issubdtype(like.dtype, jnp.complexfloating)
    and _reduce.varying_axes(acc) == _reduce.varying_axes(like)
  )


def choose(in_place: list[bool], slots: list[jax.Array], total: optax.Updates) -> optax.Updates:
  """`total`, with the slots instead of those of its leaves that they share a buffer with."""
  leaves, treedef = jax.tree.flatten(total)
  if any(in_place):
    leaves = [slot if here else x for here, slot, x in zip(in_place, slots, leaves, strict=True)]
  return jax.tree.unflatten(treedef, leaves)
