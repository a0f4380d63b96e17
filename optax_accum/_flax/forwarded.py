"""Which results of a traced function are its arguments, unchanged.

A transform of nnx, such as `nnx.remat` or `nnx.scan`, returns every Variable that goes into it as a
new value, changed or not. So only the traced program can tell.
"""

from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from optax_accum import _versions

# Calls of one jaxpr, whose inputs and outputs are those of the jaxpr.
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}

_Givens: TypeAlias = Sequence[int | None]  # the positions of arguments; None is what was computed


def forwarded(jaxpr: Jaxpr) -> _Givens:
  """For each result the position of the argument that it is, or None if it was computed."""
  return _run(jaxpr, range(len(jaxpr.invars)))


def _run(jaxpr: Jaxpr, values: _Givens) -> _Givens:
  """The results of a jaxpr that is given such values."""
  known = dict(zip(jaxpr.invars, values, strict=True))
  read = lambda xs: [None if isinstance(x, Literal) else known.get(x) for x in xs]  # noqa: E731
  for eqn in jaxpr.eqns:
    known.update(zip(eqn.outvars, _results(eqn, read(eqn.invars)), strict=True))
  return read(jaxpr.outvars)


def _results(eqn: JaxprEqn, values: _Givens) -> _Givens:
  """The results of an equation that is given such values."""
  name, inner = eqn.primitive.name, _versions.inner_jaxprs(eqn)
  if name in ("copy", "optimization_barrier"):
    return values
  if name == "scan":
    consts, carried = _versions.scan_inputs(eqn)
    kept = enumerate(forwarded(inner[0]))
    # What is carried stays in its place. What is stacked is whole if its slices are handed on.
    fits = lambda i, x: x == consts + i if i < carried else x >= consts + carried  # noqa: E731
    return [None if x is None or not fits(i, x) else values[x] for i, x in kept]
  if name == "cond":  # the first value is the index of the branch
    branches = [_run(branch, values[1:]) for branch in inner]
    return [x if len({x, *others}) == 1 else None for x, *others in zip(*branches, strict=True)]
  if name in _CALLS and [len(x.invars) for x in inner] == [len(values)]:
    return _run(inner[0], values)
  return [None] * len(eqn.outvars)
