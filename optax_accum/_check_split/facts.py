"""What the jaxpr of a loss tells: whether it draws, how it computes, what it compares with."""

from collections.abc import Iterable, Iterator
import re
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
import jax.numpy as jnp
import numpy as np

from optax_accum import _versions
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Leaf, Leaves
from optax_accum._check_split import words
from optax_accum._check_split.probes import Call, FIXED

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_BENDS = {"max", "min", "abs", "clamp", "sign"}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_KEEPS_NUMBERS = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"}
_USUAL = (0, -1)  # what often says that an entry does not count
_MANY = 16  # numbers of a constant, or of all that are tried in each leaf of the batch


class Facts(NamedTuple):
  not_checked: tuple[str, ...]  # what the check does not look at
  draws_from_others: bool  # random numbers, from other keys than those that are named
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  integers: tuple[int, ...]  # what may say that an entry does not count
  floats: tuple[float, ...]  # the same, in arrays of floats


class _Input(NamedTuple):  # of an equation
  roles: frozenset[str] = frozenset()  # "params" or "batch": of the arguments that it comes from
  numbers: tuple[int | float, ...] = ()  # those of a small constant


def facts_of(closed: ClosedJaxpr, call: Call) -> Facts:
  """What a loss does by its jaxpr, whose inputs are the arrays of a call."""
  arguments = [
    _Input(frozenset({x.role})) if x.role in ("params", "batch") else _constant(x.value)
    for x in call.arrays
  ]
  known = dict(zip(closed.jaxpr.constvars, map(_constant, closed.consts), strict=True))
  known |= zip(closed.jaxpr.invars, arguments, strict=True)
  keys, dtypes, numbers = set[str](), set[np.dtype](), list[int | float]()
  bends = finds_nan = False
  for eqn, inputs in _equations(closed.jaxpr, known):
    name, of = eqn.primitive.name, _roles(inputs)
    operands: Leaves = eqn.invars
    out: Leaves = [v.aval for v in eqn.outvars]
    floats = [x for x in out if jnp.issubdtype(getattr(x, "dtype", int), jnp.floating)]
    dtypes.update(x.dtype for x in floats)
    if name in _DRAWS:
      keys.add(str(operands[0].aval.dtype) if operands else "")
    if name in _BENDS and of == {"params", "batch"}:  # of an array, it is of each row
      bends |= any(x.shape == () for x in floats)
    if name == "is_finite" or (name == "ne" and operands[0] is operands[1]):
      finds_nan |= "batch" in of  # data, or what is computed of them
    if name in _COMPARES and of == {"batch"}:
      for number in filter(np.isfinite, [n for x in inputs for n in x.numbers]):
        numbers += [number] if name in ("eq", "ne") else [number, number - 1, number + 1]
  integers = dict.fromkeys([*_USUAL, *(n for n in numbers if type(n) is int)])
  # -1 is not among these, as it may be a weight below 0.
  data = dict.fromkeys([*[np.nan] * finds_nan, 0.0, *(n for n in numbers if type(n) is float)])
  labels = [x.value for x in call.batch if x.kind in "iu" and x.value.size]
  negative = [int(x.min()) for x in labels if x.min() < 0]
  return Facts(
    (words.DRAWS,) * bool(keys) + (words.BENDS,) * bends,
    bool(keys - {FIXED}),
    any(dtype.itemsize < 4 for dtype in dtypes),
    tuple(dict.fromkeys([*list(integers)[:_MANY], *negative])),
    tuple(data)[:_MANY],
  )


def _equations(jaxpr: Jaxpr, known: dict[Var, _Input]) -> Iterator[tuple[JaxprEqn, list[_Input]]]:
  """All equations, and those within them, each with what goes in."""
  for eqn in jaxpr.eqns:
    inputs = [
      _constant(v.val) if isinstance(v, Literal) else known.get(v, _Input()) for v in eqn.invars
    ]
    yield eqn, inputs
    name, everything = eqn.primitive.name, _Input(_roles(inputs))
    for inner in _versions.inner_jaxprs(eqn):
      given = inputs[1:] if name == "cond" else inputs
      if name in ("scan", "while") or len(given) != len(inner.invars):  # what goes around: all
        given = [everything] * len(inner.invars)
      yield from _equations(inner, dict(zip(inner.invars, given, strict=True)))
    if name in _KEEPS_NUMBERS:
      everything = everything._replace(numbers=inputs[0].numbers)
    known.update(dict.fromkeys(eqn.outvars, everything))


def _constant(x: Leaf) -> _Input:
  if not jnp.issubdtype(getattr(x, "dtype", np.int32), np.number) or np.size(x) > _MANY:
    return _Input()
  return _Input(numbers=tuple(np.asarray(x).ravel().tolist()))


def _roles(inputs: Iterable[_Input]) -> frozenset[str]:
  return frozenset[str]().union(*(x.roles for x in inputs))


def fingerprint(closed: ClosedJaxpr) -> tuple[str, list[bytes]]:
  """What two jaxprs of a loss share; not where NumPy drew numbers while it was traced."""
  consts = [np.asarray(x).tobytes() for x in closed.consts if not is_key(x)]
  return re.sub(r"0x[0-9a-f]+", "", str(closed)), consts
