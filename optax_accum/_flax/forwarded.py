"""Which results of a traced function are its arguments, unchanged.

A transform of nnx, such as `nnx.remat` or `nnx.scan`, returns every Variable that goes into it as a
new value, changed or not. So only the traced program can tell.
"""

from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn

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
  positions: dict[_Given | None, int] = {x: i for i, x in enumerate(whole)}
  return [positions.get(x) for x in _run(jaxpr, whole)]


def _whole(jaxpr: Jaxpr) -> list[_Given]:
  """The arguments of a jaxpr, as they are."""
  dims = [getattr(x.aval, "ndim", 0) for x in jaxpr.invars]
  return [(i, tuple(range(ndim))) for i, ndim in enumerate(dims)]


def _turned(x: _Given | None, axes: Sequence[int]) -> _Given | None:
  """A value, transposed."""
  if x is None:
    return None
  argument, before = x
  return argument, tuple(before[i] for i in axes)


def _run(jaxpr: Jaxpr, values: _Givens) -> _Givens:
  """The results of a jaxpr that is given such values."""
  # By identity: what is not a variable has no hash.
  known = dict(zip(map(id, jaxpr.invars), values, strict=True))

  def read(xs):
    return [known.get(id(x)) for x in xs]

  for eqn in jaxpr.eqns:
    results = _results(eqn, read(eqn.invars))
    known.update(zip(map(id, eqn.outvars), results, strict=True))
  return read(jaxpr.outvars)


def _results(eqn: JaxprEqn, values: _Givens) -> _Givens:
  """The results of an equation that is given such values."""
  name = eqn.primitive.name
  inner = _versions.inner_jaxprs(eqn)
  if name in ("copy", "optimization_barrier"):
    return values
  if name == "transpose":
    return [_turned(x, eqn.params["permutation"]) for x in values]
  if name == "scan":
    return _scanned(inner[0], values, *_versions.scan_inputs(eqn))
  if name == "cond":  # the first value is the index of the branch
    branches = [_run(branch, values[1:]) for branch in inner]
    results = map(set, zip(*branches, strict=True))
    return [x.pop() if len(x) == 1 else None for x in results]
  if name in _CALLS and [len(x.invars) for x in inner] == [len(values)]:
    return _run(inner[0], values)
  return [None] * len(eqn.outvars)


def _scanned(
  body: Jaxpr, values: _Givens, consts: int, carried: int
) -> _Givens:
  """The results of a scan: what is carried, if it stays in its place, and what is stacked."""
  whole = _whole(body)
  results = list(_run(body, whole))
  for i, x in enumerate(results):
    results[i] = None
    if i < carried:
      if x == whole[consts + i]:
        results[i] = values[consts + i]
    elif x is not None and x[0] >= consts + carried:
      argument, axes = x
      results[i] = _turned(values[argument], (0, *(axis + 1 for axis in axes)))
  return results
