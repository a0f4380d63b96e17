"""Which gradients JAX adds to references within a backward pass, and rightly.

`jax.vjp` (``with_refs``) is wrong or fails in some places:

- In 0.10 a reference that goes twice into one inner function (`jax.jit`, a scan, a cond) loses a
  part, and the backward pass of a scan mixes up gradients that have references and those that have
  not (jax pull request 38929).
- In 0.10 to 0.12 a `jax.lax.dynamic_slice` that starts before the array adds elsewhere than it
  read, and an optimization barrier fails.
- In 0.11 and 0.12 an index before the array, which reads nothing, adds to another row.

So a parameter has a reference only if it goes into none of these, nor into an inner function of a
kind that is not listed here. Of the others the whole gradient exists before it is added, as in a
plain scan.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from optax_accum import _versions

# Of an argument of a linear program: which parameter's tangent it is, if it has a reference.
Kind: TypeAlias = int | None
_VALUE = -1  # another tangent; None is no tangent

# What has a backward pass of its own for references, which is wrong or fails in some version.
_NOT_TO_PASS = {"slice", "dynamic_slice", "optimization_barrier"}
if not _versions.GATHERS_RIGHTLY:
  _NOT_TO_PASS |= {"gather"}
# What runs an inner function of the same operands in the same order; cond, of all but the first.
_INNER = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_INNER |= {"scan", "cond"}


def kept_apart(jaxpr: Any, leaves: Sequence[jax.Array]) -> set[int]:
  """The parameters that get no reference. The last arguments of `jaxpr` are all their tangents."""
  known = [None] * (len(jaxpr.invars) - len(leaves))  # residuals, which JAX 0.12 has there too
  apart = {i for i, x in enumerate(leaves) if not x.size}
  while found := _unfit(
    jaxpr, [*known, *(_VALUE if i in apart else i for i in range(len(leaves)))]
  ):
    apart |= found
  return apart


def _unfit(jaxpr: Any, kinds: Sequence[Kind]) -> set[int]:
  """The parameters that a linear program uses where a reference is not known to be right."""
  kind = dict(zip(map(id, jaxpr.invars), kinds, strict=True))
  unfit: set[int] = set()
  for eqn in jaxpr.eqns:
    at = [kind.get(id(x)) for x in eqn.invars]
    if any(x is not None for x in at):
      kind.update((id(x), _VALUE) for x in eqn.outvars)
      unfit |= _unfit_in(eqn, at)
  return unfit


def _unfit_in(eqn: Any, at: list[Kind]) -> set[int]:
  """The same of an equation, whose operands are of these kinds."""
  here = _parameters(at)
  name, inner = _versions.primitive_name(eqn), _versions.inner_jaxprs(eqn)
  if not inner:
    return here if name in _NOT_TO_PASS else set()
  if name not in _INNER or not here:
    return here
  unfit = {i for i in here if at.count(i) > 1}
  if name == "cond":
    at = at[1:]
  if name == "scan":
    consts, carried = _versions.scan_inputs(eqn)
    rest = consts + carried
    for group in (at[:consts], at[rest:]):
      if _VALUE in group:
        unfit |= _parameters(group[group.index(_VALUE) :])
    at = [*at[:consts], *[_VALUE] * carried, *at[rest:]]  # carried cotangents are values
  for part in inner:
    unfit |= _unfit(part, at) if len(part.invars) == len(at) else here
  return unfit


def _parameters(kinds: Sequence[Kind]) -> set[int]:
  return {i for i in kinds if i is not None and i != _VALUE}
