"""The loss function of a user: it is called on one microbatch, and what it returns is checked."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arithmetic import weighted_mean
from optax_accum._arithmetic.reductions import refusing_derivatives
from optax_accum._arithmetic.trees import Leaf, Tree
from optax_accum._microbatches.cut import batch_rows
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.roles import Arguments, by_slot, RolesOf


@dataclasses.dataclass(frozen=True, eq=False)
class LossFunction:
  """``fun`` as a function that returns ``(loss, (weight, new_carry, aux))``, whatever it returns.

  The loss is a total if `fun` returns a weight too, and the weight is None otherwise.
  """

  fun: Callable[..., Tree]
  split: Split
  roles_of: RolesOf
  has_aux: bool

  @property
  def carries(self) -> bool:
    """Whether it takes a carry, and returns a new one."""
    return self.split.carry_argnum is not None

  def __call__(self, /, *args, **kwargs) -> tuple[Leaf, Tree]:
    """The loss of one microbatch, its weight, its new carry and its aux."""
    try:
      out = self.fun(*args, **kwargs)
    except (TypeError, ValueError) as error:
      for note in self._notes_on(error, args, kwargs):
        error.add_note(note)
      raise
    loss = out
    weight: Any = None
    carry = None
    aux = None
    if self.has_aux or self.carries:
      wanted = "has_aux=True it must return (loss, aux)"
      if self.carries:
        wanted = "carry_argnum it must return (loss, (new_carry, aux))"
      loss, aux = _pair(out, out, wanted)
      if self.carries:
        carry, aux = _pair(aux, out, wanted)
    if self.split.has_weight:
      wanted = (
        "has_weight=True it must return (total, weight) in the place of the loss, as in"
        " ((total, weight), aux) with has_aux"
      )
      loss, weight = _pair(loss, loss, wanted)
    check_loss(loss, self.split.has_weight)
    if self.split.has_weight:
      weighted_mean.check_weight("The loss", weight)
      weight = _without_derivative(weighted_mean.as_weight(weight))
    return loss, (weight, carry, aux)

  def _notes_on(self, error: Exception, args, kwargs) -> list[str]:
    """What an error in the function may come from."""
    notes: list[str] = []
    arguments = by_slot(args, kwargs)
    roles = self.roles_of(args, kwargs)
    if isinstance(error, jax.errors.JAXTypeError):
      # Python asked for the value of an argument that is traced.
      scalars = [slot for slot in roles.shared if _has_scalar(arguments, slot)]
      names = map(self.roles_of.signature.name, scalars)
      fixed = ", ".join(f"{name}=..." for name in names)
      if fixed:
        notes.append(
          "A step traces all its arguments, so Python cannot branch on them, nor can they be"
          " static. Fix a setting in the loss, functools.partial(loss_fn,"
          f" {fixed}), and make a step for each value."
        )
    if "shape" in str(error):
      rows = batch_rows(self.split, roles.batch, arguments)
      notes.append(
        f"The loss was given {rows} rows, a microbatch on one device."
      )
    return notes


def _has_scalar(arguments: Arguments, slot: int | str) -> bool:
  leaves = jax.tree.leaves(arguments[slot])
  return any(getattr(x, "shape", ()) == () for x in leaves)


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
