"""What the jaxpr of a loss tells: whether it draws, how it computes, what it compares with."""

from collections.abc import Iterable, Iterator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._check_split.fixed_noise import is_key

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_USUAL = (0, -1)
_MANY = 8  # of the numbers that a loss compares with; each is tried in each integer leaf


class Facts(NamedTuple):
  """What a loss does."""

  draws: bool  # random numbers
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  integers: tuple[int, ...]  # what may say that an entry does not count

  def with_integers(self, others: Iterable[int]) -> "Facts":
    """The same, with what else may say so."""
    return self._replace(integers=tuple(dict.fromkeys([*self.integers, *others])))


def facts(jaxpr: Any) -> Facts:
  """What a loss does by its jaxpr."""
  equations = list(_equations(jaxpr))
  dtypes = {getattr(v.aval, "dtype", None) for eqn in equations for v in eqn.outvars}
  compared = [
    getattr(v, "val", None)
    for eqn in equations
    if eqn.primitive.name in _COMPARES or any(map(_is_jaxpr, eqn.params.values()))
    for v in eqn.invars
  ]
  integers = [int(x) for x in [*compared, *jaxpr.consts] if _is_int(x)]
  return Facts(
    any(eqn.primitive.name in _DRAWS for eqn in equations),
    any(jnp.issubdtype(d, jnp.floating) and d.itemsize < 4 for d in dtypes if d is not None),
    tuple(dict.fromkeys([*_USUAL, *integers]))[:_MANY],
  )


def are_the_same(first: Any, second: Any) -> bool:
  """Whether two jaxprs of a loss are; not where NumPy drew numbers while it was traced."""
  texts = [re.sub(r"0x[0-9a-f]+", "", str(x)) for x in (first, second)]
  consts = [[np.asarray(c) for c in x.consts if not is_key(c)] for x in (first, second)]
  return texts[0] == texts[1] and all(
    np.array_equal(a, b, equal_nan=_is_inexact(a)) for a, b in zip(*consts, strict=True)
  )


def _is_inexact(x: np.ndarray) -> bool:
  return bool(np.issubdtype(x.dtype, np.inexact))


def _is_int(x: Any) -> bool:
  """Whether `x` is one integer."""
  dtype = getattr(x, "dtype", None if type(x) is not int else np.dtype(int))
  return dtype is not None and jnp.issubdtype(dtype, jnp.integer) and np.ndim(x) == 0


def _equations(jaxpr: Any) -> Iterator[Any]:
  """The equations of a jaxpr and of those within it."""
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    yield eqn
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
      if _is_jaxpr(inner):
        yield from _equations(inner)


def _is_jaxpr(x: Any) -> bool:
  return hasattr(getattr(x, "jaxpr", x), "eqns")
