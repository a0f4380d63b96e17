"""Gradients that the backward pass adds to their accumulators: no microbatch's whole one exists."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_accum import _validate
from optax_accum._arithmetic import across_devices, dtypes, hoisting, reduction_words
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reductions import Leaf, Reduction
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import fit_for_references


class Accumulators:
  """The accumulators of the gradients by some arguments: references, which a loop closes over.

  `reductions` is a prefix tree over the gradients, as they are to become one.
  """

  def __init__(self, args: Sequence[Any], argnums: Any, reductions: Any, dtype: DTypeLike | None):
    several = isinstance(argnums, (tuple, list))
    self._positions = tuple(argnums) if several else (argnums,)
    self._like_gradients = tuple if several else lambda trees: trees[0]
    for i in self._positions:
      for name, x in _validate.named_leaves(f"argument {i}", args[i]):
        _check_dtype(name, x, dtype)

    zeros = lambda x: jax.new_ref(across_devices.full_like(jax.typeof(x), 0))  # noqa: E731
    self._refs = [jax.tree.map(zeros, args[i]) for i in self._positions]
    refs = self._like_gradients(self._refs)
    each = reduction_words.match("grad_reduction", reductions, refs, "gradients")
    self.reductions = jax.tree.map(AddedGradients, each, refs)

  def value_and_grad(self, fun: Callable[..., Any], factor: Weight) -> Callable[..., Any]:
    """`jax.value_and_grad` of `fun`, which has aux; but the gradients, times `factor`, are added.

    `fun` runs more than once. In their place it returns empty arrays of their dtypes.
    """

    def added(*args: Any, **kwargs: Any) -> Any:
      def of_differentiated(*new: Any) -> Any:
        all_args = list(args)
        for i, x in zip(self._positions, new, strict=True):
          all_args[i] = x
        return fun(*all_args, **kwargs)

      params = [args[i] for i in self._positions]
      treedef: Any
      leaves, treedef = jax.tree.flatten(params)
      of_leaves = lambda *leaves: of_differentiated(*treedef.unflatten(leaves))  # noqa: E731
      run = fit_for_references.copying(of_leaves, fit_for_references.kept_apart(of_leaves, leaves))
      loss, backward, aux = cast(Any, jax.vjp(run, *leaves, has_aux=True))
      backward.with_refs(*jax.tree.leaves(self._refs))(_cotangent(loss, leaves, factor))
      return (loss, aux), self._like_gradients([jax.tree.map(_empty, tree) for tree in params])

    return added


@dataclasses.dataclass(eq=False, repr=False)
class AddedGradients(Reduction):
  """The sum or mean `of` gradients that the backward pass has added to `ref`."""

  of: Reduction
  ref: Any

  def __repr__(self) -> str:
    return repr(self.of)

  def start(self, leaf: Leaf, dtype: DTypeLike | None) -> Any:
    return None

  def unhoisted(self, held: Any, shapes: hoisting.Shapes) -> Any:
    self.ref[...] = hoisting.unhoisted(self.ref[...], shapes)

  def check_tail(self, name: str, leaf: Leaf, tail: Leaf) -> None:
    """Its gradients are of the same parameters."""

  def join(self, held: Any, collected: Any, tail: Any) -> Any:
    return jax.freeze(self.ref)

  def across_devices(self, held: Any, axis_name: AxisName, counted: bool | jax.Array) -> Any:
    return self.of.across_devices(held, axis_name, counted)

  def finish(self, held: Any, weight: Weight, dtype: DTypeLike) -> Any:
    return self.of.finish(held, weight, dtype)

  def only(self, value: jax.Array) -> jax.Array:
    return self.of.only(value)


def check_options(split: Any, grad_reduction: Any) -> None:
  """Checks what ``in_place`` is given with."""
  if not split.in_place:
    return
  without = "Pass in_place=False, or leave"
  if split.skip_nonfinite:
    raise ValueError(
      "in_place=True adds a gradient up before all of it is known, so skip_nonfinite=True cannot"
      f" leave it out. {without} skip_nonfinite out."
    )
  if grad_reduction is not None:
    raise ValueError(
      f"in_place=True adds gradients up as the losses are, and grad_reduction={grad_reduction!r}"
      f" asks for more. {without} grad_reduction out."
    )
  fit_for_references.check_supported()


def _check_dtype(name: str, x: Any, requested: DTypeLike | None) -> None:
  """Checks that a parameter's gradients are added up in their own dtype."""
  dtype = jnp.result_type(x)
  wide = dtypes.accumulator_dtype(dtype, requested)
  if wide == dtype:
    return
  fix = (
    f"Keep parameters in {wide} and cast them in the loss (in the body of a scan over layers)"
    if requested is None
    else f"Leave accumulator_dtype={jnp.dtype(requested).name} out"
  )
  raise TypeError(
    f"{name} has dtype {dtype}, and its gradients would be added up in {wide}; in_place=True adds"
    f" them as they come out of the backward pass. {fix}, or pass in_place=False."
  )


def _cotangent(loss: jax.Array, leaves: list[jax.Array], factor: Weight) -> jax.Array:
  """What the loss is multiplied by, so that all gradients are."""
  widest = max((jnp.finfo(x.dtype).bits for x in leaves), default=0)
  if jnp.finfo(loss.dtype).bits < widest and not (isinstance(factor, float) and factor == 1):
    raise TypeError(
      f"The loss has dtype {loss.dtype}, narrower than parameters, and in_place=True weighs"
      " gradients by weighing the loss, which would round the weight: return the loss in the"
      " parameters' dtype, or pass in_place=False."
    )
  one = jnp.ones_like(loss)
  return one * (factor.astype(loss.dtype) if isinstance(factor, jax.Array) else factor)


def _empty(x: jax.Array) -> jax.Array:
  return across_devices.vary_like(jnp.zeros((0,), x.dtype), x)
