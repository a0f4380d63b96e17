"""Calls that do not fit a signature: what to write, where Python only says what is wrong."""

from collections.abc import Callable, Mapping
import functools
import inspect
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def hinted(
  hint: str = "", names: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Decorates a function. The error of a call that does not fit its signature gets a hint.

  Args:
    hint: For any such call.
    names: For a call by a name that the function does not have, such as a peer's.
  """

  def decorate(fun: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(fun)

    @functools.wraps(fun)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
      try:
        return fun(*args, **kwargs)
      except TypeError:
        misfit = _misfit(signature, args, kwargs)
        found = [text for name, text in (names or {}).items() if name in kwargs] or [hint]
        if not misfit or not found[0]:
          raise
      raise TypeError(f"{fun.__qualname__}: {misfit}. {' '.join(found)}")

    return called

  return decorate


def check_takes(where: str, loss_fn: Callable[..., Any], arguments: str) -> None:
  """Checks, before anything is traced, that a loss takes the positional `arguments`."""
  own = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
  if hasattr(own, "__wrapped__"):  # a decorator may take other arguments than what it wraps
    return
  try:
    signature = inspect.signature(loss_fn)
  except (TypeError, ValueError, NameError):  # builtins and some callables have none
    return
  if misfit := _misfit(signature, arguments.split(", "), {}):
    fix = "fix what else it takes: functools.partial(loss_fn, train=True)"
    if isinstance(loss_fn, functools.partial):
      fix = "have what functools.partial fixes by name come last, or write a lambda"
    raise TypeError(
      f"loss_fn takes {signature}, and {where} calls loss_fn({arguments}): {misfit}. Let it take"
      f" these by position, and {fix}."
    )


def _misfit(signature: inspect.Signature, args: Any, kwargs: Any) -> str:
  """Why a function of this signature cannot be called so, or ""."""
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    return str(error)
  return ""
