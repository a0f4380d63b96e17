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
  try:
    signature = inspect.signature(loss_fn)
  except (TypeError, ValueError):  # builtins and some callables have none
    return
  if misfit := _misfit(signature, arguments.split(", "), {}):
    raise TypeError(
      f"loss_fn takes {signature}, and {where} calls loss_fn({arguments}): {misfit}. Let it take"
      " these, and fix what else it takes, as in functools.partial(loss_fn, train=True)."
    )


def _misfit(signature: inspect.Signature, args: Any, kwargs: Any) -> str:
  """Why a function of this signature cannot be called so, or ""."""
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    return str(error)
  return ""
