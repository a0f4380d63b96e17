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
import functools
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
from optax_accum._microbatches.options import slots_of, Split

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
  """The accumulators of gradients, as references. `kinds` is a prefix tree of their reductions.

  The array of a reference is read and written as ``ref[...]``.
  """

  def __init__(
    self,
    args,
    argnums: int | Sequence[int],
    kinds: Tree,
    dtype: DTypeLike | None,
  ) -> None:
    self._argnums = argnums
    params = self._differentiated(args)
    # A reference has the dtype of its parameter, so the sum must have that dtype too.
    for name, x in _validate.named_leaves("params", params):
      _check_dtype(name, x, dtype)

    def accumulator(x):
      return jax.new_ref(across_devices.full_like(jax.typeof(x), 0))

    refs = jax.tree.map(accumulator, params)
    self._refs = jax.tree.leaves(refs)
    # A reduction for each reference, as one of `kinds` may stand for a whole subtree.
    each = reduction_words.match("reduction", kinds, refs)
    self.reductions = jax.tree.map(AddedGradients, each, refs)

  def _differentiated(self, args):
    """One or several arguments, as `jax.grad` returns their gradients."""
    if isinstance(self._argnums, int):
      return args[self._argnums]
    return tuple(args[i] for i in self._argnums)

  def value_and_grad(self, fun: Callable[..., Tree]) -> Callable[..., Any]:
    """As `jax.value_and_grad` with aux, but it adds the gradients up, and returns empty ones."""
    return functools.partial(self._add_gradients, fun)

  def _add_gradients(self, fun: Callable[..., Tree], /, *args, **kwargs):
    """The loss and aux of `fun`, and an empty gradient for each parameter."""
    # Raises if a transformation differentiates or maps the arguments.
    args, kwargs = refuse_transforms((args, kwargs))
    params = self._differentiated(args)
    leaves = jax.tree.leaves(params)
    treedef: Any = jax.tree.structure(params)

    # The loss as a function of the single arrays, as `with_refs` takes a reference for each.
    def of_leaves(*leaves):
      given = treedef.unflatten(leaves)
      if isinstance(self._argnums, int):
        given = (given,)
      # Each in the place of its argument, whose position may be negative.
      new = list(args)
      for i, x in zip(slots_of(self._argnums), given, strict=True):
        new[i] = x
      return fun(*new, **kwargs)

    vjp: Any = jax.vjp  # which JAX does not type with references
    loss, backward, aux = vjp(of_leaves, *leaves, has_aux=True)
    refs = [*self._refs]
    # The indices of the leaves that get no reference: their whole gradient is returned.
    whole = without_references(backward.jaxpr, leaves)
    # For a `GradValue`, `with_refs` returns the gradient, and adds it to no reference.
    for i in whole:
      refs[i] = cast(Any, jax).ad.GradValue()
    # The cotangent of the loss is 1. A transformation of all three is refused, as above.
    given = loss, aux, jnp.ones_like(loss)
    loss, aux, cotangent = refuse_transforms(given)
    add = backward.with_refs(*refs)
    grads = add(cotangent)
    for i in whole:
      self._refs[i][...] += grads[i]

    return (loss, aux), jax.tree.map(_empty, params)


def _empty(x: jax.Array) -> jax.Array:
  """What the loop gets for a gradient that is in a reference: an array without elements."""
  return across_devices.vary_like(jnp.zeros((0,), x.dtype), x)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AddedGradients(Reduction):
  """The sum or mean `kind` of gradients that the backward pass has added to `ref`."""

  kind: Reduction
  ref: Any

  def start(self, like, dtype):
    # `like` is of an empty gradient: the sum is in `ref`, and the state holds nothing.
    return across_devices.full_like(like, 0)

  def resumed(self, state):
    # The sum of calls before goes into the reference, and the state is empty again.
    self.ref[...] = state
    return _empty(state)

  def unhoisted(self, state, shapes):
    self.ref[...] = hoisting.unhoisted(self.ref[...], shapes)
    return state

  def join(self, state, collected, tail=None):
    # The array of the reference, which ends with this.
    total = jax.freeze(self.ref)
    return refuse_transforms(total)

  def over_devices(self, state, devices):
    return self.kind.over_devices(state, devices)

  def finish(self, state, weight, like):
    return self.kind.finish(state, weight, like)


# The identity, for which both a derivative and `jax.vmap` call `_refuse`.
_unmapped = jax.custom_batching.custom_vmap(lambda x: x)
_identity = jax.custom_jvp(_unmapped)


@_identity.defjvp
@_unmapped.def_vmap
def _refuse(*args):
  raise NotImplementedError(
    "in_place=True adds gradients to references, which cannot be differentiated, nor mapped by"
    " jax.vmap: pass in_place=False, or take jax.lax.map without its batch_size."
  )


