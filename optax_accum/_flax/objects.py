"""The model and the optimizer that `nnx_train_step` is given: checked, and made fit."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_accum import _validate, _versions
from optax_accum._flax import graph


def wrap_arrays(optimizer: Any) -> None:
  """Makes Variables of arrays in an optimizer's state, which a user put there for Variables."""
  leaves = jax.tree.leaves(optimizer.opt_state, is_leaf=graph.is_variable)
  if all(map(graph.is_variable, leaves)):
    return
  wrapped = jax.tree.map(
    lambda x: x if graph.is_variable(x) else nnx.OptState(jnp.asarray(x)),
    optimizer.opt_state,
    is_leaf=graph.is_variable,
  )
  optimizer.opt_state = nnx.data(wrapped)


def check_objects(model: Any, optimizer: Any) -> None:
  """Checks that these are an nnx module and an nnx optimizer, in this order."""
  if isinstance(model, nnx.Optimizer):
    raise TypeError("The order is step(model, optimizer, batch), and the first is an optimizer.")
  if not isinstance(model, nnx.Module):
    raise TypeError(
      f"model is a {type(model).__name__}; nnx_train_step takes an nnx module. For linen there is"
      " linen_train_step, and for parameters make_train_step."
    )
  if not isinstance(optimizer, nnx.Optimizer):
    raise TypeError(
      f"optimizer is a {type(optimizer).__name__}; nnx_train_step takes an nnx.Optimizer:"
      " nnx.Optimizer(model, tx, wrt=nnx.Param)."
    )
  _validate.transformation(optimizer.tx, "optimizer.tx")
  for name, x in graph.named(nnx.state(model)).items():
    if graph.is_variable(x) and any(
      x.get_metadata(kind, False) for kind in _versions.NNX_REFERENCES
    ):
      raise TypeError(
        f"model.{name} is a {type(x).__name__} that is a reference (hijax=True or ref=True), which"
        " a step cannot take apart: make the model without."
      )


def check_wrt(wrt: Any, params: Any, model: Any, optimizer: Any) -> None:
  """Checks that `wrt` selects something, and what the optimizer has moments of."""
  names = list(graph.named(params))
  if not names:
    kinds = sorted({type(x).__name__ for x in graph.named(nnx.state(model)).values()})
    raise ValueError(
      f"wrt={shown(wrt)} selects nothing in {type(model).__name__}, which has {', '.join(kinds)}."
    )
  arrays = [name for name, x in graph.named(params).items() if not graph.is_variable(x)]
  if arrays:
    raise ValueError(
      f"wrt={shown(wrt)} selects model.{arrays[0]}, an array that is no Variable, which a step"
      " cannot update in place: make it an nnx.Param."
    )
  if optimizer.wrt is wrt:
    return
  theirs = list(graph.named(nnx.state(model, optimizer.wrt)))
  if differ := sorted(set(names) ^ set(theirs)):
    which = "the step" if differ[0] in names else "the optimizer"
    raise ValueError(
      f"wrt={shown(wrt)}, and the optimizer was made with wrt={shown(optimizer.wrt)}: only"
      f" {which} has model.{differ[0]}. Pass the same to both."
    )


def shown(wrt: Any) -> str:
  """A filter, as in the code that made it: ``Param``."""
  return getattr(wrt, "__name__", repr(wrt))
