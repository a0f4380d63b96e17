"""What a loss may be a mean over: counts of what the batch holds, as code that is also run."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.trees import Batch, Leaf
from optax_accum._check_split.facts import Facts
from optax_accum._check_split.probes import BatchLeaf, Call, is_integer, is_mask


class Weight(NamedTuple):
  """A `weight_fn` that counts something in one leaf of the batch."""

  template: str  # of its code, with {} for the leaf
  leaf: BatchLeaf
  argument: int  # among the batch arguments

  def __call__(self, *batch: Batch) -> Leaf:
    x = jax.tree.leaves(batch[self.argument])[self.leaf.position]
    module = np if isinstance(x, np.ndarray) else jnp
    return eval(self.template.format("x"), {"x": x, "jnp": module})

  @property
  def code(self) -> str:
    """What it counts, as the loss writes it."""
    return self.template.format(self.leaf.name)


def weights_of(call: Call, facts: Facts) -> Iterator[Weight]:
  """What each leaf of the batch may say that a row or a token counts."""
  for leaf in call.leaves:
    if is_key(leaf.value):
      continue
    parts = ["{}"]
    if leaf.has_longer_rows and leaf.axis != leaf.value.ndim - 1:
      parts += ["{}[..., 1:]", "{}[..., :-1]"]  # where each token predicts the next
    for part in parts:
      for template in _templates(leaf.value, facts):
        yield Weight(template.format(part), leaf, list(call.batch).index(leaf.argnum))


def _templates(x: np.ndarray, facts: Facts) -> Iterator[str]:
  """Ways to count the entries of a leaf that count, the likeliest first."""
  if x.dtype == bool:
    yield from ("jnp.sum({})", "jnp.sum(~{})", "jnp.sum(jnp.any({}, axis=-1))")
    return
  if is_mask(x):
    yield from ("jnp.sum({})", "jnp.sum({} == 0)", "jnp.sum({} > 0)")
    yield "jnp.sum(jnp.any({} != 0, axis=-1))"
  if is_integer(x):
    # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
    for n in sorted(facts.integers, key=lambda n: n == -1):
      yield from ["jnp.sum({} >= 0)"] * (n == -1)
      yield f"jnp.sum({{}} != {n})"
    # "==" first: a loss that orders its labels runs on n + 1 too, which refutes it.
    yield from (f"jnp.sum({{}} {sign} {n})" for n in facts.integers for sign in ("==", ">=", ">"))
  if not is_mask(x) and not np.iscomplexobj(x):
    yield "jnp.sum({})"
  for number in facts.floats if np.issubdtype(x.dtype, np.floating) else ():
    if np.isnan(number):
      yield "jnp.sum(~jnp.isnan({}))"
    else:
      n = text if np.float32(text := f"{number:g}") == np.float32(number) else repr(number)
      yield from (f"jnp.sum({{}} {sign} {n})" for sign in ("!=", ">", ">=", "<", "<="))
