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

# An argument, but for the order of its axes: its position, and its axes as `transpose` takes them.
_Given: TypeAlias = tuple[int, tuple[int, ...]]
_Givens: TypeAlias = Sequence[_Given | None]  # None is what was computed


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
  """For each result the position of the argument that it is, or None if it was computed."""
  whole = _whole(jaxpr)
  return [x[0] if x and x == whole[x[0]] else None for x in _run(jaxpr, whole)]


def _whole(jaxpr: Jaxpr) -> list[_Given]:
  """The arguments of a jaxpr, as they are."""
  dims = [len(getattr(x.aval, "shape", ())) for x in jaxpr.invars]
  return [(i, tuple(range(ndim))) for i, ndim in enumerate(dims)]


def _turned(x: _Given | None, axes: Sequence[int]) -> _Given | None:
  return x and (x[0], tuple(x[1][i] for i in axes))


def _run(jaxpr: Jaxpr, values: _Givens) -> _Givens:
  """The results of a jaxpr that is given such values."""
  known = dict(zip(jaxpr.invars, values, strict=True))

  def read(xs):
    return [None if isinstance(x, Literal) else known.get(x) for x in xs]

  for eqn in jaxpr.eqns:
    known.update(zip(eqn.outvars, _results(eqn, read(eqn.invars)), strict=True))
  return read(jaxpr.outvars)


def _results(eqn: JaxprEqn, values: _Givens) -> _Givens:
  """The results of an equation that is given such values."""
  name, params, inner = (
    eqn.primitive.name,
    eqn.params,
    _versions.inner_jaxprs(eqn),
  )
  if name in ("copy", "optimization_barrier"):
    return values
  if name == "transpose":
    return [_turned(x, params["permutation"]) for x in values]
  if name == "scan":
    return _scanned(inner[0], values, *_versions.scan_inputs(eqn))
  if name == "cond":  # the first value is the index of the branch
    branches = [_run(branch, values[1:]) for branch in inner]
    return [
      x if len({x, *others}) == 1 else None
      for x, *others in zip(*branches, strict=True)
    ]
  if name in _CALLS and [len(x.invars) for x in inner] == [len(values)]:
    return _run(inner[0], values)
  return [None] * len(eqn.outvars)


def _scanned(
  body: Jaxpr, values: _Givens, consts: int, carried: int
) -> _Givens:
  """The results of a scan: what is carried, if it stays in its place, and what is stacked."""
  whole = _whole(body)

  def result(i: int, x: _Given | None) -> _Given | None:
    if i < carried:
      return values[consts + i] if x == whole[consts + i] else None
    if x is None or x[0] < consts + carried:
      return None
    return _turned(values[x[0]], (0, *(axis + 1 for axis in x[1])))

  return [result(i, x) for i, x in enumerate(_run(body, whole))]
