"""What a loss may be a mean over: formulas in the arrays of the batch."""

from collections.abc import Callable, Iterator
import functools
import itertools
import operator
from typing import Any, TypeAlias

import numpy as np

from optax_accum._check_split.call import Array, Call
from optax_accum._check_split.facts import Facts

Weight: TypeAlias = Callable[[Call], float]
ROWS: Weight = operator.attrgetter("rows")  # without a `weight_fn`


def _any_of_row(x: np.ndarray, _: float):
  return np.any(x, axis=-1)


# Which entries of an array x count, or how much: code for a report, and what it is in NumPy.
_FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
  "{x}": lambda x, n: x,
  "~{x}": lambda x, n: ~x,
  "~jnp.isnan({x})": lambda x, n: ~np.isnan(x),
  "jnp.any({x}, axis=-1)": _any_of_row,
  "jnp.any({x} != 0, axis=-1)": _any_of_row,
  "{x} == {n}": operator.eq,
  "{x} != {n}": operator.ne,
  "{x} > {n}": operator.gt,
  "{x} >= {n}": operator.ge,
  "{x} < {n}": operator.lt,
  "{x} <= {n}": operator.le,
  "{x} - {n}": operator.sub,
}
# Where each token predicts the next.
_PARTS = {
  "": np.s_[...],
  "[..., 1:]": np.s_[..., 1:],
  "[..., :-1]": np.s_[..., :-1],
}


def weights_of(call: Call, facts: Facts) -> Iterator[tuple[str, str, Weight]]:
  """What may count in a mean, a `weight_fn` that returns it, and the same of a call."""
  yield "the number of rows", "None", ROWS
  names = ", ".join(dict.fromkeys(x.argument for x in call.batch))
  for i, x in enumerate(call.arrays):
    if x.role != "batch":
      continue
    parts = [""]
    if x.has_longer_rows and x.value.ndim > 1:
      parts = [*_PARTS]
    for part, (code, n) in itertools.product(parts, _formulas(x, facts)):
      number = str(n).removesuffix(".0")
      text = f"jnp.sum({code.format(x=x.name + part, n=number)})"
      count = functools.partial(_count, i, part, code, n)
      yield text, f"lambda {names}: {text}", count


def _count(i: int, part: str, code: str, n: float, call: Call) -> float:
  x = call.arrays[i].value[_PARTS[part]]
  return float(np.sum(_FORMULAS[code](x, n)))


def _formulas(x: Array, facts: Facts) -> list[tuple[str, float]]:
  """Code of `_FORMULAS`, and the number in it: the likeliest first."""
  found = list[tuple[str, float]]()

  def add(*codes, numbers=(0,)):
    found.extend((code, n) for n in numbers for code in codes)

  if x.kind == "b":
    add("{x}", "~{x}", "jnp.any({x}, axis=-1)")
  elif x.is_mask:
    add("{x}", "{x} == {n}", "{x} > {n}", "jnp.any({x} != 0, axis=-1)")
  if x.kind == "f":
    numbers = [float(str(np.float32(n))) for n in facts.floats if n == n]
    add("{x}", "~jnp.isnan({x})")
    add(
      "{x} != {n}",
      "{x} > {n}",
      "{x} >= {n}",
      "{x} < {n}",
      "{x} <= {n}",
      numbers=numbers,
    )
  elif x.kind in "iu":
    # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
    add("{x} != {n}", numbers=[n for n in facts.integers if n != -1])
    add("{x} >= {n}")
    add("{x} != {n}", numbers=[-1])
    # "==" first: a loss that orders its labels runs on n + 1 too, which refutes it.
    add("{x} == {n}", "{x} >= {n}", "{x} > {n}", numbers=facts.integers)
    add("{x}")
    add("{x} - {n}", numbers=[1])
  return found
