"""A loss whose maxima and absolute values of one number are bent: no longer piecewise linear.

``jnp.maximum(kl.mean(), 0.1)`` of a batch is the mean of that of its parts, as long as all are on
one side of 0.1. Bent, it is not; and a loss that splits well still does, because what splits well
has no such function of what all rows come to.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp

from optax_accum import _versions
from optax_accum._check_split import dependence
from optax_accum._check_split.dependence import Step
from optax_accum._check_split.probes import Arguments, Probe
from optax_accum._check_split.runs import Runs

_KINKS = {"max", "min", "abs", "clamp", "sign"}


def is_kink(step: Step) -> bool:
  """Whether it is a piecewise linear function of one number, of parameters and the batch."""
  depends = frozenset[str]().union(*(x.depends for x in step.inputs))
  return _may_be_kink(step.equation) and {"params", "batch"} <= depends


def disagrees(
  runs: Runs, args: Arguments, kinds: Mapping[int, str], tried: Sequence[Probe]
) -> bool:
  """Whether microbatches of the bent loss do not give what the whole batch does.

  `kinds` are "params" or "batch", by argument.
  """
  bent = Runs(_bent(runs.fun, kinds), args, runs.options, runs.sizes[:1])
  return any(not whole.fits(x.leaves) for _, whole, splits in bent.outcomes(tried) for x in splits)


def _bent(fun: Callable[..., Any], kinds: Mapping[int, str]) -> Callable[..., Any]:
  """The loss, bent."""

  @functools.wraps(fun)
  def loss(*args: Any) -> Any:
    treedef: Any
    leaves, treedef = jax.tree.flatten(args)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    depends = [
      frozenset({kinds.get(i, "other")})
      for i, arg in enumerate(args)
      for x in jax.tree.leaves(arg)
      if isinstance(x, jax.Array)
    ]

    def of_arrays(arrays: Sequence[Any]) -> Any:
      merged = list(leaves)
      for place, array in zip(places, arrays, strict=True):
        merged[place] = array
      return fun(*treedef.unflatten(merged))

    arrays = [leaves[i] for i in places]
    closed, shape = jax.make_jaxpr(of_arrays, return_shape=True)(arrays)
    out = _evaluate(closed.jaxpr, closed.consts, [*zip(arrays, depends, strict=True)])
    return jax.tree.unflatten(jax.tree.structure(shape), [value for value, _ in out])

  return loss


def _evaluate(jaxpr: Jaxpr, consts: Any, inputs: Sequence[tuple[Any, Any]]) -> list[Any]:
  """What a jaxpr computes, bent, each with what it depends on."""
  known = dict(zip(jaxpr.invars, inputs, strict=True))
  nothing = frozenset[str]()
  known.update((v, (x, nothing)) for v, x in zip(jaxpr.constvars, consts, strict=True))
  read = lambda v: (v.val, nothing) if isinstance(v, Literal) else known[v]  # noqa: E731
  for eqn in jaxpr.eqns:
    given = [read(v) for v in eqn.invars]
    known.update(zip(eqn.outvars, _bound(eqn, given), strict=True))
  return [read(v) for v in jaxpr.outvars]


def _bound(eqn: Any, given: Sequence[tuple[Any, Any]]) -> list[Any]:
  """What one equation computes."""
  inner = dependence.inner_jaxprs(eqn)
  if eqn.primitive.name in dependence.CALLS and len(inner) == 1 and _has_kinks(inner[0]):
    return _evaluate(getattr(inner[0], "jaxpr", inner[0]), getattr(inner[0], "consts", ()), given)
  values = [x for x, _ in given]
  depends = frozenset[str]().union(*(d for _, d in given))
  functions, params = _versions.bind_arguments(eqn)
  with eqn.ctx.manager:
    out = eqn.primitive.bind(*functions, *values, **params)
  out = list(out) if eqn.primitive.multiple_results else [out]
  if _may_be_kink(eqn) and {"params", "batch"} <= depends:
    name = eqn.primitive.name
    x = values[1] if name == "clamp" else values[0]
    x = x - values[1] if name in ("max", "min") else x
    out = [out[0] + jnp.log1p(jnp.abs(x))]
  return [(x, depends) for x in out]


def _has_kinks(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
  return any(
    _may_be_kink(eqn) or any(map(_has_kinks, dependence.inner_jaxprs(eqn)))
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
  )


def _may_be_kink(eqn: Any) -> bool:
  aval = eqn.outvars[0].aval
  is_number = getattr(aval, "shape", None) == () and jnp.issubdtype(aval.dtype, jnp.floating)
  return eqn.primitive.name in _KINKS and is_number
