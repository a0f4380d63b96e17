"""Which results of a traced function are its arguments, given back as they were.

A transform of nnx, such as `nnx.remat` or `nnx.scan`, gives back every Variable that goes into it,
changed or not, as a new value. So only the traced program can tell.
"""

from typing import Any

from jax.extend.core import Literal

from optax_accum import _versions
from optax_accum._check_split.dependence import CALLS, inner_jaxprs


def forwarded(jaxpr: Any) -> list[int | None]:
  """For each result the position of the argument that it is, or None if it was computed."""
  same: dict[Any, Any] = {}  # a variable that was given back, and the one that it is

  def origin(x: Any) -> Any:
    return None if isinstance(x, Literal) else same.get(x, x)

  for eqn in jaxpr.eqns:
    for out, position in zip(eqn.outvars, _passed_on(eqn), strict=True):
      if position is not None and (x := origin(eqn.invars[position])) is not None:
        same[out] = x
  positions = {x: i for i, x in enumerate(jaxpr.invars)}
  return [None if (x := origin(out)) is None else positions.get(x) for out in jaxpr.outvars]


def _passed_on(eqn: Any) -> list[int | None]:
  """As `forwarded`, of one equation."""
  name, params = eqn.primitive.name, eqn.params
  if name in ("copy", "optimization_barrier"):
    return list(range(len(eqn.outvars)))
  if name == "scan":
    consts, carried = _versions.scan_inputs(eqn)
    inner = forwarded(params["jaxpr"].jaxpr)
    carry = [j if j == consts + i else None for i, j in enumerate(inner[:carried])]
    stacked = [j if j is not None and j >= consts + carried else None for j in inner[carried:]]
    return carry + stacked
  if name == "while":
    own = params["body_nconsts"]
    inner = forwarded(params["body_jaxpr"].jaxpr)
    return [params["cond_nconsts"] + j if j == own + i else None for i, j in enumerate(inner)]
  if name == "cond":
    branches = [forwarded(branch.jaxpr) for branch in params["branches"]]
    agreed = [j if len({j, *others}) == 1 else None for j, *others in zip(*branches, strict=True)]
    return [None if j is None else j + 1 for j in agreed]  # the first is the index of the branch
  inner = inner_jaxprs(eqn)
  if name not in CALLS or len(inner) != 1:
    return [None] * len(eqn.outvars)
  return forwarded(getattr(inner[0], "jaxpr", inner[0]))
