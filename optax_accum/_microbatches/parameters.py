"""What a step is passed: what can be differentiated, and in which order."""

import jax
import optax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes


def check_step(params, opt_state, /, *others, **named) -> None:
  """Checks that a step is given parameters that can be differentiated, and a batch."""
  check_differentiable("argument 0", params)
  if not others and not named:
    raise TypeError(
      "The step, or its finish, got 2 arguments, so one is missing: the order is"
      " step(params, opt_state, batch), and finish(params, opt_state, cycle)."
    )


def check_order(tx: optax.GradientTransformation, params, opt_state) -> None:
  """Checks, after a step failed, that parameters and state are not in each other's place."""

  def are_these(params, state):
    try:
      like = jax.eval_shape(tx.init, params)
      return not _validate.difference("opt_state", state, like)
    except Exception:  # no tree of arrays
      return False

  if are_these(opt_state, params) and not are_these(params, opt_state):
    raise TypeError(
      "The optimizer state is in the place of the parameters: the order is step(params, opt_state,"
      " batch), and finish(params, opt_state, cycle)."
    )


def check_differentiable(what: str, tree) -> None:
  """Checks that every leaf can be differentiated."""
  _validate.refuse_fp8(what, tree)
  for name, leaf in _validate.named_leaves(what, tree):
    if not dtypes.is_inexact(leaf):
      kind = getattr(leaf, "dtype", type(leaf))
      word = f"dtype {kind}"
      if isinstance(kind, type):
        word = f"type {kind.__name__}"
      raise TypeError(
        f"{name} has {word} and cannot be differentiated: close over what is not a floating or"
        " complex array, or pass it as another argument (in Equinox: eqx.partition(model,"
        " eqx.is_inexact_array))."
      )
