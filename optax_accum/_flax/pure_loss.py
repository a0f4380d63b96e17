"""A loss of an nnx model, as a function of the arrays that the model holds."""

import dataclasses
from typing import Any

from flax import nnx
import jax

from optax_accum._flax import variables
from optax_accum._flax.flax_step import LossFn
from optax_accum._flax.forwarded import forwarded

_LOST = (
  "loss_fn changed {}, so the change would be lost: keep numbers that change in"
  " an nnx.Variable."
)


class ChangedByLossError(Exception):
  """The loss changed the Variables of these names. `NnxTrainStep` then carries them."""


@dataclasses.dataclass(frozen=True, eq=False)
class PureLoss:
  """``loss(params, batch, fixed, carry, rngs)``, which returns ``(loss, (new_carry, aux))``."""

  fun: LossFn
  has_aux: bool
  graphdef: Any
  changed: frozenset[str]  # the names of the Variables in the carry

  def __call__(self, params, batch, fixed, carry, rngs: None, further):
    def loss_of(model):
      return self.fun(model, batch, *further.args, **further.kwargs)

    states = params, fixed, carry
    model, before, loss, after = self._run(states, loss_of)
    aux = None
    if self.has_aux:
      if not isinstance(loss, (tuple, list)) or len(loss) != 2:
        raise TypeError(
          f"loss_fn returned a {type(loss).__name__}; with has_aux=True it must return (loss, aux)."
        )
      loss, aux = loss
    self._check_structure(before, after, model)
    changed = _changed(before, after)
    if not changed <= self.changed:
      # A transform of nnx makes new arrays of what it passes through. The traced program tells.
      changed &= self._computed(states, loss_of)
      self._check_changed(changed, params, model)
    carried = nnx.state(model, variables.among(self.changed))
    return loss, (variables.values(carried), aux)

  def _run(self, states, loss_of):
    """The model, its arrays before, what the loss returned, and the arrays after."""
    model = nnx.merge(self.graphdef, *states)
    before = _arrays(model)
    loss = loss_of(model)
    return model, before, loss, _arrays(model)

  def _computed(self, states, loss_of) -> set[str]:
    """The names of what the loss computes, and does not only pass through."""

    def run(states):
      _, before, _, after = self._run(states, loss_of)
      return before, after

    program, shapes = jax.make_jaxpr(run, return_shape=True)(states)
    # In the place of each array: which argument of the program it is, if it is one.
    results = forwarded(program.jaxpr)
    before, after = jax.tree.unflatten(jax.tree.structure(shapes), results)
    return _changed(before, after)

  def _check_changed(
    self, changed: set[str], params, model: nnx.Module
  ) -> None:
    """Checks that only the carry changed."""
    for name in sorted(changed & variables.named(params).keys()):
      raise ValueError(
        f"loss_fn changed model.{name}, which wrt selects: only the optimizer may. Keep it in a"
        " Variable of another type, or change it before the step. (A transform may also return it"
        " unchanged, in a way that the traced program does not show.)"
      )
    named = variables.named(nnx.state(model))
    for name in sorted(changed):
      if not variables.is_variable(named[name]):
        lost = f"model.{name}, an array that is not a Variable"
        raise ValueError(_LOST.format(lost))
    if not changed <= self.changed:
      raise ChangedByLossError(*changed)

  def _check_structure(self, before, after, model: nnx.Module) -> None:
    """Checks that the loss left all as it was but values of Variables."""
    for name in sorted(before.keys() ^ after.keys()):
      did = "added" if name in after else "removed"
      raise ValueError(
        f"loss_fn {did} model.{name}, and all microbatches need the same model: create Variables"
        " when you make the model. Take out what nnx.Module.sow added,"
        " nnx.pop(model, nnx.Intermediate), and return it as aux, with has_aux=True."
      )
    if nnx.graphdef(model) != self.graphdef:
      raise ValueError(
        _LOST.format("an attribute of the model, or the metadata of a Variable")
      )


def _arrays(model: nnx.Module):
  """The arrays of the Variables of a model, by name."""
  named = variables.named(nnx.state(model)).items()
  return {name: jax.tree.leaves(variables.value(x)) for name, x in named}


def _changed(before, after) -> set[str]:
  """The names of what has other arrays than before, as where something was computed."""

  def ids(arrays):
    return {(name, *map(id, leaves)) for name, leaves in arrays.items()}

  return {name for name, *_ in ids(after) - ids(before)}
