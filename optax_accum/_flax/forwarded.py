"""Which results of a traced function are its arguments, unchanged.

A transform of nnx, such as `nnx.remat` or `nnx.scan`, returns every Variable that goes into it as a
new value, changed or not. So only the traced program can tell.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from optax_accum import _versions

# Calls of one jaxpr, whose inputs and outputs are those of the jaxpr.
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


class _Given(NamedTuple):
  """An argument, but for the order of its axes."""

  position: int
  axes: tuple[int, ...]  # those of the argument, as `transpose` takes them

  def turned(self, axes: Sequence[int]) -> "_Given":
    return _Given(self.position, tuple(self.axes[i] for i in axes))


_Givens: TypeAlias = Sequence[_Given | None]  # None is what was computed


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
  """For each result the position of the argument that it is, or None if it was computed."""
  whole = _whole(jaxpr)
  return [x.position if x and x == whole[x.position] else None for x in _run(jaxpr, whole)]


def _whole(jaxpr: Jaxpr) -> list[_Given]:
  """The arguments of a jaxpr, as they are."""
  dims = [len(getattr(x.aval, "shape", ())) for x in jaxpr.invars]
  return [_Given(i, tuple(range(ndim))) for i, ndim in enumerate(dims)]


def _run(jaxpr: Jaxpr, values: _Givens) -> _Givens:
  """The results of a jaxpr that is given such values."""
  known = dict(zip(jaxpr.invars, values, strict=True))

  def read(variables: Sequence[Var | Literal]) -> _Givens:
    return [None if isinstance(x, Literal) else known.get(x) for x in variables]

  for eqn in jaxpr.eqns:
    known.update(zip(eqn.outvars, _results(eqn, read(eqn.invars)), strict=True))
  return read(jaxpr.outvars)


def _results(eqn: JaxprEqn, values: _Givens) -> _Givens:
  """The results of an equation that is given such values."""
  name, params = eqn.primitive.name, eqn.params
  if name in ("copy", "optimization_barrier"):
    return values
  if name == "transpose":
    return [x and x.turned(params["permutation"]) for x in values]
  if name == "scan":
    return _looped(params["jaxpr"].jaxpr, values, *_versions.scan_inputs(eqn))
  if name == "while":
    body, consts = params["body_jaxpr"].jaxpr, params["body_nconsts"]
    return _looped(body, values[params["cond_nconsts"] :], consts, len(eqn.outvars))
  if name == "cond":  # the first value is the index of the branch
    branches = [_run(branch.jaxpr, values[1:]) for branch in params["branches"]]
    return [x if len({x, *others}) == 1 else None for x, *others in zip(*branches, strict=True)]
  inner = _versions.inner_jaxprs(eqn)
  if name not in _CALLS or [len(x.invars) for x in inner] != [len(values)]:
    return [None] * len(eqn.outvars)
  return _run(inner[0], values)


def _looped(body: Jaxpr, values: _Givens, consts: int, carried: int) -> _Givens:
  """The results of a loop: what is carried, and what a scan stacks."""
  whole = _whole(body)

  def result(i: int, x: _Given | None) -> _Given | None:
    if i < carried:  # as it was, and in its place
      return values[consts + i] if x == whole[consts + i] else None
    before = None if x is None or x.position < consts + carried else values[x.position]
    return before and x and before.turned((0, *(axis + 1 for axis in x.axes)))

  return [result(i, x) for i, x in enumerate(_run(body, whole))]
