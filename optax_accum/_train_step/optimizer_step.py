"""One step of an optimizer by the gradients of a batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic.conditional import Flag, update_if
from optax_accum._arithmetic.trees import Grads, Kwargs, OptState, Params
from optax_accum._compiled import scopes
from optax_accum._streaming.inner_state import same_types, widened
from optax_accum._streaming.state import states_in


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerStep:
  """A step of `tx` by the gradients of a batch. Where nothing was counted, all stays as it is.

  So to an `accumulate` in `tx` a batch in which nothing counts is no mini step.
  """

  tx: optax.GradientTransformationExtraArgs
  grads: Grads
  extra_args: Kwargs
  counted: Flag  # whether anything of the batch was

  @jax.named_scope(scopes.WHOLE_CYCLE)
  def __call__(self, before: tuple[Params, OptState]):
    """The new parameters; and the new state, with whether the optimizer took a step."""
    params, opt_state = before
    # The flag is False, no step, unless `_take` runs and replaces it.
    operand = params, (opt_state, jnp.zeros((), jnp.bool_))
    # Python's True, not an array: it is known that something counts, so no conditional.
    if self.counted is True:
      return self._take(operand)
    # Traced once, for types and for the conditional.
    take = jax.jit(self._take, inline=True)
    # The conditional keeps types, so the operand gets those of the results before.
    operand = widened(take, operand)
    return update_if(self.counted, take, operand, scopes.END_OF_CYCLE)

  def _take(self, operand):
    """The step, whatever was counted."""
    # The flag that comes in is always False, and a new one is returned.
    params, (state, _) = operand
    updates, new_state = self.tx.update(
      self.grads, state, params, **self.extra_args
    )
    new = optax.apply_updates(params, updates)
    # The new parameters get the shardings of the old.
    new = same_types("params", new, params)
    # Without a conditional an update may change the tree of a state, as optax.monitor does.
    old: Any = jax.tree.structure(state)
    keeps = old == jax.tree.structure(new_state)
    # Where the tree changed and there is a conditional, `same_types` raises the error.
    if keeps or self.counted is not True:
      new_state = same_types("opt_state", new_state, state)
    return new, (new_state, has_stepped(new_state))


def has_stepped(opt_state: OptState) -> jax.Array:
  """Whether an optimizer took a step: some `accumulate` in it did, and so did what that wraps."""
  # These are the outermost ones; what is within each is asked in turn.
  stepped = [
    state.has_updated & has_stepped(state.inner_opt_state)
    for state in states_in(opt_state)
  ]
  # Without an `accumulate` every call is a step.
  if not stepped:
    return jnp.bool_(True)
  return functools.reduce(jnp.logical_or, stepped)
