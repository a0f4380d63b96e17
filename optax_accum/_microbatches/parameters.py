"""What a step is passed: what can be differentiated, and what to pass instead of what cannot be.

Flax and Equinox are not imported for it: their objects are told by attributes and class names.
"""

import jax
import optax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.trees import Tree


def check_step(params, opt_state, /, *others, **named) -> None:
  """Checks what a step is given: parameters, which it updates and returns, and their state."""
  _refuse_object("params", params)
  if hasattr(opt_state, "init") and hasattr(opt_state, "update"):
    raise TypeError(
      f"opt_state is a {type(opt_state).__name__}, the transformation itself: pass the state that"
      " tx.init(params) returns."
    )
  check_differentiable("argument 0", params)
  if not others and not named:
    raise TypeError(
      "The step got 2 arguments, so the batch or the optimizer state is missing: the order is"
      " step(params, opt_state, batch)."
    )
  check_arrays(*others, **named)


def check_arrays(*others, **named) -> None:
  """Checks that what a step is given from the batch on has arrays and numbers alone."""
  given = dict[object, Tree](enumerate(others, 2)) | named
  for slot, tree in given.items():
    root = "batch" if slot == 2 else f"argument {slot!r}"
    for name, x in _validate.named_leaves(root, tree):
      is_array = hasattr(x, "dtype") or hasattr(x, "__jax_array__")
      if is_array or isinstance(x, complex | float | int):
        continue
      what = f"of type {type(x).__name__}"
      if isinstance(x, str):
        what = f"the string {x!r}"
      raise TypeError(
        f"{name} is {what} and no array: leave it out of the batch, or fix it in the loss,"
        " functools.partial(loss_fn, mode=...), and make a step for each value."
      )


def check_order(tx: optax.GradientTransformation, order: str, *args) -> None:
  """Checks, after a step failed, that its arguments are not in another order than this."""

  def misfit(params, state):
    try:
      like = jax.eval_shape(tx.init, params)
      return _validate.difference("opt_state", state, like)
    except Exception:  # no tree of arrays
      return "the optimizer takes no such tree"

  why = misfit(*args[:2])
  # Two of the three are in each other's place.
  for i, j in ((1, 0), (0, 2), (2, 1)):
    if why and len(args) > max(i, j) and not misfit(args[i], args[j]):
      raise TypeError(
        f"opt_state is not a state of the first argument ({why}), but argument {j} is one of"
        f" argument {i}: the order is {order}."
      )


def check_differentiable(what: str, tree) -> None:
  """Checks that every leaf can be differentiated."""
  for name, leaf in _validate.named_leaves(what, tree):
    if not dtypes.is_inexact(leaf):
      _refuse_object(what, tree)
      kind = getattr(leaf, "dtype", type(leaf))
      word = f"dtype {kind}"
      if isinstance(kind, type):
        word = f"type {kind.__name__}"
      raise TypeError(
        f"{name} has {word} and cannot be differentiated: close over what is not a floating or"
        " complex array, or pass it as another argument (in Equinox: eqx.partition(model,"
        " eqx.is_inexact_array))."
      )


def _refuse_object(what: str, tree) -> None:
  """Refuses an object that is more than parameters, and says what to pass instead of it."""
  kind = type(tree)
  fields = ("params", "opt_state", "apply_gradients")
  if all(hasattr(tree, field) for field in fields):
    raise TypeError(
      f"{what} is a {kind.__name__}, which holds more than parameters:"
      " optax_accum.flax.linen_train_step takes it. Or pass state.params and state.opt_state, and"
      " state.replace them by the new ones."
    )
  for base in kind.__mro__:
    if base.__name__ == "Module" and base.__module__.startswith("flax.nnx"):
      raise TypeError(
        f"{what} is {kind.__name__}, an nnx module, which holds more than parameters:"
        " optax_accum.flax.nnx_train_step takes it. Or pass the params of nnx.split(model,"
        " nnx.Param, ...), have the loss nnx.merge them with copy=True, and nnx.update the model by"
        " new ones."
      )
