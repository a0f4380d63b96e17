"""Whether an optimizer took a step, which one that accumulates does once a cycle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._streaming.state import AccumulateState
from optax_accum._validate import named_leaves

# Flax's collection of what no optimizer steps.
_OVERWRITTEN = "_overwrite_with_gradient"
# What may leave all as it is: the states of wrappers, each with that of what it wraps.
_GATES = AccumulateState, optax.MultiStepsState, optax.ApplyIfFiniteState


def has_stepped(before, after, updates) -> jax.Array:
  """Whether an optimizer that returned `updates` took a step."""
  stepped = _have_passed(before, after)
  if _states(optax.ApplyIfFiniteState, after):
    # Its state does not tell whether it gave up, and applied what is not finite, nor whether the
    # optimizer of other parameters took a step.
    named = named_leaves("", updates)
    moved = [jnp.any(x != 0) for name, x in named if _OVERWRITTEN not in name]
    stepped = functools.reduce(jnp.logical_or, moved, stepped)
  return stepped


def _have_passed(before, after) -> jax.Array:
  """Whether one of the outermost wrappers let a step pass, or there is none."""
  gates = _states(_GATES, before), _states(_GATES, after)
  passed = list(map(_has_passed, *gates))
  if not passed:
    return jnp.bool_(True)
  return jnp.any(jnp.stack(passed))


def _has_passed(before, after) -> jax.Array:
  """Whether such a wrapper, and those within it, let a step pass."""
  if isinstance(after, optax.ApplyIfFiniteState):
    inner = _have_passed(before.inner_state, after.inner_state)
    return after.last_finite & inner
  # Without parameters nothing moves.
  moves: Any = bool(jax.tree.leaves(after.acc_grads))
  if isinstance(after, AccumulateState):
    moves = after.has_updated
  stepped = (after.gradient_step != before.gradient_step) & moves
  return stepped & _have_passed(before.inner_opt_state, after.inner_opt_state)


def _states(kinds, tree):
  """The outermost states of such kinds."""

  def is_one(x):
    return isinstance(x, kinds)

  return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))
