"""What the values of a jaxpr depend on, and which of them are constants."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_FEW = 16  # entries of an array whose numbers are looked at one by one
_KEEPS_NUMBERS = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}
# Calls of one jaxpr, whose inputs and outputs are those of the jaxpr.
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "checkpoint", "remat2"}


class Value(NamedTuple):
  """What is known of one value."""

  depends: frozenset[str] = frozenset()  # "params", "batch", "key" or "other", of the arguments
  numbers: tuple[Any, ...] | None = None  # those of a small constant


class Step(NamedTuple):
  """One equation of a jaxpr, or of one within it, and what goes in."""

  equation: Any
  inputs: Sequence[Value]


def steps(jaxpr: Any, inputs: Sequence[Value]) -> Iterator[Step]:
  """All equations of a closed jaxpr that compute, in order; `inputs` are what it is called with."""
  return _Walk().steps(jaxpr, inputs)


def constant(x: Any) -> Value:
  """What is known of a constant."""
  if not jax.dtypes.issubdtype(getattr(x, "dtype", np.int32), np.number) or np.size(x) > _FEW:
    return Value()
  return Value(numbers=tuple(np.asarray(x).ravel().tolist()))


class _Walk:
  """What is known of each variable so far."""

  def __init__(self) -> None:
    self.known: dict[Any, Value] = {}

  def steps(self, closed: Any, inputs: Sequence[Value]) -> Iterator[Step]:
    jaxpr = getattr(closed, "jaxpr", closed)
    consts = map(constant, getattr(closed, "consts", ()))
    self.known.update(zip(jaxpr.constvars, consts, strict=False))
    self.known.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
      values = [self.value(v) for v in eqn.invars]
      everything = Value(frozenset().union(*(v.depends for v in values)))
      inner = inner_jaxprs(eqn)
      if not inner:
        yield Step(eqn, values)
      for each in inner:
        yield from self.steps(
          each, _of_inner(eqn, getattr(each, "jaxpr", each), values, everything)
        )
      if eqn.primitive.name in _KEEPS_NUMBERS:
        everything = everything._replace(numbers=values[0].numbers)
      self.known.update(dict.fromkeys(eqn.outvars, everything))
      if len(inner) == 1 and eqn.primitive.name in CALLS:
        of_inner = map(self.value, getattr(inner[0], "jaxpr", inner[0]).outvars)
        self.known.update(zip(eqn.outvars, of_inner, strict=True))

  def value(self, v: Any) -> Value:
    """What is known of a variable, or of a number in its place."""
    return constant(v.val) if hasattr(v, "val") else self.known.get(v, Value())


def _of_inner(eqn: Any, jaxpr: Any, values: Sequence[Value], everything: Value) -> Sequence[Value]:
  """What goes into a jaxpr within an equation."""
  if eqn.primitive.name in ("scan", "while"):  # what goes around depends on all the rest
    return [everything] * len(jaxpr.invars)
  if eqn.primitive.name == "cond":
    values = values[1:]
  return values if len(values) == len(jaxpr.invars) else [everything] * len(jaxpr.invars)


def inner_jaxprs(eqn: Any) -> list[Any]:
  """The jaxprs within an equation."""
  inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
  return [x for x in inner if _is_jaxpr(x)]


def _is_jaxpr(x: Any) -> bool:
  return hasattr(getattr(x, "jaxpr", x), "eqns")
