"""What a loss may be a mean over: counts of what the batch holds, as code and as functions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import operator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from optax_accum._check_split.facts import Facts
from optax_accum._check_split.probes import BatchLeaf, is_integer, is_key, is_mask

Count: TypeAlias = Callable[..., Any]
_SIGNS: dict[str, Count] = {
  "==": operator.eq,
  "!=": operator.ne,
  ">": operator.gt,
  ">=": operator.ge,
  "<": operator.lt,
  "<=": operator.le,
}


class Weight(NamedTuple):
  """A way to count what a microbatch holds."""

  code: str  # of the option, in Python
  weight_fn: Count | None


def possible(
  leaves: Sequence[BatchLeaf], names: Mapping[int, str], facts: Facts
) -> Iterator[Weight]:
  """The rows, and what each leaf of the batch may say that a row or a token counts."""
  yield Weight("weight_fn=None", None)
  parameters, order = ", ".join(names.values()), list(names)

  def of_leaf(leaf: BatchLeaf, part: Count, count: Count) -> Count:
    argument = order.index(leaf.argnum)
    return lambda *batch: count(part(jax.tree.leaves(batch[argument])[leaf.position]))

  for leaf in leaves:
    for text, part in _parts(leaf):
      for template, count in _counts(leaf.value, facts):
        code = template.format(text.format(leaf.name))
        yield Weight(f"weight_fn=lambda {parameters}: {code}", of_leaf(leaf, part, count))


def _parts(leaf: BatchLeaf) -> Iterator[tuple[str, Count]]:
  """The whole leaf, and what remains of its tokens where each predicts the next."""
  yield "{}", lambda x: x
  if leaf.value.ndim > 1 and leaf.axis != leaf.value.ndim - 1 and leaf.value.shape[-1] > 1:
    yield "{}[..., 1:]", lambda x: x[..., 1:]
    yield "{}[..., :-1]", lambda x: x[..., :-1]


def _counts(x: np.ndarray, facts: Facts) -> Iterator[tuple[str, Count]]:
  """Ways to count the entries of a leaf that count, the likeliest first, in NumPy or JAX."""
  if is_key(x):
    return
  if x.dtype == bool:
    yield "jnp.sum({})", lambda x: x.sum()
    yield "jnp.sum(~{})", lambda x: (~x).sum()
    yield "jnp.sum(jnp.any({}, axis=-1))", lambda x: x.any(-1).sum()
    return
  if is_mask(x):
    yield "jnp.sum({})", lambda x: x.sum()
    yield _comparison("==", 0)
    yield _comparison(">", 0)
    yield "jnp.sum(jnp.any({} != 0, axis=-1))", lambda x: (x != 0).any(-1).sum()
  if is_integer(x):
    # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
    for n in sorted(facts.integers, key=lambda n: n == -1):
      if n == -1:
        yield _comparison(">=", 0)
      yield _comparison("!=", n)
    for n in facts.integers:
      # First: a loss that orders its labels runs on n + 1 too, which refutes it.
      yield _comparison("==", n)
      yield _comparison(">=", n)
      yield _comparison(">", n)
  if not is_mask(x) and not np.iscomplexobj(x):
    yield "jnp.sum({})", lambda x: x.sum()
  for number in facts.floats if np.issubdtype(x.dtype, np.floating) else ():
    if np.isnan(number):
      yield "jnp.sum(~jnp.isnan({}))", lambda x: (x == x).sum()
    else:
      yield from (_comparison(sign, number) for sign in ("!=", ">", ">=", "<", "<="))


def _comparison(sign: str, n: float) -> tuple[str, Count]:
  """The number of entries that compare so with a number."""
  number = n if type(n) is int else f"{n:g}"
  return f"jnp.sum({{}} {sign} {number})", lambda x: _SIGNS[sign](x, n).sum()
