"""In-place accumulation: the backward pass adds gradients to their accumulators, layer by layer.

`jax.vjp` (``with_refs``) is wrong or fails for a parameter that goes

- twice into one inner function (`jax.jit`, a scan, a cond), or into a scan after a value without a
  reference: in 0.10 (jax pull request 38929);
- into a `dynamic_slice`, which may start before the array, or an optimization barrier: to 0.12;
- into a gather by an index before the array: in 0.11 and 0.12.

Of such a parameter, and of one that goes into an inner function of a kind that is not listed here,
the gradient exists before it is added.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, cast, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_accum import _validate, _versions
from optax_accum._arithmetic import (
  across_devices,
  dtypes,
  hoisting,
  reduction_words,
)
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Tree
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.options import Split

# What an operand of a linear program is: the tangent of parameter i, which has a reference; another
# tangent, without one, _VALUE; or no tangent, None.
_Kind: TypeAlias = int | None
_VALUE = -1

# What has a backward pass of its own for references, which is wrong or fails in some version.
_NOT_TO_PASS = {"slice", "dynamic_slice", "optimization_barrier"}
if not _versions.GATHERS_RIGHTLY:
  _NOT_TO_PASS |= {"gather"}
# What runs an inner function of the same operands in the same order; cond, of all but the first.
_INNER = {
  "jit",
  "closed_call",
  "core_call",
  "remat",
  "remat2",
  "checkpoint",
  "scan",
  "cond",
}


class Accumulators:
  """The accumulators of gradients, as references. `reductions` is a prefix tree over them."""

  def __init__(
    self,
    args,
    argnums: int | Sequence[int],
    reductions,
    dtype: DTypeLike | None,
  ) -> None:
    self._is_one = isinstance(argnums, int)
    self._positions = (argnums,) if isinstance(argnums, int) else argnums
    params = [args[i] for i in self._positions]
    for i, tree in zip(self._positions, params, strict=True):
      for name, x in _validate.named_leaves(f"argument {i}", tree):
        _check_dtype(name, x, dtype)

    def accumulator(x):
      return jax.new_ref(across_devices.full_like(jax.typeof(x), 0))

    def added(of, ref):
      return AddedGradients(of=of, ref=ref, over_devices=of.over_devices)

    refs = self._like_gradients(jax.tree.map(accumulator, params))
    each = reduction_words.match(
      "grad_reduction", reductions, refs, "gradients"
    )
    self.reductions = jax.tree.map(added, each, refs)
    self._refs = jax.tree.leaves(refs)

  def _like_gradients(self, trees: list[Tree]):
    """What `argnums` has one or several of, as `jax.grad` returns it."""
    return trees[0] if self._is_one else tuple(trees)

  def value_and_grad(
    self,
    fun: Callable[..., Tree],
    factor: Weight,
    /,
    *args,
    **kwargs,
  ):
    """As `jax.value_and_grad`, but it adds gradients times `factor`, and returns empty ones."""
    args, kwargs = refuse_transforms((args, kwargs))
    params = [args[i] for i in self._positions]
    leaves = jax.tree.leaves(params)
    treedef: Any = jax.tree.structure(params)

    def of_leaves(*leaves):
      all_args = [*args]
      for i, x in zip(self._positions, treedef.unflatten(leaves), strict=True):
        all_args[i] = x
      return fun(*all_args, **kwargs)

    vjp: Any = jax.vjp  # which JAX does not type with references
    loss, backward, aux = vjp(of_leaves, *leaves, has_aux=True)
    refs = [*self._refs]
    apart = kept_apart(backward.jaxpr, leaves)
    for i in apart:
      refs[i] = cast(Any, jax).ad.GradValue()  # which has it returned
    cotangent = _cotangent(loss, leaves, factor)
    loss, aux, cotangent = refuse_transforms((loss, aux, cotangent))
    grads = backward.with_refs(*refs)(cotangent)
    for i in apart:
      self._refs[i][...] += grads[i]

    def empty(x):
      return across_devices.vary_like(jnp.zeros((0,), x.dtype), x)

    return (loss, aux), self._like_gradients(jax.tree.map(empty, params))


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AddedGradients(Reduction):
  """The sum or mean `of` gradients that the backward pass has added to `ref`."""

  of: Reduction
  ref: Any

  def resumed(self, held):
    self.ref[...] = held
    return across_devices.vary_like(jnp.zeros((0,), held.dtype), held)

  def unhoisted(self, held, shapes):
    self.ref[...] = hoisting.unhoisted(self.ref[...], shapes)
    return held

  def join(self, held, collected, tail=None):
    return refuse_transforms(jax.freeze(self.ref))

  def finish(self, held, weight, like):
    return self.of.finish(held, weight, like)


_unmapped = jax.custom_batching.custom_vmap(lambda x: x)
_identity = jax.custom_jvp(_unmapped)


@_identity.defjvp
@_unmapped.def_vmap
def _refuse(*args):
  raise NotImplementedError(
    "in_place=True adds gradients to references, which cannot be differentiated, and jax.vmap"
    " cannot give a further axis: pass in_place=False, or take jax.lax.map (without its batch_size,"
    " which is a vmap)."
  )


def refuse_transforms(tree):
  """`tree`, which refuses derivatives and `jax.vmap`, wrong in JAX if a loop has references."""

  def refusing(x):
    return _identity(x) if isinstance(x, jax.Array) else x

  return jax.tree.map(refusing, tree)


def check_options(split: Split, grad_reduction, metrics) -> None:
  """Checks what ``in_place`` is given with, and that this JAX can do it."""
  if not split.in_place:
    return
  if metrics:
    raise ValueError(
      f"What is asked for ({', '.join(metrics)}) needs the gradients of microbatches, and"
      " in_place=True adds these up within the backward pass, so that none ever exists: pass"
      " in_place=False, or leave noise_scale and grad_metrics_fn out."
    )
  if split.skip_nonfinite or grad_reduction is not None:
    raise ValueError(
      "in_place=True adds gradients up before they are complete, so that"
      f" skip_nonfinite={split.skip_nonfinite} with grad_reduction={grad_reduction!r} cannot leave"
      " them out, nor combine them in another way than losses: pass in_place=False."
    )
  if not _versions.ADDS_TO_REFERENCES:
    raise NotImplementedError(
      f"in_place=True needs JAX 0.10 or newer, and this is {jax.__version__}: pass in_place=False."
    )


def _check_dtype(name: str, x, requested: DTypeLike | None) -> None:
  """Checks that a parameter's gradients are added up in their own dtype."""
  dtype = jnp.result_type(x)
  wide = dtypes.accumulator_dtype(dtype, requested)
  if wide == dtype:
    return
  raise TypeError(
    f"{name} has dtype {dtype}, and its gradients would be added up in {wide}; in_place=True adds"
    f" them as they come out of the backward pass. Keep parameters in {wide} and cast them in the"
    " loss (in the body of a scan over layers), give no accumulator_dtype, or pass in_place=False."
  )