def refuse_transforms(tree):
  """`tree`, refusing derivatives and `jax.vmap`, which JAX has wrong in a loop with references."""

  def refusing(x):
    if isinstance(x, jax.Array):
      return _identity(x)
    return x

  return jax.tree.map(refusing, tree)


def check_options(split: Split, noise_scale: bool) -> None:
  """Checks what ``in_place`` is given with, and that this JAX can do it."""
  if not split.in_place:
    return
  if split.skip_nonfinite or noise_scale:
    raise ValueError(
      "in_place=True adds gradients up before they are complete, so that"
      f" skip_nonfinite={split.skip_nonfinite} cannot leave them out, nor"
      f" noise_scale={noise_scale} compare them: pass in_place=False."
    )
  if not _versions.ADDS_TO_REFERENCES:
    raise NotImplementedError(
      f"in_place=True needs JAX 0.10 or newer, and this is {jax.__version__}: pass in_place=False."
    )


def _check_dtype(name: str, x, requested: DTypeLike | None) -> None:
  """Checks that a parameter's gradients are added up in their own dtype."""
  dtype = jnp.result_type(x)
  # If none is requested, sums are in float32 at least.
  wide = dtypes.accumulator_dtype(dtype, requested)
  if wide == dtype:
    return
  raise TypeError(
    f"{name} has dtype {dtype}, and its gradients would be added up in {wide}, which in_place=True"
    f" cannot: keep parameters in {wide} and cast them in the loss, in the body of a scan over"
    " layers; or give no accumulator_dtype; or pass in_place=False."
  )


def without_references(jaxpr, leaves: Sequence[jax.Array]) -> set[int]:
  """The parameters that get no reference. The last arguments of `jaxpr` are all their tangents."""
  # An empty gradient takes no memory, so a reference to it would save nothing.
  whole = {i for i, x in enumerate(leaves) if not x.size}
  # JAX 0.12 has residuals in front of the tangents. These are no tangents: None.
  residuals = len(jaxpr.invars) - len(leaves)
  # A parameter without a reference is a value, next to which others may become unfit in a scan.
  # So the search is repeated until it finds no more.
  while True:
    kinds: list[_Kind] = [None] * residuals
    kinds += range(len(leaves))
    for i in whole:
      kinds[residuals + i] = _VALUE
    found = _unfit(jaxpr, kinds)
    if not found:
      return whole
    whole |= found


def _unfit(jaxpr, kinds: Sequence[_Kind]) -> set[int]:
  """The parameters that a linear program uses where a reference is not known to be right."""
  # By identity: what is not a variable has no hash.
  ids = map(id, jaxpr.invars)
  kind_of = dict(zip(ids, kinds, strict=True))
  unfit: set[int] = set()
  for eqn in jaxpr.eqns:
    # A literal or a constant is not in `kind_of`: None, no tangent.
    operands = [kind_of.get(id(x)) for x in eqn.invars]
    # What is computed from a tangent is a tangent, but of no parameter itself.
    if any(x is not None for x in operands):
      kind_of.update((id(x), _VALUE) for x in eqn.outvars)
      unfit |= _unfit_in(eqn, operands)
  return unfit


def _unfit_in(eqn, operands: list[_Kind]) -> set[int]:
  """The parameters that one equation uses so, whose operands are of these kinds."""
  # The parameters among the operands.
  here = {i for i in operands if i is not None and i != _VALUE}
  name = _versions.primitive_name(eqn)
  inner = _versions.inner_jaxprs(eqn)
  # A plain operation is right, unless it is listed.
  if not inner and name not in _NOT_TO_PASS:
    return set()
  # Of a listed operation all are unfit; and of an inner function of another kind, of which it is
  # not known which operand it gets.
  if name not in _INNER or not here:
    return here
  # A parameter that goes in twice.
  unfit = {i for i in here if operands.count(i) > 1}
  # Then the operands as the inner functions have them.
  if name == "cond":
    # The first chooses the branch, and no branch gets it.
    operands = operands[1:]
  if name == "scan":
    consts, carried = _versions.scan_inputs(eqn)
    shared = operands[:consts]
    rows = operands[consts + carried :]
    for group in (shared, rows):
      # A parameter that goes into a scan after a value.
      if _VALUE in group:
        first_value = group.index(_VALUE)
        unfit |= here.intersection(group[first_value:])
    # The body takes its arguments in this order. What is carried is a value to it.
    operands = [*shared, *[_VALUE] * carried, *rows]
  for part in inner:
    # The operands do not match its arguments, so that nothing is known of them.
    if len(part.invars) != len(operands):
      return here
    unfit |= _unfit(part, operands)
  return unfit
