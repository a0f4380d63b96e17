"""In-place accumulation: the backward pass adds gradients to their accumulators, layer by layer."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_accum import _validate, _versions
from optax_accum._arithmetic import across_devices, dtypes, hoisting, reduction_words
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reductions import Reduction
from optax_accum._arithmetic.trees import Args, Leaf, Leaves, Tree
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import in_place_fit
from optax_accum._microbatches.options import Split


class Accumulators:
  """The accumulators of gradients, as references. `reductions` is a prefix tree over them."""

  def __init__(
    self, args: Args, argnums: int | Sequence[int], reductions: Tree, dtype: DTypeLike | None
  ):
    self._positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    self._like_gradients = (lambda trees: trees[0]) if isinstance(argnums, int) else tuple
    for i in self._positions:
      for name, x in _validate.named_leaves(f"argument {i}", args[i]):
        _check_dtype(name, x, dtype)

    zeros = lambda x: jax.new_ref(across_devices.full_like(jax.typeof(x), 0))  # noqa: E731
    refs = self._like_gradients([jax.tree.map(zeros, args[i]) for i in self._positions])
    each = reduction_words.match("grad_reduction", reductions, refs, "gradients")
    self.reductions = jax.tree.map(AddedGradients, each, refs)
    self._refs = jax.tree.leaves(refs)

  def value_and_grad(self, fun: Callable[..., Tree], factor: Weight) -> Callable[..., Tree]:
    """`jax.value_and_grad` of `fun`. It adds gradients times `factor`, and returns empty ones."""

    def added(*args: Tree, **kwargs: Tree) -> Tree:
      params = [args[i] for i in self._positions]
      treedef: Any
      leaves, treedef = jax.tree.flatten(params)

      def of_leaves(*leaves: jax.Array) -> Tree:
        all_args = [*args]
        for i, x in zip(self._positions, treedef.unflatten(leaves), strict=True):
          all_args[i] = x
        return fun(*all_args, **kwargs)

      loss, backward, aux = cast(Any, jax.vjp(of_leaves, *leaves, has_aux=True))
      refs: Leaves = [*self._refs]
      apart = in_place_fit.kept_apart(backward.jaxpr, leaves)
      for i in apart:
        refs[i] = cast(Any, jax).ad.GradValue()  # which has it returned
      grads = backward.with_refs(*refs)(_cotangent(loss, leaves, factor))
      for i in apart:
        self._refs[i][...] += grads[i]
      return (loss, aux), self._like_gradients([jax.tree.map(_empty, tree) for tree in params])

    return added


@dataclasses.dataclass(eq=False, repr=False)
class AddedGradients(Reduction):
  """The sum or mean `of` gradients that the backward pass has added to `ref`."""

  of: Reduction
  ref: Any

  def __repr__(self) -> str:
    return repr(self.of)

  def unhoisted(self, held: Leaf, shapes: hoisting.Shapes) -> Leaf:
    self.ref[...] = hoisting.unhoisted(self.ref[...], shapes)
    return held

  def join(self, held: Leaf, collected: Leaf, tail: Leaf) -> Leaf:
    return jax.freeze(self.ref)

  def across_devices(self, held: Leaf, axis_name: AxisName, counted: bool | jax.Array) -> Leaf:
    return self.of.across_devices(held, axis_name, counted)

  def finish(self, held: Leaf, weight: Weight, dtype: DTypeLike) -> Leaf:
    return self.of.finish(held, weight, dtype)


def check_options(split: Split, grad_reduction: Tree) -> None:
  """Checks what ``in_place`` is given with, and that this JAX can do it."""
  if not split.in_place:
    return
  if split.skip_nonfinite:
    raise ValueError(
      "in_place=True adds a gradient up before it is complete, so skip_nonfinite=True cannot leave"
      " it out any more: use one of the two."
    )
  if grad_reduction is not None:
    raise ValueError(
      "in_place=True combines gradients as losses are combined, and"
      f" grad_reduction={grad_reduction!r} asks for another way: use one of the two."
    )
  if not _versions.ADDS_TO_REFERENCES:
    raise NotImplementedError(
      f"in_place=True needs JAX 0.10 or newer, and this is {jax.__version__}: pass in_place=False."
    )


def _check_dtype(name: str, x: Leaf, requested: DTypeLike | None) -> None:
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


def _cotangent(loss: jax.Array, leaves: Leaves, factor: Weight) -> jax.Array:
  """The factor of the loss, and so of all gradients."""
  widest = max((jnp.finfo(x.dtype).bits for x in leaves), default=0)
  if jnp.finfo(loss.dtype).bits < widest and not (isinstance(factor, float) and factor == 1):
    raise TypeError(
      f"The loss has dtype {loss.dtype}, narrower than the parameters', and in_place=True would"
      " round weights to it: return the loss in the parameters' dtype, or pass in_place=False."
    )
  return jnp.ones_like(loss) * jnp.asarray(factor, loss.dtype)


def _empty(x: jax.Array) -> jax.Array:
  return across_devices.vary_like(jnp.zeros((0,), x.dtype), x)
