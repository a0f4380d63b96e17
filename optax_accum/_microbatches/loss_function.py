"""The loss function of a user: it is called on one microbatch, and what it returns is checked."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arithmetic import dtypes, weighted_mean
from optax_accum._arithmetic.reductions import refusing_derivatives
from optax_accum._arithmetic.trees import Leaf, Tree
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches.carry import changed
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import by_slot, RolesOf


@dataclasses.dataclass(frozen=True, eq=False)
class LossFunction:
  """``fun`` as a function that returns ``(loss, (weight, new_carry, aux))``, whatever it returns.

  In the new carry None stands for what `fun` hands back as it came: `carry` says why.
  The loss is a total if `fun` returns a weight too, and the weight is None otherwise.
  """

  fun: Callable[..., Tree]
  split: Split
  roles_of: RolesOf
  has_aux: bool
  is_mean: bool  # or a sum

  def __call__(self, /, *args, **kwargs) -> tuple[Leaf, Tree]:
    """The loss of one microbatch, its weight, its new carry and its aux."""
    # The first is the loss times its weight, which nobody needs here.
    _, (loss, *others) = self.weighed(1.0, *args, **kwargs)
    return loss, tuple(others)

  def weighed(self, weight: Any, /, *args, **kwargs) -> tuple[Leaf, Tree]:
    """The loss times its weight, to be differentiated, and ``(loss, weight, new_carry, aux)``.

    Here and nowhere else a weight enters. It is None where `fun` tells it.
    """
    # There is one carry or none. This is as it was before `fun`, which may write into it.
    carried = self.roles_of(args, kwargs).carry
    carries = [by_slot(args, kwargs)[slot] for slot in carried]
    start = jax.tree.map(lambda x: x, carries)
    # Other dicts and lists are its own too. Objects that it must not change raise by themselves.
    own_args, own_kwargs = jax.tree.map(
      lambda x: x,
      (args, kwargs),
      is_leaf=lambda x: not isinstance(x, dict | list | tuple),
    )
    try:
      out = self.fun(*own_args, **own_kwargs)
    except jax.errors.JAXTypeError as error:
      self._add_note(error, args, kwargs)
      raise
    loss = out
    own_weight: Any = None
    carry = None
    aux = None
    if self.has_aux or carried:
      wanted = "has_aux=True it must return (loss, aux)"
      if carried:
        wanted = "carry_argnum it must return (loss, (new_carry, aux))"
      # With a carry the second is a pair itself, which the next pair takes apart.
      loss, aux = _pair(out, out, wanted)
      if carried:
        carry, aux = _pair(aux, out, wanted)
        carry = changed(self.split.name(*carried), start[0], carry)
    if self.split.has_weight:
      wanted = (
        "has_weight=True it must return (total, weight) in the place of the loss, as in"
        " ((total, weight), aux) with has_aux"
      )
      loss, own_weight = _pair(loss, loss, wanted)
    check_loss(loss, self.split.has_weight)
    # A loss that the user reduced over devices counts as the loss of each of them.
    loss = self.split.devices.varying(loss)
    if self.split.has_weight:
      weighted_mean.check_weight("The loss", own_weight)
      dtypes.check_wide("The weight of the loss", own_weight)
      own_weight = weighted_mean.as_weight(own_weight)
      # Raises if the weight depends on what is differentiated.
      own_weight = _without_derivative(own_weight)
      weight = own_weight
    if self.split.has_weight or not self.is_mean:
      # A total was weighed by the user, and a sum has no weight: the factor is 1, or 0 for what
      # does not count.
      weight = weighted_mean.counts(weight)
    return _times(loss, weight), (loss, own_weight, carry, aux)

  def _add_note(self, error: Exception, args, kwargs) -> None:
    """Says what to write where Python asked for the value of a traced setting: ``if train:``."""
    arguments = by_slot(args, kwargs)
    shared = self.roles_of(args, kwargs).shared

    # A setting such as `train` is a scalar in an argument that all microbatches share.
    def has_scalar(slot):
      shapes = map(jnp.shape, jax.tree.leaves(arguments[slot]))
      return () in shapes

    settings = filter(has_scalar, shared)
    names = map(self.roles_of.signature.name, settings)
    fixed = ", ".join(f"{name}=..." for name in names)
    if fixed:
      error.add_note(
        "A step traces all its arguments, so Python cannot branch on them, nor can they be static."
        f" Fix a setting in the loss, functools.partial(loss_fn, {fixed}), and make a step for each"
        " value."
      )


def _times(loss: jax.Array, weight: Weight) -> jax.Array:
  """The loss times its weight, as it is differentiated. Where that is known to be 1, the loss."""
  dtype = jnp.result_type(loss)
  if isinstance(weight, jax.Array):
    # This weight is known only when the program runs, and a narrow dtype may round it.
    dtypes.check_wide("The loss", loss)
  elif weight == 1:
    return loss
  elif np.asarray(weight).astype(dtype) != weight:
    # The dtype of the loss would round the weight, as bfloat16 does 257 rows.
    dtypes.check_wide("The loss", loss)
  return loss * jnp.asarray(weight, dtype)


def _pair(x, returned, wanted: str):
  """`x`, checked to be a pair, of what a function returned."""
  if isinstance(x, (tuple, list)) and len(x) == 2:
    return x
  kind = _container(returned) or "single value"
  raise TypeError(f"The function returned a {kind}; with {wanted}.")


def check_loss(out, is_total: bool) -> None:
  """Checks the loss, or the total, that a function returned."""
  # A mean in the place of a total would be divided by its weight a second time.
  how = "take the mean or sum over the rows"
  if is_total:
    how = "with has_weight=True, sum over the rows, and take no mean"
  # What is wrong with the loss; "" if nothing is.
  got = ""
  if _container(out):
    got = f"is a {_container(out)}"
  elif jnp.shape(out) or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
    got = f"has shape {jnp.shape(out)} and dtype {jnp.result_type(out)}"
  if got:
    raise TypeError(
      f"The loss {got}; it must be a real scalar: {how}, in a floating"
      " dtype. If the rest is auxiliary, return (loss, aux) and pass has_aux=True;"
      " if it is how much the rows count, return (total, weight), in this order, with"
      " has_weight=True; if it is jax.value_and_grad of a loss, give that loss itself."
    )


def _container(x) -> str:
  """The type of what is no number, or ""."""
  if x is None or isinstance(x, (tuple, list, dict)):
    return type(x).__name__
  return ""


_without_derivative = refusing_derivatives(
  TypeError,
  "The weight that the loss returns depends on what is differentiated: return (total, weight) in"
  " this order, or, if it is the weight, jax.lax.stop_gradient of it.",
)
