"""What a loss may be a mean over: counts of what the batch holds, as code that is also run."""

from collections.abc import Callable, Iterator
import functools

import numpy as np

from optax_accum._check_split.facts import Facts
from optax_accum._check_split.probes import Array, Call


def weights_of(call: Call, facts: Facts) -> Iterator[tuple[str, Callable[[Call], float]]]:
  """What each array of the batch may say that a row or a token counts: code, and what runs it."""
  for position, x in enumerate(call.arrays):
    parts = ["{}"] if x.role == "batch" and x.kind != "key" else []
    if parts and x.has_longer_rows and x.axis != x.value.ndim - 1:
      parts += ["{}[..., 1:]", "{}[..., :-1]"]  # where each token predicts the next
    for part in parts:
      for template in _templates(x, facts):
        template = template.format(part)
        yield template.format(x.name), functools.partial(_count, template.format("x"), position)


def _count(code: str, position: int, call: Call) -> float:
  return float(eval(code, {"x": call.arrays[position].value, "jnp": np}))


def _templates(x: Array, facts: Facts) -> Iterator[str]:
  """Ways to count the entries of an array that count, the likeliest first."""
  if x.kind == "b":
    yield from ("jnp.sum({})", "jnp.sum(~{})", "jnp.sum(jnp.any({}, axis=-1))")
    return
  if x.is_mask:
    yield from ("jnp.sum({})", "jnp.sum({} == 0)", "jnp.sum({} > 0)")
    yield "jnp.sum(jnp.any({} != 0, axis=-1))"
  if x.kind in "iu":
    # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
    for n in sorted(facts.integers, key=lambda n: n == -1):
      yield from ["jnp.sum({} >= 0)"] * (n == -1)
      yield f"jnp.sum({{}} != {n})"
    # "==" first: a loss that orders its labels runs on n + 1 too, which refutes it.
    yield from (f"jnp.sum({{}} {sign} {n})" for n in facts.integers for sign in ("==", ">=", ">"))
  if not x.is_mask and x.kind != "c":
    yield "jnp.sum({})"
  for number in facts.floats if x.kind == "f" else ():
    short = f"{number:g}"
    text = short if np.float32(short) == np.float32(number) else repr(number)
    signs = ("!=", ">", ">=", "<", "<=") if number == number else ()
    yield from (f"jnp.sum({{}} {sign} {text})" for sign in signs)
    if not signs:
      yield "jnp.sum(~jnp.isnan({}))"