def _cotangent(loss: jax.Array, leaves, factor: Weight) -> jax.Array:
  """The factor of the loss, and so of all gradients."""
  widest = max((jnp.finfo(x.dtype).bits for x in leaves), default=0)
  is_narrow = jnp.finfo(loss.dtype).bits < widest
  is_one = isinstance(factor, float) and factor == 1
  if is_narrow and not is_one:
    raise TypeError(
      f"The loss has dtype {loss.dtype}, narrower than the parameters', and in_place=True would"
      " round weights to it: return the loss in the parameters' dtype, or pass in_place=False."
    )
  return jnp.ones_like(loss) * jnp.asarray(factor, loss.dtype)


def kept_apart(jaxpr, leaves: Sequence[jax.Array]) -> set[int]:
  """The parameters that get no reference. The last arguments of `jaxpr` are all their tangents."""
  apart = {i for i, x in enumerate(leaves) if not x.size}
  residuals = len(jaxpr.invars) - len(leaves)  # which JAX 0.12 has there too
  while True:
    kinds: list[_Kind] = [None] * residuals
    kinds += [_VALUE if i in apart else i for i in range(len(leaves))]
    found = _unfit(jaxpr, kinds)
    if not found:
      return apart
    apart |= found


def _unfit(jaxpr, kinds: Sequence[_Kind]) -> set[int]:
  """The parameters that a linear program uses where a reference is not known to be right."""
  # By identity: what is not a variable has no hash.
  kind = dict(zip(map(id, jaxpr.invars), kinds, strict=True))
  unfit: set[int] = set()
  for eqn in jaxpr.eqns:
    operands = [kind.get(id(x)) for x in eqn.invars]
    if any(x is not None for x in operands):
      kind.update((id(x), _VALUE) for x in eqn.outvars)
      unfit |= _unfit_in(eqn, operands)
  return unfit


def _unfit_in(eqn, operands: list[_Kind]) -> set[int]:
  """The same of an equation, whose operands are of these kinds."""
  here = {i for i in operands if i is not None and i != _VALUE}
  name = _versions.primitive_name(eqn)
  inner = _versions.inner_jaxprs(eqn)
  if not inner:
    return here if name in _NOT_TO_PASS else set()
  if name not in _INNER or not here:
    return here
  # What goes in twice.
  unfit = {i for i in here if operands.count(i) > 1}
  # Then the operands as the inner functions have them.
  if name == "cond":
    operands = operands[1:]
  if name == "scan":
    consts, carried = _versions.scan_inputs(eqn)
    shared = operands[:consts]
    rows = operands[consts + carried :]
    for group in (shared, rows):
      # What goes into a scan after a value.
      if _VALUE in group:
        first = group.index(_VALUE)
        unfit |= here.intersection(group[first:])
    # Carried cotangents are values.
    operands = [*shared, *[_VALUE] * carried, *rows]
  for part in inner:
    if len(part.invars) != len(operands):
      return here
    unfit |= _unfit(part, operands)
  return unfit
