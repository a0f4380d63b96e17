"""Which results of a traced function are its arguments, given back as they were.

A transform of nnx, such as `nnx.remat` or `nnx.scan`, gives back every Variable that goes into it,
changed or not, as a new value. So only the traced program can tell.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_accum import _versions
from optax_accum._check_split.dependence import CALLS, inner_jaxprs

_CALLS = CALLS | {"custom_vjp_call", "custom_vjp_call_jaxpr"}


class _Given(NamedTuple):
  """A result that is an argument, but for the order of its axes."""

  position: int
  axes: tuple[int, ...]  # those of the argument, as `transpose` takes them


def forwarded(jaxpr: Any) -> list[int | None]:
  """For each result the position of the argument that it is, or None if it was computed."""
  whole = set(_whole(jaxpr.invars))
  return [x.position if x in whole else None for x in _given(jaxpr)]


def _given(jaxpr: Any) -> list[Any]:
  """For each result which argument it is, a `_Given`, or None."""
  known: dict[Any, _Given] = dict(zip(jaxpr.invars, _whole(jaxpr.invars), strict=True))

  def read(x: Any) -> _Given | None:
    return None if isinstance(x, Literal) else known.get(x)

  for eqn in jaxpr.eqns:
    for out, passed in zip(eqn.outvars, _passed_on(eqn), strict=True):
      if passed is not None and (before := read(eqn.invars[passed.position])) is not None:
        known[out] = _Given(before.position, tuple(before.axes[i] for i in passed.axes))
  return [read(x) for x in jaxpr.outvars]


def _whole(variables: Sequence[Any]) -> list[_Given]:
  """Arguments as they are."""
  dims = [len(getattr(x.aval, "shape", ())) for x in variables]
  return [_Given(i, tuple(range(ndim))) for i, ndim in enumerate(dims)]


def _passed_on(eqn: Any) -> list[Any]:
  """As `_given`, of one equation."""
  name, params = eqn.primitive.name, eqn.params
  if name in ("copy", "optimization_barrier"):
    return _whole(eqn.invars)
  if name == "transpose":
    return [_Given(0, tuple(params["permutation"]))]
  if name == "scan":
    consts, carried = _versions.scan_inputs(eqn)
    inner = _given(params["jaxpr"].jaxpr)
    kept = _kept(inner[:carried], params["jaxpr"].jaxpr.invars, consts)
    return kept + [_stacked(x, consts + carried) for x in inner[carried:]]
  if name == "while":
    body = params["body_jaxpr"].jaxpr
    return _moved(_kept(_given(body), body.invars, params["body_nconsts"]), params["cond_nconsts"])
  if name == "cond":
    branches = [_given(branch.jaxpr) for branch in params["branches"]]
    agreed = [x if len({x, *others}) == 1 else None for x, *others in zip(*branches, strict=True)]
    return _moved(agreed, 1)  # the first is the index of the branch
  jaxprs = inner_jaxprs(eqn)
  if name not in _CALLS or len(jaxprs) != 1:
    return [None] * len(eqn.outvars)
  return _given(getattr(jaxprs[0], "jaxpr", jaxprs[0]))


def _kept(carry: list[Any], variables: Sequence[Any], consts: int) -> list[Any]:
  """What is carried, where it is as it was and in its place."""
  whole = _whole(variables)[consts:]
  return [x if x == before else None for x, before in zip(carry, whole, strict=False)]


def _stacked(x: _Given | None, first: int) -> _Given | None:
  """A slice of what a scan slices, as the array that the scan stacks."""
  if x is None or x.position < first:
    return None
  return _Given(x.position, (0, *(i + 1 for i in x.axes)))


def _moved(results: list[Any], by: int) -> list[Any]:
  return [None if x is None else x._replace(position=x.position + by) for x in results]
