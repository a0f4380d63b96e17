"""What the jaxpr of a loss tells: whether it draws, how it computes, what it compares with."""

from collections.abc import Iterator, Sequence
import re
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np

from optax_accum import _versions
from optax_accum._check_split import words
from optax_accum._check_split.probes import FIXED, is_key

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_BENDS = {"max", "min", "abs", "clamp", "sign"}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_KEEPS_NUMBERS = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}
_USUAL = (0, -1)  # what often says that an entry does not count
_MANY = 16  # numbers of a constant, or of all that are tried in each leaf of the batch


class Facts(NamedTuple):
  """What a loss does."""

  draws: bool  # random numbers
  draws_from_others: bool  # than the keys that are named
  bends: bool  # one number of the parameters and the batch: a maximum, or the like
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  integers: tuple[int, ...]  # what may say that an entry does not count
  floats: tuple[float, ...]  # the same, in arrays of floats

  @property
  def not_checked(self) -> tuple[str, ...]:
    """What the check does not look at."""
    return (words.DRAWS,) * self.draws + (words.BENDS,) * self.bends


class Input(NamedTuple):
  """What goes into an equation."""

  roles: frozenset[str] = frozenset()  # "params" or "batch": of the arguments that it comes from
  numbers: tuple[Any, ...] = ()  # those of a small constant


def facts_of(closed: Any, arguments: Sequence[Input], labels: Sequence[int]) -> Facts:
  """What a loss does by its jaxpr; `labels` are further integers that may not count."""
  known = dict(zip(closed.jaxpr.constvars, map(constant, closed.consts), strict=True))
  known |= zip(closed.jaxpr.invars, arguments, strict=True)
  keys, dtypes, numbers = set[str](), set[Any](), list[Any]()
  bends = finds_nan = False
  for eqn, inputs in _equations(closed.jaxpr, known):
    name, operands, roles = eqn.primitive.name, eqn.invars, _roles(inputs)
    out = [v.aval for v in eqn.outvars if hasattr(v.aval, "dtype")]
    dtypes.update(x.dtype for x in out if jnp.issubdtype(x.dtype, jnp.floating))
    if name in _DRAWS:
      keys.add(str(operands[0].aval.dtype) if operands else "")
    if name in _BENDS and roles == {"params", "batch"}:  # of an array, it is of each row
      bends |= out[0].shape == () and jnp.issubdtype(out[0].dtype, jnp.floating)
    if name == "is_finite" or (name == "ne" and operands[0] is operands[1]):
      finds_nan |= "batch" in roles  # data, or what is computed of them
    if name in _COMPARES and roles == {"batch"}:
      for number in filter(np.isfinite, [n for x in inputs for n in x.numbers]):
        beside = () if name in ("eq", "ne") else (number - 1, number + 1)
        numbers += [number, *beside]
  integers = dict.fromkeys([*_USUAL, *(n for n in numbers if type(n) is int)])
  # -1 is not among the floats, as it may be a weight below 0.
  floats = dict.fromkeys([*[np.nan] * finds_nan, 0.0, *(n for n in numbers if type(n) is float)])
  return Facts(
    bool(keys),
    bool(keys - {FIXED}),
    bends,
    any(dtype.itemsize < 4 for dtype in dtypes),
    tuple(dict.fromkeys([*list(integers)[:_MANY], *labels])),
    tuple(floats)[:_MANY],
  )


def _equations(jaxpr: Any, known: dict[Any, Input]) -> Iterator[tuple[Any, list[Input]]]:
  """All equations, and those within them, each with what goes in."""
  for eqn in jaxpr.eqns:
    inputs = [
      constant(v.val) if isinstance(v, Literal) else known.get(v, Input()) for v in eqn.invars
    ]
    yield eqn, inputs
    name, everything = eqn.primitive.name, Input(_roles(inputs))
    for inner in _versions.inner_jaxprs(eqn):
      given = inputs[1:] if name == "cond" else inputs
      if name in ("scan", "while") or len(given) != len(inner.invars):  # what goes around: all
        given = [everything] * len(inner.invars)
      yield from _equations(inner, dict(zip(inner.invars, given, strict=True)))
    if name in _KEEPS_NUMBERS:
      everything = everything._replace(numbers=inputs[0].numbers)
    known.update(dict.fromkeys(eqn.outvars, everything))


def constant(x: Any) -> Input:
  """What is known of a constant."""
  if not jax.dtypes.issubdtype(getattr(x, "dtype", np.int32), np.number) or np.size(x) > _MANY:
    return Input()
  return Input(numbers=tuple(np.asarray(x).ravel().tolist()))


def _roles(inputs: Sequence[Input]) -> frozenset[str]:
  return frozenset[str]().union(*(x.roles for x in inputs))


def are_the_same(first: Any, second: Any) -> bool:
  """Whether two jaxprs of a loss are; not where NumPy drew numbers while it was traced."""
  texts = [re.sub(r"0x[0-9a-f]+", "", str(x)) for x in (first, second)]
  consts = [[np.asarray(c) for c in x.consts if not is_key(c)] for x in (first, second)]
  return texts[0] == texts[1] and all(map(_equal, *consts))


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
  return np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact))
