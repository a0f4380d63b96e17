"""The options of `make_train_step` that the steps of flax take, and those that they decide."""

from collections.abc import Mapping
import inspect
from typing import Any

from optax_accum._train_step.train_step import make_train_step

_DECIDED = {
  "batch_argnums": "the batch is the second argument",
  "batch_argnames": "the batch is the second argument",
}


def check(step: str, options: Mapping[str, Any], decided: Mapping[str, str]) -> None:
  """Refuses an option that is none, or that `step` decides; `decided` says how."""
  decided = {**_DECIDED, **decided}
  names = inspect.signature(make_train_step).parameters
  for name in options:
    if name in decided:
      raise TypeError(f"{step} takes no {name}: {decided[name]}.")
    if name not in names:
      raise TypeError(f"{step} has no option {name!r}: see those of make_train_step.")


def shown(step: str, loss_fn: Any, given: Mapping[str, Any]) -> str:
  """What `repr` says of a step."""
  loss = getattr(loss_fn, "__name__", repr(loss_fn))
  named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
  return f"{step}({', '.join([loss, *named])})"
