"""What the jaxpr of a loss tells: whether it draws, how it computes, what it compares with."""

from collections.abc import Iterable, Iterator, Sequence
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_accum._check_split import bent, dependence
from optax_accum._check_split.dependence import Step, Value
from optax_accum._check_split.fixed_noise import is_key

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_USUAL = (0, -1)
_MANY = 16  # of the numbers that a loss compares data with; each is tried in each leaf of the batch


class Facts(NamedTuple):
  """What a loss does."""

  draws: bool  # random numbers
  draws_from_others: bool  # than the keys that are named
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  integers: tuple[int, ...]  # what may say that an entry does not count
  floats: tuple[float, ...]  # the same, in arrays of floats
  sizes: frozenset[int]  # of all axes
  has_kinks: bool  # a maximum, or the like, of one number that the batch comes to

  def with_integers(self, others: Iterable[int]) -> "Facts":
    """The same, with what else may say so."""
    return self._replace(integers=tuple(dict.fromkeys([*self.integers, *others])))


def facts(jaxpr: Any, inputs: Sequence[Value]) -> Facts:
  """What a loss does by its jaxpr, and what that is called with."""
  steps = list(dependence.steps(jaxpr, inputs))
  draws = [step for step in steps if step.equation.primitive.name in _DRAWS]
  dtypes = {getattr(v.aval, "dtype", None) for step in steps for v in step.equation.outvars}
  numbers = [n for pick in (_compared, _beside) for step in steps for n in pick(step)]
  integers = [n for n in numbers if type(n) is int]
  floats = [0.0, *(n for n in numbers if type(n) is float)]  # -1 may be a weight below 0
  if any(map(_finds_nan, steps)):
    floats = [np.nan, *floats]
  return Facts(
    bool(draws),
    not all("key" in frozenset[str]().union(*(x.depends for x in step.inputs)) for step in draws),
    any(jnp.issubdtype(d, jnp.floating) and d.itemsize < 4 for d in dtypes if d is not None),
    tuple(dict.fromkeys([*_USUAL, *integers]))[:_MANY],
    tuple(dict.fromkeys(floats))[:_MANY],
    frozenset(n for s in steps for v in s.equation.outvars for n in getattr(v.aval, "shape", ())),
    any(map(bent.is_kink, steps)),
  )


def _compared(step: Step) -> Iterator[int | float]:
  """The constants that data of the batch are compared with."""
  if step.equation.primitive.name in _COMPARES:
    for one, other in (step.inputs, step.inputs[::-1]):
      if "batch" in other.depends and "params" not in other.depends:
        yield from filter(np.isfinite, one.numbers or ())


def _beside(step: Step) -> Iterator[int | float]:
  """What is below and above those constants, where a comparison tells that."""
  if step.equation.primitive.name not in ("eq", "ne"):
    for number in _compared(step):
      yield from (number - 1, number + 1)


def _finds_nan(step: Step) -> bool:
  """Whether it finds out which data, or what is computed of them, are NaN."""
  name, operands = step.equation.primitive.name, step.equation.invars
  is_one = name == "is_finite" or (name == "ne" and operands[0] is operands[1])
  return is_one and "batch" in step.inputs[0].depends


def are_the_same(first: Any, second: Any) -> bool:
  """Whether two jaxprs of a loss are; not where NumPy drew numbers while it was traced."""
  texts = [re.sub(r"0x[0-9a-f]+", "", str(x)) for x in (first, second)]
  consts = [[np.asarray(c) for c in x.consts if not is_key(c)] for x in (first, second)]
  return texts[0] == texts[1] and all(
    np.array_equal(a, b, equal_nan=_is_inexact(a)) for a, b in zip(*consts, strict=True)
  )


def _is_inexact(x: np.ndarray) -> bool:
  return bool(np.issubdtype(x.dtype, np.inexact))
