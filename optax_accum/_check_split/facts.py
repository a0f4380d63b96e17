"""What the jaxpr of a loss tells: random numbers, thresholds, and where rows may meet."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_accum import _versions
from optax_accum._arithmetic.trees import Leaf
from optax_accum._check_split import words
from optax_accum._check_split.probes import Call, FIXED

_DRAWS = {
  "random_bits",
  "random_gamma",
  "threefry2x32",
  "rng_bit_generator",
  "rng_uniform",
}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_ORDERS = {"sort", "top_k", "argmax", "argmin"}
_BENDS = {
  "max",
  "min",
  "abs",
  "clamp",
  "sign",
  "round",
  "floor",
  "ceil",
  "reduce_max",
  "reduce_min",
}
_BENDS |= {"reduce_or", "reduce_and"} | _COMPARES | _ORDERS
_CURVES = {
  "sqrt",
  "rsqrt",
  "log",
  "exp",
  "integer_pow",
  "square",
  "pow",
  "logistic",
  "tanh",
}
_USUAL = (0, -1)  # what often says that an entry does not count
_MANY = 16  # numbers of a constant, or of all that are tried in each leaf of the batch
# Where a number comes from: "params", "batch", "draws"; "total" if it is of all rows; "mixed" if it
# is of a random order of rows.
_Sources = frozenset[str]
_LOSS = {"params", "batch"}


class Facts(NamedTuple):
  not_checked: tuple[str, ...]  # what the check does not look at
  draws_from_others: (
    bool  # random numbers, from other keys than those that are named
  )
  mixes: bool  # whether rows are put in a random order
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  is_single: bool  # the same in float32
  integers: list[int]  # what may say that an entry does not count
  floats: list[float]  # the same, in arrays of floats
  couplings: list[
    str
  ]  # how rows may depend on each other: some of `words.MENDS`


class _Equation(NamedTuple):
  eqn: Any
  twin: Any  # the same for twice as many rows
  sources: list[_Sources]  # of each operand

  @property
  def name(self) -> str:
    return str(self.eqn.primitive.name)

  @property
  def of(self) -> _Sources:
    return _Sources().union(*self.sources)

  @property
  def rows_of_operands(self) -> list[list[int]]:
    return _rows(self.eqn.invars, self.twin.invars)

  @property
  def has_rows(self) -> bool:
    return any(_rows(self.eqn.outvars, self.twin.outvars))

  @property
  def makes(self) -> _Sources:
    """Where its results come from."""
    kinds = {
      "draws": self.name in _DRAWS,
      "total": "batch" in self.of
      and any(self.rows_of_operands)
      and not self.has_rows,
      "mixed": self.mixes,
    }
    return self.of.union(kind for kind, is_one in kinds.items() if is_one)

  @property
  def bends(self) -> bool:
    """Whether it is another function on one side of a number that all rows make."""
    if self.has_rows or not self.makes >= {*_LOSS, "total"}:
      return False
    to_integer = self.name == "convert_element_type" and not _is_float(
      self.eqn.outvars[0].aval
    )
    return self.name in _BENDS or (
      to_integer and _is_float(self.eqn.invars[0].aval)
    )

  @property
  def orders(self) -> bool:
    """Whether it orders rows, or chooses some."""
    if self.name not in _ORDERS:
      return False
    params, rows = self.eqn.params, self.rows_of_operands[0]
    last = len(self.eqn.invars[0].aval.shape) - 1
    axes = params.get("axes") or (
      params.get("dimension", params.get("axis", last)),
    )
    return any(axis in rows for axis in axes)

  @property
  def mixes(self) -> bool:
    """Whether it finds a random order. To sort what is drawn is not one."""
    return self.orders and "draws" in self.of and len(self.eqn.outvars) > 1

  def couplings(self) -> Iterator[str]:
    """How rows may meet in it."""
    if self.bends:
      yield "bends"
    if self.mixes:
      yield "mixed"
    elif self.orders and "batch" in self.of:
      yield "ordered"
    results = zip(self.eqn.outvars, self.twin.outvars, strict=True)
    if "batch" in self.of and any(
      w.aval.size >= 4 * v.aval.size > 0 for v, w in results
    ):
      yield "pairs"
    each = zip(self.sources, self.rows_of_operands, strict=True)
    totals = [of for of, rows in each if "total" in of and not rows]
    if self.has_rows:
      # A first layer that normalizes has a statistic of the data too.
      yield from ("data" for of in totals if "params" not in of)
      yield from ("statistics" for _ in totals)
      return
    of_params = [of for of in totals if "params" in of]
    if self.name in _CURVES and of_params:
      yield "function"
    if self.name == "mul" and len(totals) > 1 and of_params:
      yield "function"
    if self.name == "div" and "total" in self.sources[1]:
      yield "function" if "params" in self.sources[1] else "denominators"
    if (
      self.name in ("add", "add_any")
      and of_params
      and {"params"} in self.sources
    ):
      yield "regularizer"


def facts_of(closed: Any, twin: Any, call: Call) -> Facts:
  """What a loss does by its jaxpr, whose inputs are the arrays of a call.

  What differs in `twin`, the jaxpr for twice as many rows, is an axis of rows.
  """
  given = [_Sources({x.role} & _LOSS) for x in call.arrays]
  equations = list[_Equation]()
  try:
    of_loss = _walk(closed.jaxpr, twin.jaxpr, given, equations)[0]
  except (
    ValueError
  ):  # a Python loop over rows: then nothing is known to have an axis of rows
    equations.clear()
    given = [of | {"total"} if "batch" in of else of for of in given]
    of_loss = _walk(closed.jaxpr, closed.jaxpr, given, equations)[0]
  draws: list[Any] = [e.eqn for e in equations if e.name in _DRAWS]
  keys = {str(eqn.invars[0].aval.dtype) for eqn in draws if eqn.invars}
  results: list[tuple[Any, _Sources]] = [
    (v.aval, e.of) for e in equations for v in e.eqn.outvars
  ]
  floats_of = [
    (aval.dtype.itemsize, of) for aval, of in results if _is_float(aval)
  ]
  integers, floats = _marks(closed, equations, call)
  bends = any(e.bends for e in equations)
  found = {coupling for e in equations for coupling in e.couplings()}
  return Facts(
    not_checked=(words.DRAWS,) * bool(draws) + (words.BENDS,) * bends,
    draws_from_others=bool(keys - {FIXED}),
    mixes="mixed" in of_loss,
    is_half=any(width < 4 for width, _ in floats_of),
    is_single=any(width == 4 and "params" in of for width, of in floats_of),
    integers=integers,
    floats=floats,
    couplings=[x for x in words.MENDS if x in found],
  )


def _marks(
  closed: Any, equations: Sequence[_Equation], call: Call
) -> tuple[list[int], list[float]]:
  """Integers and floats that may say that an entry of the batch does not count."""
  numbers = list[Any]()
  finds_nan = False
  for e in equations:
    if "batch" not in e.of:
      continue
    operands = e.eqn.invars
    finds_nan |= e.name == "is_finite" or (
      e.name == "ne" and operands[0] is operands[1]
    )
    # A function within the loss may be given a number, and compare data with it.
    if (e.name in _COMPARES and "params" not in e.of) or _versions.inner_jaxprs(
      e.eqn
    ):
      literals = [
        n for x in operands if hasattr(x, "val") for n in _numbers(x.val)
      ]
      numbers += literals
      if e.name in _COMPARES - {"eq", "ne"}:
        numbers += [m for n in literals for m in (n - 1, n + 1)]
  shared = [x.value for x in call.arrays if x.role == "shared"]
  numbers += [n for x in (*closed.consts, *shared) for n in _numbers(x)]
  integers = list(
    dict.fromkeys([*_USUAL, *(n for n in numbers if type(n) is int)])
  )[:_MANY]
  labels = [x.value for x in call.batch if x.kind in "iu" and x.value.size]
  integers += [int(x.min()) for x in labels if x.min() < 0]
  # -1 is not among these, as it may be a weight below 0.
  floats = dict.fromkeys(
    [*[np.nan] * finds_nan, 0.0, *(n for n in numbers if type(n) is float)]
  )
  return list(dict.fromkeys(integers)), list(floats)[:_MANY]


def _walk(
  jaxpr: Any, twin: Any, given: Sequence[_Sources], found: list[_Equation]
) -> list[_Sources]:
  """Adds all equations to `found`, and those within them. Returns where the results come from."""
  known: dict[Any, _Sources] = dict(zip(jaxpr.invars, given, strict=True))

  def sources(variables: Sequence[Any]) -> list[_Sources]:
    return [
      _Sources() if hasattr(v, "val") else known.get(v, _Sources())
      for v in variables
    ]

  for eqn, other in zip(jaxpr.eqns, twin.eqns, strict=True):
    operands = sources(eqn.invars)
    equation = _Equation(eqn, other, operands)
    found.append(equation)
    results = [equation.makes] * len(eqn.outvars)
    within = zip(
      _versions.inner_jaxprs(eqn), _versions.inner_jaxprs(other), strict=True
    )
    inside = []
    for inner, inner_twin in within:
      choice = int(
        equation.name == "cond"
      )  # the first operand chooses the branch
      loops = (
        equation.name in ("scan", "while")
        or len(inner.invars) != len(operands) - choice
      )
      into = operands[choice:]
      if (
        loops
      ):  # what goes around may be of all that goes in, and of what comes out
        once = _walk(inner, inner_twin, [equation.of] * len(inner.invars), [])
        into = [equation.of.union(*once)] * len(inner.invars)
      out = _walk(inner, inner_twin, into, found)
      if loops or len(out) != len(results):
        out = [equation.makes.union(*out)] * len(results)
      inside.append([x.union(*operands[:choice]) for x in out])
    if inside:
      results = [_Sources().union(*each) for each in zip(*inside, strict=True)]
    known.update(zip(eqn.outvars, results, strict=True))
  return sources(jaxpr.outvars)


def _rows(variables: Sequence[Any], twins: Sequence[Any]) -> list[list[int]]:
  """Of each variable the axes that are longer in its twin."""
  shapes = [
    (np.shape(v.aval), np.shape(w.aval))
    for v, w in zip(variables, twins, strict=True)
  ]
  return [
    [i for i, (n, m) in enumerate(zip(*x, strict=False)) if n != m]
    for x in shapes
  ]


def _is_float(aval: Any) -> bool:
  return jnp.issubdtype(getattr(aval, "dtype", int), jnp.floating)


def _numbers(x: Leaf) -> list[int | float]:
  """Those of a small constant."""
  if (
    not jnp.issubdtype(getattr(x, "dtype", np.int32), np.number)
    or np.size(x) > _MANY
  ):
    return []
  return [n for n in np.asarray(x).ravel().tolist() if np.isfinite(n)]
