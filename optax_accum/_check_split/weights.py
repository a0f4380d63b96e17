"""What a loss may be a mean over: formulas in the arrays of the batch."""

from collections.abc import Callable, Iterator
import functools
import itertools

import numpy as np

from optax_accum._check_split.facts import Facts
from optax_accum._check_split.probes import Array, Call


def weights_of(
  call: Call, facts: Facts
) -> Iterator[tuple[str, Callable[[Call], float]]]:
  """What each array of the batch may say that a row or a token counts: code, and what runs it."""
  for n, x in enumerate(call.arrays):
    if x.role != "batch":
      continue
    parts = ["{}"]
    if x.has_longer_rows and x.axis != x.value.ndim - 1:
      parts += [
        "{}[..., 1:]",
        "{}[..., :-1]",
      ]  # where each token predicts the next
    for part, counts in itertools.product(parts, _counts(x, facts)):
      code = f"jnp.sum({counts})".replace("{}", part)
      yield code.format(x.name), functools.partial(_count, code.format("x"), n)


def _count(code: str, n: int, call: Call) -> float:
  return float(eval(code, {"x": call.arrays[n].value, "jnp": np}))


def _counts(x: Array, facts: Facts) -> list[str]:
  """Which entries of an array may count, or how much: the likeliest first."""
  if x.kind == "b":
    return ["{}", "~{}", "jnp.any({}, axis=-1)"]
  masks = (
    ["{}", "{} == 0", "{} > 0", "jnp.any({} != 0, axis=-1)"]
    if x.is_mask
    else []
  )
  if x.kind == "f":
    numbers = [
      str(np.float32(n)).removesuffix(".0") for n in facts.floats if n == n
    ]
    signs = [
      f"{{}} {sign} {n}"
      for n in numbers
      for sign in ("!=", ">", ">=", "<", "<=")
    ]
    return [*masks, "{}", "~jnp.isnan({})", *signs]
  # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
  others = [f"{{}} != {n}" for n in facts.integers if n != -1]
  # "==" first: a loss that orders its labels runs on n + 1 too, which refutes it.
  signs = [
    f"{{}} {sign} {n}" for n in facts.integers for sign in ("==", ">=", ">")
  ]
  counts = [*others, "{} >= 0", "{} != -1", *signs, "{}", "{} - 1"]
  return masks + counts * (x.kind in "iu")
