"""Which results of a traced function are its arguments, given back as they were.

A transform of nnx, such as `nnx.remat` or `nnx.scan`, gives back every Variable that goes into it,
changed or not, as a new value. So only the traced program can tell.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_accum import _versions

# Calls of one jaxpr, whose inputs and outputs are those of the jaxpr.
_CALLS = {
  "jit",
  "pjit",
  "closed_call",
  "checkpoint",
  "remat2",
  "custom_jvp_call",
  "custom_vjp_call",
  "custom_vjp_call_jaxpr",
}


class _Given(NamedTuple):
  """A result that is an argument, but for the order of its axes."""

  position: int
  axes: tuple[int, ...]  # those of the argument, as `transpose` takes them

  @property
  def is_as_it_was(self) -> bool:
    return self.axes == tuple(range(len(self.axes)))


def forwarded(jaxpr: Any) -> list[int | None]:
  """For each result the position of the argument that it is, or None if it was computed."""
  return [x.position if x is not None and x.is_as_it_was else None for x in _given(jaxpr)]


def _given(jaxpr: Any) -> list[_Given | None]:
  """For each result which argument it is, in what order of axes."""
  known: dict[Any, _Given] = {x: _whole(i, x) for i, x in enumerate(jaxpr.invars)}

  def read(x: Any) -> _Given | None:
    return None if isinstance(x, Literal) else known.get(x)

  for eqn in jaxpr.eqns:
    for out, passed in zip(eqn.outvars, _passed_on(eqn), strict=True):
      before = None if passed is None else read(eqn.invars[passed.position])
      if passed is not None and before is not None:
        known[out] = _Given(before.position, tuple(before.axes[i] for i in passed.axes))
  return [read(x) for x in jaxpr.outvars]


def _whole(position: int, x: Any) -> _Given:
  return _Given(position, tuple(range(len(getattr(x.aval, "shape", ())))))


def _passed_on(eqn: Any) -> Sequence[_Given | None]:
  """As `_given`, of one equation."""
  name, params = eqn.primitive.name, eqn.params
  if name in ("copy", "optimization_barrier"):
    return [_whole(i, x) for i, x in enumerate(eqn.invars)]
  if name == "transpose":
    return [_Given(0, tuple(params["permutation"]))]
  if name == "scan":
    return _scanned(eqn)
  if name == "while":
    own, skipped = params["body_nconsts"], params["cond_nconsts"]
    inner = _given(params["body_jaxpr"].jaxpr)
    return [_moved(x, skipped) if _stays(x, own + i) else None for i, x in enumerate(inner)]
  if name == "cond":
    branches = [_given(branch.jaxpr) for branch in params["branches"]]
    agreed = [x if len({x, *others}) == 1 else None for x, *others in zip(*branches, strict=True)]
    return [_moved(x, 1) for x in agreed]  # the first is the index of the branch
  jaxprs = _versions.inner_jaxprs(eqn)
  if name not in _CALLS or len(jaxprs) != 1:
    return [None] * len(eqn.outvars)
  return _given(jaxprs[0])


def _scanned(eqn: Any) -> list[_Given | None]:
  consts, carried = _versions.scan_inputs(eqn)
  inner = _given(eqn.params["jaxpr"].jaxpr)
  carry = [x if _stays(x, consts + i) else None for i, x in enumerate(inner[:carried])]
  stacked = [
    _Given(x.position, (0, *(i + 1 for i in x.axes)))
    if x is not None and x.position >= consts + carried
    else None
    for x in inner[carried:]
  ]
  return [*carry, *stacked]


def _stays(given: _Given | None, position: int) -> bool:
  """Whether what is carried is as it was, in its place."""
  return given is not None and given.is_as_it_was and given.position == position


def _moved(given: _Given | None, by: int) -> _Given | None:
  return None if given is None else given._replace(position=given.position + by)
