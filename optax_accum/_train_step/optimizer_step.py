"""One step of an optimizer by the gradients of a batch."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _scopes
from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.conditional import Flag, update_if
from optax_accum._arithmetic.trees import Grads, Kwargs, OptState, Params
from optax_accum._streaming.checks import sending
from optax_accum._streaming.inner_state import same_types, updated, widened
from optax_accum._streaming.state import has_updated, is_state, states_in
from optax_accum._train_step.stepped import has_stepped


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerStep:
  """A step of `tx` by the gradients of a batch. Where nothing was counted, no parameter moves."""

  tx: optax.GradientTransformationExtraArgs
  grads: Grads
  extra_args: Kwargs
  counted: Flag  # whether anything of the batch was

  @jax.named_scope(_scopes.WHOLE_CYCLE)
  def __call__(self, before: tuple[Params, OptState]):
    """The new parameters; and the new state, with whether the optimizer took a step."""
    params, opt_state = before
    # What is returned, as it was before the step.
    operand = params, (opt_state, jnp.zeros((), jnp.bool_))
    if self.counted is True:
      return self._take(operand)
    if states_in(opt_state):
      return self._take_mini_step(operand)
    return self._take_if_counted(operand)

  def _take(self, operand, **of_cycle: Flag):
    """The step, whatever was counted."""
    params, (opt_state, _) = operand
    extra_args = {**self.extra_args, **of_cycle}
    needed = set(extra_args)
    if isinstance(extra_args["weight"], float):
      needed.clear()  # there are no weights, so nothing is lost where it is dropped
    given = self.grads, opt_state, params
    update = functools.partial(_update, self.tx.update, given, extra_args)
    updates, new_state = updated(
      "opt_state",
      self.tx.init,
      params,
      opt_state,
      functools.partial(sending, needed, update),
      # The branches of a conditional have the same types, so only without one may a state grow.
      may_grow=self.counted is True,
    )
    new = same_types("params", optax.apply_updates(params, updates), params)
    return new, (new_state, has_stepped(opt_state, new_state, updates))

  def _take_if_counted(self, operand):
    """The step under a condition."""
    # Traced once, for types and for the conditional.
    take = jax.jit(self._take, inline=True)
    operand = widened(take, operand)
    return update_if(self.counted, take, operand, _scopes.END_OF_CYCLE)

  def _take_mini_step(self, operand):
    """The step of an optimizer that accumulates, or a part of which does.

    To that a batch of padding is a mini step, which adds nothing and ends no cycle. What does not
    accumulate stays as it was then.
    """
    _, (old_state, _) = operand
    new = self._take(operand, _may_end=self.counted)
    if is_state(old_state):
      return new
    # An `update` that was jitted, and traced before, may end a cycle all the same.
    _, (new_state, _) = new
    counted = self.counted | has_updated(new_state)

    def choose(x, before):
      if is_state(x):
        return x
      return weighted_mean.select(counted, x, dtypes.in_dtype_of(before, x))

    return jax.tree.map(choose, new, operand, is_leaf=is_state)


def _update(update: Callable[..., Any], args, extra_args):
  """What `update` returns, without the extra arguments that it, or what it wraps, refuses."""
  parameters = inspect.signature(update).parameters
  if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    known = {name: x for name, x in extra_args.items() if name in parameters}
    return update(*args, **known)
  # A signature does not tell what a chain wraps: its own takes all.
  left = dict(extra_args)
  while True:
    try:
      return update(*args, **left)
    except TypeError as error:
      name = _refused_within(error)
      if name not in left:
        raise
    del left[name]


def _refused_within(error: TypeError) -> str:
  """The extra argument that a wrapper of optax, or of ours, passed on to what does not take it."""
  refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
  *_, (caller, _) = traceback.walk_tb(error.__traceback__)
  module = caller.f_globals["__name__"]
  if refused and module.startswith(("optax.", "optax_accum.")):
    return refused[1]
  return ""
