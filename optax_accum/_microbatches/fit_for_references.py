"""Which gradients JAX adds to references within a backward pass, and rightly.

`jax.vjp` can (``with_refs``) since 0.8, and not everywhere. 0.9 cannot pass a `jax.checkpoint`. To
0.10 a reference that goes twice into one inner function (`jax.jit`, a scan, a cond) loses a part,
and the backward pass of a scan mixes up gradients that have references and those that have not (jax
pull request 38929). To 0.12 a `jax.lax.dynamic_slice` that starts before the array adds elsewhere
than it read, an optimization barrier fails, and in 0.12 an index before the array, which reads
nothing, adds to another row. So a parameter has its gradient added within only where it goes into
none of these, nor into an inner function of a kind that is not listed here. Of the others the whole
gradient exists before it is added, as in a plain scan.
"""

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any, cast

import jax
import jax.numpy as jnp

from optax_accum import _versions

# What has a backward pass of its own for references, which is wrong or fails in some version.
_NOT_TO_PASS = {"slice", "dynamic_slice", "optimization_barrier"}
# What runs an inner function of the same operands in the same order; of a cond after the first.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_INNER = {*_CALLS, "scan", "cond"}


def kept_apart(fun: Callable[..., Any], leaves: Sequence[jax.Array]) -> set[int]:
  """Those of the parameters that a loss, with aux, is not to be given references for."""
  apart = {i for i, x in enumerate(leaves) if not x.size}
  while True:
    found: set[int] = set()

    def look(*leaves: jax.Array, apart: set[int] = apart, found: set[int] = found) -> None:
      backward: Any = jax.vjp(copying(fun, apart), *leaves, has_aux=True)[1]
      jaxpr = backward.jaxpr  # what is run backwards: tangents of parameters are its last arguments
      known = len(jaxpr.invars) - len(leaves)  # from JAX 0.12 the residuals are arguments too
      owners = [*([None] * known), *range(len(leaves))]
      found.update(_unfit(jaxpr, owners, [owner is not None for owner in owners]))

    jax.eval_shape(look, *leaves)
    if found <= apart:
      return apart
    apart = apart | found


def copying(fun: Callable[..., Any], apart: set[int]) -> Callable[..., Any]:
  """`fun`, in which these parameters go into a copy alone, whose whole gradient is then added."""
  return lambda *leaves: fun(*[jnp.copy(x) if i in apart else x for i, x in enumerate(leaves)])


def _unfit(jaxpr: Any, owners: list[int | None], is_linear: list[bool]) -> set[int]:
  """The parameters of a linear program that are used where a reference is not known to be right.

  `owners`: for each argument the parameter that has the reference to add to, if one does.
  """
  from jax.extend.core import Literal  # longer to import than this package

  both = list(zip(jaxpr.invars, owners, is_linear, strict=True))
  owner = {v: i for v, i, _ in both if i is not None}
  linear = {v for v, _, known in both if known}
  unfit: set[int] = set()
  for eqn in jaxpr.eqns:
    at = [None if isinstance(v, Literal) else owner.get(v) for v in eqn.invars]
    lin = [not isinstance(v, Literal) and v in linear for v in eqn.invars]
    if any(lin):
      linear.update(eqn.outvars)
    here = {i for i in at if i is not None}
    if not here:
      continue
    name, inner = _versions.primitive_name(eqn), _versions.inner_jaxprs(eqn)
    passes = name not in _NOT_TO_PASS and (name != "gather" or _gathers_rightly())
    if not passes or (inner and name not in _INNER):
      unfit |= here
      continue
    if not inner:
      continue
    unfit |= {i for i in here if at.count(i) > 1}
    if name == "cond":
      at, lin = at[1:], lin[1:]
    if name == "scan":
      consts, carried = _versions.scan_inputs(eqn)
      for group in (slice(consts), slice(consts + carried, None)):
        unfit |= _after_a_value(at[group], lin[group])
      at[consts : consts + carried] = [None] * carried  # carried cotangents are values
      lin[consts : consts + carried] = [True] * carried
    for part in inner:
      unfit |= _unfit(part, at, lin) if len(part.invars) == len(at) else here
  return unfit


def _after_a_value(owners: list[int | None], is_linear: list[bool]) -> set[int]:
  """Those of a scan's constants, or of what it scans, that come after a linear value."""
  each = zip(owners, is_linear, strict=True)
  values = [known and i is None for i, known in each]
  return {i for at, i in enumerate(owners) if i is not None and any(values[:at])}


def check_supported() -> None:
  """Checks that this JAX adds the gradients of scanned, rematerialised layers rightly."""
  if not is_right():
    raise NotImplementedError(
      f"in_place=True: in JAX {jax.__version__} a backward pass cannot add gradients to references"
      " rightly, or not where layers are rematerialised. Use in_place=False, or a newer JAX."
    )


@functools.cache
def is_right() -> bool:
  """Whether a loss with a scan has the gradients that it should, tried once in a process."""

  def loss(params: list[jax.Array]) -> jax.Array:
    first, second, const = params

    def layer(x: jax.Array, ws: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
      return jnp.tanh(x * ws[0] + 2 * ws[1] * const), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), jnp.ones(2, jnp.float32), (first, second))
    return jnp.sum(x)

  return _try(loss, [(3, 2), (3, 2), (2,)])


@functools.cache
def _gathers_rightly() -> bool:
  """Whether nothing is added where an index is out of range, tried once in a process."""

  def loss(params: list[jax.Array]) -> jax.Array:
    rows = params[0].at[jnp.asarray([0, -3], jnp.int32)]
    return jnp.sum(rows.get(mode="fill", fill_value=0, wrap_negative_indices=False))

  return _try(loss, [(4,)])


def _try(loss: Callable[[list[jax.Array]], jax.Array], shapes: list[tuple[int, ...]]) -> bool:
  """Whether the gradients of a loss are those that are added to references."""
  found = []

  def both(params: list[jax.Array]) -> Any:
    refs = [jax.new_ref(jnp.zeros_like(x)) for x in params]
    out, backward = cast(Any, jax.vjp(loss, params))
    backward.with_refs(refs)(jnp.ones_like(out))
    return jax.grad(loss)(params), [jax.freeze(ref) for ref in refs]

  # A thread of its own has no trace, no mesh and no setting of the caller's.
  def try_it() -> None:
    try:
      with jax.disable_jit(False), jax.numpy_dtype_promotion("standard"):
        params = [jnp.full(shape, 0.5, jnp.float32) for shape in shapes]
        each = zip(*jax.jit(both)(params), strict=True)
        found.append(all(bool(jnp.allclose(x, y)) for x, y in each))
    except (TypeError, NotImplementedError, AttributeError):  # of versions that cannot do it at all
      found.append(False)

  thread = threading.Thread(target=try_it)
  thread.start()
  thread.join()
  return found == [True]
