"""What the jaxpr of a loss tells, and what the loss may be a mean over."""

from collections.abc import Callable, Iterator, Mapping
import functools
import itertools
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
import jax.numpy as jnp
import numpy as np

from optax_accum import _versions
from optax_accum._arithmetic.trees import Leaf, Leaves
from optax_accum._check_split import words
from optax_accum._check_split.probes import Array, Call, FIXED

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_BENDS = {"max", "min", "abs", "clamp", "sign"}
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
_USUAL = (0, -1)  # what often says that an entry does not count
_MANY = 16  # numbers of a constant, or of all that are tried in each leaf of the batch
_Roles = frozenset[str]  # "params", "batch" or both: of the arguments that a number comes from


class Facts(NamedTuple):
  not_checked: tuple[str, ...]  # what the check does not look at
  draws_from_others: bool  # random numbers, from other keys than those that are named
  is_half: bool  # whether something is computed in bfloat16, float16 or 8 bits
  integers: list[int]  # what may say that an entry does not count
  floats: list[float]  # the same, in arrays of floats


def facts_of(closed: ClosedJaxpr, call: Call) -> Facts:
  """What a loss does by its jaxpr, whose inputs are the arrays of a call."""
  roles = [_Roles({x.role} & {"params", "batch"}) for x in call.arrays]
  numbers, keys, bends, is_half, finds_nan = list[Any](), set[str](), False, False, False
  for eqn, of in _equations(closed.jaxpr, dict(zip(closed.jaxpr.invars, roles, strict=True))):
    name, operands, out = eqn.primitive.name, list[Any](eqn.invars), [v.aval for v in eqn.outvars]
    floats: Leaves = [x for x in out if jnp.issubdtype(getattr(x, "dtype", int), jnp.floating)]
    is_half |= any(x.dtype.itemsize < 4 for x in floats)
    if name in _DRAWS:
      keys.add(str(operands[0].aval.dtype) if operands else "")
    if name in _BENDS and of == {"params", "batch"}:  # of an array, it is of each row
      bends |= any(x.shape == () for x in floats)
    if "batch" in of:  # data, or what is computed of them
      finds_nan |= name == "is_finite" or (name == "ne" and operands[0] is operands[1])
    # A function within the loss may be given a number, and compare data with it.
    if (name in _COMPARES and of == {"batch"}) or _versions.inner_jaxprs(eqn):
      for n in [n for x in operands if isinstance(x, Literal) for n in _numbers(x.val)]:
        numbers += [n, n - 1, n + 1] if name in _COMPARES - {"eq", "ne"} else [n]
  shared = [x.value for x in call.arrays if x.role == "shared"]
  numbers += [n for x in (*closed.consts, *shared) for n in _numbers(x)]
  integers = list(dict.fromkeys([*_USUAL, *(n for n in numbers if type(n) is int)]))[:_MANY]
  # -1 is not among these, as it may be a weight below 0.
  data = dict.fromkeys([*[np.nan] * finds_nan, 0.0, *(n for n in numbers if type(n) is float)])
  labels = [x.value for x in call.batch if x.kind in "iu" and x.value.size]
  integers += [int(x.min()) for x in labels if x.min() < 0]
  not_checked = (words.DRAWS,) * bool(keys) + (words.BENDS,) * bends
  integers = list(dict.fromkeys(integers))
  return Facts(not_checked, bool(keys - {FIXED}), is_half, integers, list(data)[:_MANY])


def _equations(jaxpr: Jaxpr, roles: Mapping[Var, _Roles]) -> Iterator[tuple[JaxprEqn, _Roles]]:
  """All equations, and those within them, each with what goes in."""
  known = dict(roles)
  for eqn in jaxpr.eqns:
    inputs = [_Roles() if isinstance(v, Literal) else known.get(v, _Roles()) for v in eqn.invars]
    of = _Roles().union(*inputs)
    yield eqn, of
    for inner in _versions.inner_jaxprs(eqn):
      # In a loop, what goes around may be of all that goes in.
      apart = len(inputs) == len(inner.invars) and eqn.primitive.name not in ("scan", "while")
      given = inputs if apart else [of] * len(inner.invars)
      yield from _equations(inner, dict(zip(inner.invars, given, strict=True)))
    known.update(dict.fromkeys(eqn.outvars, of))


def _numbers(x: Leaf) -> list[int | float]:
  """Those of a small constant."""
  if not jnp.issubdtype(getattr(x, "dtype", np.int32), np.number) or np.size(x) > _MANY:
    return []
  return [n for n in np.asarray(x).ravel().tolist() if np.isfinite(n)]


def weights_of(call: Call, facts: Facts) -> Iterator[tuple[str, Callable[[Call], float]]]:
  """What each array of the batch may say that a row or a token counts: code, and what runs it."""
  for n, x in enumerate(call.arrays):
    if x.role != "batch":
      continue
    parts = ["{}"]
    if x.has_longer_rows and x.axis != x.value.ndim - 1:
      parts += ["{}[..., 1:]", "{}[..., :-1]"]  # where each token predicts the next
    for part, counts in itertools.product(parts, _counts(x, facts)):
      code = f"jnp.sum({counts})".replace("{}", part)
      yield code.format(x.name), functools.partial(_count, code.format("x"), n)


def _count(code: str, n: int, call: Call) -> float:
  return float(eval(code, {"x": call.arrays[n].value, "jnp": np}))


def _counts(x: Array, facts: Facts) -> list[str]:
  """Which entries of an array may count, or how much: the likeliest first."""
  if x.kind == "b":
    return ["{}", "~{}", "jnp.any({}, axis=-1)"]
  masks = ["{}", "{} == 0", "{} > 0", "jnp.any({} != 0, axis=-1)"] if x.is_mask else []
  if x.kind == "f":
    numbers = [str(np.float32(n)).removesuffix(".0") for n in facts.floats if n == n]
    signs = [f"{{}} {sign} {n}" for n in numbers for sign in ("!=", ">", ">=", "<", "<=")]
    return [*masks, "{}", "~jnp.isnan({})", *signs]
  # Labels without -100 do not tell `!= -1` from `>= 0`, which leaves out both.
  others = [f"{{}} != {n}" for n in facts.integers if n != -1]
  # "==" first: a loss that orders its labels runs on n + 1 too, which refutes it.
  signs = [f"{{}} {sign} {n}" for n in facts.integers for sign in ("==", ">=", ">")]
  return [*masks, *others, "{} >= 0", "{} != -1", *signs, "{}"] if x.kind in "iu" else masks
