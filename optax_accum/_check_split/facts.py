"""What the jaxpr of a loss tells: random numbers, thresholds, and where rows may meet."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_accum import _versions
from optax_accum._check_split.call import Call
from optax_accum._check_split.noise import FIXED

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
  *_COMPARES,
  *_ORDERS,
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
  "reduce_or",
  "reduce_and",
}
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
_NOWHERE = _Sources()
_LOSS = {"params", "batch"}


class Facts(NamedTuple):
  """What a loss does by its jaxpr."""

  draws: bool  # random numbers
  draws_from_others: bool  # random numbers, from other keys than the named ones
  mixes: bool  # whether rows are put in a random order
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  is_single: bool  # the same in float32
  integers: list[int]  # what may say that an entry does not count
  floats: list[float]  # the same, in arrays of floats
  couplings: set[str]  # how rows may depend on each other: of `words.MENDS`


class _Equation(NamedTuple):
  eqn: Any
  twin: Any  # the same for twice as many rows
  sources: list[_Sources]  # of each operand

  @property
  def name(self) -> str:
    return self.eqn.primitive.name

  @property
  def of(self) -> _Sources:
    return _NOWHERE.union(*self.sources)

  @property
  def rows(self) -> list[list[int]]:
    """Of each operand, the axes that are rows."""
    return _rows(self.eqn.invars, self.twin.invars)

  @property
  def has_rows(self) -> bool:
    return any(_rows(self.eqn.outvars, self.twin.outvars))

  @property
  def makes(self) -> _Sources:
    """Where its results come from."""
    made = set(self.of)
    if self.name in _DRAWS:
      made.add("draws")
    if "batch" in made and any(self.rows) and not self.has_rows:
      made.add("total")
    if self.mixes:
      made.add("mixed")
    return _Sources(made)

  @property
  def orders(self) -> bool:
    """Whether it orders rows, or chooses some."""
    if self.name not in _ORDERS:
      return False
    params = self.eqn.params
    last = self.eqn.invars[0].aval.ndim - 1
    axis = params.get("dimension", params.get("axis", last))
    return not {*params.get("axes", [axis])}.isdisjoint(self.rows[0])

  @property
  def mixes(self) -> bool:
    """Whether it finds a random order. To sort what is drawn is not one."""
    return self.orders and "draws" in self.of and len(self.eqn.outvars) > 1

  def couplings(self) -> Iterator[str]:
    """How rows may meet in it."""
    is_total = self.makes >= {*_LOSS, "total"} and not self.has_rows
    if is_total and self.name in _BENDS:
      # Another function on one side of a number that all rows make.
      yield "bends"
    if self.mixes:
      yield "mixed"
    elif self.orders and "batch" in self.of:
      yield "ordered"
    for result, twin in zip(self.eqn.outvars, self.twin.outvars, strict=True):
      if "batch" in self.of and twin.aval.size >= 4 * result.aval.size > 0:
        yield "pairs"
    operands = zip(self.sources, self.rows, strict=True)
    totals = [of for of, rows in operands if "total" in of and not rows]
    learned = [of for of in totals if "params" in of]
    if self.has_rows:
      # A first layer that normalizes has a statistic of the data too.
      if len(learned) < len(totals):
        yield "data"
      if totals:
        yield "statistics"
      return
    if learned and self.name in _CURVES:
      yield "function"
    if learned and self.name == "mul" and len(totals) > 1:
      yield "function"
    if self.name == "div" and "total" in self.sources[1]:
      yield "function" if "params" in self.sources[1] else "denominators"
    if (
      learned and self.name in ("add", "add_any") and {"params"} in self.sources
    ):
      yield "regularizer"


def facts_of(closed, twin, call: Call) -> Facts:
  """What a loss does by its jaxpr, whose inputs are the arrays of a call.

  What differs in `twin`, the jaxpr for twice as many rows, is an axis of rows.
  """
  given = [_Sources({x.role} & _LOSS) for x in call.arrays]
  try:
    equations, results = _walk(closed.jaxpr, twin.jaxpr, given)
  except ValueError:
    # A Python loop over rows: then nothing is known to have an axis of rows.
    given = [of | {"total"} if "batch" in of else of for of in given]
    equations, results = _walk(closed.jaxpr, closed.jaxpr, given)
  found = {coupling for e in equations for coupling in e.couplings()}
  draws = [e.eqn.invars for e in equations if e.name in _DRAWS]
  of_bytes = {
    (v.aval.dtype.itemsize, "params" in e.of)
    for e in equations
    for v in e.eqn.outvars
    if _is_float(v.aval)
  }
  integers, floats = _marks(closed, equations, call)
  return Facts(
    draws=bool(draws),
    draws_from_others=any(x and x[0].aval.dtype.name != FIXED for x in draws),
    mixes="mixed" in results[0],
    is_half=any(size < 4 for size, _ in of_bytes),
    is_single=(4, True) in of_bytes,
    integers=integers,
    floats=floats,
    couplings=found,
  )


def _marks(
  closed, equations: Sequence[_Equation], call: Call
) -> tuple[list[int], list[float]]:
  """Integers and floats that may say that an entry of the batch does not count."""
  numbers = list[Any]()
  floats = [0.0]
  for e in equations:
    if "batch" not in e.of:
      continue
    operands = e.eqn.invars
    is_unequal_to_itself = e.name == "ne" and operands[0] is operands[1]
    if is_unequal_to_itself or e.name == "is_finite":
      floats = [np.nan, 0.0]
    # A function within the loss may be given a number, and compare data with it.
    compares = e.name in _COMPARES and "params" not in e.of
    if compares or _versions.inner_jaxprs(e.eqn):
      literals = [x.val for x in operands if hasattr(x, "val")]
      given = [n for x in literals for n in _numbers(x)]
      numbers += given
      if e.name in _COMPARES - {"eq", "ne"}:
        numbers += [m for n in given for m in (n - 1, n + 1)]
  shared = [x.value for x in call.arrays if x.role in ("shared", "held")]
  numbers += [n for x in (*closed.consts, *shared) for n in _numbers(x)]
  integers = [*_USUAL, *(n for n in numbers if type(n) is int)]
  integers = [*dict.fromkeys(integers)][:_MANY]
  labels = [x.value for x in call.batch if x.kind in "iu" and x.value.size]
  integers += [int(x.min()) for x in labels if x.min() < 0]
  # -1 is not among these, as it may be a weight below 0.
  floats += [n for n in numbers if type(n) is float]
  return [*dict.fromkeys(integers)], [*dict.fromkeys(floats)][:_MANY]


def _walk(
  jaxpr, twin, given: Sequence[_Sources]
) -> tuple[list[_Equation], list[_Sources]]:
  """All equations, with those within them, and where the results come from."""
  known = dict(zip(jaxpr.invars, given, strict=True))
  equations = list[_Equation]()

  def sources(variables):
    return [
      _NOWHERE if hasattr(v, "val") else known.get(v, _NOWHERE)
      for v in variables
    ]

  for eqn, other in zip(jaxpr.eqns, twin.eqns, strict=True):
    equation = _Equation(eqn, other, sources(eqn.invars))
    equations.append(equation)
    results = [equation.makes] * len(eqn.outvars)
    inside = []
    inner = map(_versions.inner_jaxprs, (eqn, other))
    for body, twin_body in zip(*inner, strict=True):
      into = equation.sources
      chooses = _NOWHERE
      if equation.name == "cond":
        chooses, *into = into
      is_loop = equation.name in ("scan", "while")
      if is_loop or len(body.invars) != len(into):
        # What goes around may be of all that goes in, and of what comes out.
        is_loop = True
        into = [equation.of] * len(body.invars)
        _, once = _walk(body, twin_body, into)
        into = [equation.of.union(*once)] * len(body.invars)
      found, out = _walk(body, twin_body, into)
      equations += found
      if is_loop or len(out) != len(results):
        out = [equation.makes.union(*out)] * len(results)
      inside.append([of | chooses for of in out])
    if inside:
      results = [_NOWHERE.union(*each) for each in zip(*inside, strict=True)]
    known.update(zip(eqn.outvars, results, strict=True))
  return equations, sources(jaxpr.outvars)


def _rows(variables: Sequence[Any], twins: Sequence[Any]) -> list[list[int]]:
  """Of each variable the axes that are longer in its twin."""
  pairs = zip(variables, twins, strict=True)
  shapes = [(np.shape(v.aval), np.shape(w.aval)) for v, w in pairs]
  return [np.flatnonzero(np.not_equal(*both)).tolist() for both in shapes]


def _is_float(aval) -> bool:
  return jnp.issubdtype(getattr(aval, "dtype", int), jnp.floating)


def _numbers(x) -> list[int | float]:
  """Those of a small constant."""
  is_number = jnp.issubdtype(getattr(x, "dtype", np.int32), np.number)
  if not is_number or np.size(x) > _MANY:
    return []
  return [n for n in np.asarray(x).ravel().tolist() if np.isfinite(n)]
