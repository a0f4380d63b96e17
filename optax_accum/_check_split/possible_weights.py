"""What a loss may be a mean over: counts of what the batch holds, as code and as functions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from optax_accum._check_split.fixed_noise import is_key
from optax_accum._check_split.loss_facts import Facts
from optax_accum._check_split.probes import BatchLeaf, is_integer, is_mask

Count: TypeAlias = Callable[..., Any]


class Weight(NamedTuple):
  """A way to count what a microbatch holds."""

  code: str  # of the option, in Python
  weight_fn: Count | None


def weights(
  leaves: Sequence[BatchLeaf], names: Mapping[int, str], facts: Facts
) -> Iterator[Weight]:
  """The rows, and what each leaf of the batch may say that a row or a token counts."""
  yield Weight("weight_fn=None", None)
  parameters, order = ", ".join(names.values()), list(names)
  for leaf in leaves:
    if is_key(leaf.value):
      continue
    for text, part in _parts(leaf):
      for template, count in _counts(leaf.value, facts):
        code = template.format(text.format(f"{names[leaf.argnum]}{leaf.path}"))
        yield Weight(f"weight_fn=lambda {parameters}: {code}", _of_leaf(leaf, order, part, count))


def _of_leaf(leaf: BatchLeaf, order: Sequence[int], part: Count, count: Count) -> Count:
  """A function of the batch arguments, in their order, that counts in part of one leaf."""
  argument = order.index(leaf.argnum)
  return lambda *batch: count(part(jax.tree.leaves(batch[argument])[leaf.position]))


def _parts(leaf: BatchLeaf) -> Iterator[tuple[str, Count]]:
  """The whole leaf, and what remains of its tokens where each predicts the next."""
  yield "{}", lambda x: x
  if leaf.value.ndim > 1 and leaf.axis != leaf.value.ndim - 1 and leaf.value.shape[-1] > 1:
    yield "{}[..., 1:]", lambda x: x[..., 1:]
    yield "{}[..., :-1]", lambda x: x[..., :-1]


def _counts(x: np.ndarray, facts: Facts) -> Iterator[tuple[str, Count]]:
  """Ways to count the entries of a leaf that count, the likeliest first, in NumPy or JAX."""
  if x.dtype == bool:
    yield "jnp.sum({})", lambda x: x.sum()
    yield "jnp.sum(~{})", lambda x: (~x).sum()
    yield "jnp.sum(jnp.any({}, axis=-1))", lambda x: x.any(-1).sum()
    return
  if is_mask(x):
    yield "jnp.sum({})", lambda x: x.sum()
    yield "jnp.sum({} == 0)", lambda x: (x == 0).sum()
    yield "jnp.sum({} > 0)", lambda x: (x > 0).sum()
    yield "jnp.sum(jnp.any({} != 0, axis=-1))", lambda x: (x != 0).any(-1).sum()
  if is_integer(x):
    # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
    for n in sorted(facts.integers, key=lambda n: n == -1):
      if n == -1:
        yield "jnp.sum({} >= 0)", lambda x: (x >= 0).sum()
      yield f"jnp.sum({{}} != {n})", lambda x, n=n: (x != n).sum()
    for n in facts.integers:
      # First: a loss that orders its labels runs on n + 1 too, which refutes it.
      yield f"jnp.sum({{}} == {n})", lambda x, n=n: (x == n).sum()
      yield f"jnp.sum({{}} >= {n})", lambda x, n=n: (x >= n).sum()
      yield f"jnp.sum({{}} > {n})", lambda x, n=n: (x > n).sum()
  if not is_mask(x) and not np.iscomplexobj(x):
    yield "jnp.sum({})", lambda x: x.sum()
  if np.issubdtype(x.dtype, np.floating):
    yield from _counts_of_floats(facts.floats)


def _counts_of_floats(numbers: Sequence[float]) -> Iterator[tuple[str, Count]]:
  """Ways to count the floats that count."""
  for n in numbers:
    if np.isnan(n):
      yield "jnp.sum(~jnp.isnan({}))", lambda x: (x == x).sum()
      continue
    yield f"jnp.sum({{}} != {n:g})", lambda x, n=n: (x != n).sum()
    yield f"jnp.sum({{}} > {n:g})", lambda x, n=n: (x > n).sum()
    yield f"jnp.sum({{}} >= {n:g})", lambda x, n=n: (x >= n).sum()
    yield f"jnp.sum({{}} < {n:g})", lambda x, n=n: (x < n).sum()
    yield f"jnp.sum({{}} <= {n:g})", lambda x, n=n: (x <= n).sum()
