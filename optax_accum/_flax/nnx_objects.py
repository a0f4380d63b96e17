"""Checks of the model and the optimizer that a step of nnx is passed."""

from flax import nnx

from optax_accum import _validate, _versions
from optax_accum._flax.variables import is_variable, named


def check_objects(call: str, model: object, optimizer: object) -> None:
  """Checks that these are an nnx module and an nnx optimizer, in this order."""
  is_model = isinstance(model, nnx.Module)
  if not is_model or not isinstance(optimizer, nnx.Optimizer):
    raise TypeError(
      f"{call} got {type(model).__name__} and {type(optimizer).__name__}: it takes an nnx module"
      " and an nnx.Optimizer(model, tx, wrt=nnx.Param), in this order. For linen there is"
      " linen_train_step, and for parameters make_train_step."
    )
  _validate.transformation(optimizer.tx, "optimizer.tx")


def check_module(call: str, model: object) -> None:
  """Checks that this is an nnx module."""
  if not isinstance(model, nnx.Module):
    raise TypeError(
      f"{call} got a {type(model).__name__} as model: it takes an nnx module."
    )


def check_model(wrt, params, model: nnx.Module, optimizer) -> None:
  """Checks a model of this structure, and that `wrt` selects what the optimizer was made for."""
  by_name = named(nnx.state(model))
  selected = named(params)
  for name, x in by_name.items():
    if is_variable(x) and any(
      x.get_metadata(kind, False) for kind in _versions.NNX_REFERENCES
    ):
      raise TypeError(
        f"model.{name} is a {type(x).__name__} that is a reference (hijax=True or ref=True), which"
        " a step cannot take apart: make the model without."
      )
  if not selected:
    kinds = sorted({type(x).__name__ for x in by_name.values()})
    raise ValueError(
      f"wrt={shown(wrt)} selects nothing in {type(model).__name__}, which has {', '.join(kinds)}."
    )
  for name, x in selected.items():
    if not is_variable(x):
      raise ValueError(
        f"wrt={shown(wrt)} selects model.{name}, an array that is not a Variable, which a step"
        " cannot update in place: make it an nnx.Param."
      )
  if optimizer is None:
    return
  # The state of a plain SGD would not tell.
  of_optimizer = named(nnx.state(model, optimizer.wrt))
  for name in sorted(selected.keys() ^ of_optimizer.keys()):
    one = "the step" if name in selected else "the optimizer"
    raise ValueError(
      f"wrt={shown(wrt)}, and the optimizer was made with wrt={shown(optimizer.wrt)}: only {one}"
      f" has model.{name}. Pass the same to both."
    )


def shown(wrt: object) -> str:
  """A filter, as in the code that made it: ``Param``."""
  return getattr(wrt, "__name__", repr(wrt))
