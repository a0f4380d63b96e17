"""A loss of an nnx model, as a function of the arrays that the model holds."""

import dataclasses
from typing import Any

from flax import nnx
import jax

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.devices import OverAxis
from optax_accum._arithmetic.trees import Args, Batch, Carry, Params, Tree
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
  """``loss(params, batch, fixed, carry)``, which returns ``(loss, (new_carry, aux))``."""

  fun: LossFn
  has_aux: bool
  graphdef: Any
  changed: frozenset[str]  # the names of the Variables in the carry
  axis: Any  # of the devices, which each draw their own noise

  @property
  def __name__(self) -> str:
    return getattr(self.fun, "__name__", repr(self.fun))

  def __call__(
    self, params: Params, batch: Batch, fixed: Tree, carry: Carry
  ) -> Any:
    if self.axis is not None and across_devices.is_bound(self.axis):
      # `check` has one device. Each of several has noise of its own, as of a carry.
      fixed = OverAxis(self.axis).with_own_noise(fixed)
    states = params, fixed, carry
    model, before, out, after = self._run(states, batch)
    if self.has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
      raise TypeError(
        f"loss_fn returned a {type(out).__name__}; with has_aux=True it must return (loss, aux)."
      )
    self._check_structure(before, after, model)
    changed = {
      name for name, x in after.items() if _ids(x) != _ids(before[name])
    }
    if not changed <= self.changed:
      self._check_changed(
        changed & self._computed(states, batch), params, model
      )
    loss, aux = out if self.has_aux else (out, None)
    return loss, (
      variables.values(nnx.state(model, variables.among(self.changed))),
      aux,
    )

  def _run(self, states: Args, batch: Batch) -> Args:
    """The model, what it held before, what the loss returned, and what the model held then."""
    model = nnx.merge(self.graphdef, *states)
    before = _held(model)
    return model, before, self.fun(model, batch), _held(model)

  def _computed(self, states: Args, batch: Batch) -> set[str]:
    """The names of what the loss computes, and does not only pass through."""
    run = lambda states: self._run(states, batch)[1::2]  # noqa: E731
    program, shapes = jax.make_jaxpr(run, return_shape=True)(states)
    given = [-1 if i is None else i for i in forwarded(program.jaxpr)]
    before, after = jax.tree.unflatten(jax.tree.structure(shapes), given)
    return {
      n
      for n, x in after.items()
      if jax.tree.leaves(x) != jax.tree.leaves(before[n])
    }

  def _check_changed(
    self, changed: set[str], params: Params, model: nnx.Module
  ) -> None:
    """Checks that only the carry changed."""
    if of_params := sorted(changed & variables.named(params).keys()):
      raise ValueError(
        f"loss_fn changed model.{of_params[0]}, which wrt selects: only the optimizer may. Keep it"
        " in a Variable of another type, or change it before the step. (A transform may also return"
        " it unchanged, in a way that the traced program does not show.)"
      )
    held = variables.named(nnx.state(model))
    if lost := sorted(
      name for name in changed if not variables.is_variable(held[name])
    ):
      raise ValueError(
        _LOST.format(f"model.{lost[0]}, an array that is not a Variable")
      )
    if not changed <= self.changed:
      raise ChangedByLossError(*changed)

  def _check_structure(
    self, before: dict[str, Tree], after: dict[str, Tree], model: nnx.Module
  ) -> None:
    """Checks that the loss left all as it was but values of Variables."""
    for name in sorted(before.keys() ^ after.keys()):
      raise ValueError(
        f"loss_fn {'added' if name in after else 'removed'} model.{name}, and all microbatches need"
        " the same model: create Variables when you make the model. Take out what nnx.Module.sow"
        " added, nnx.pop(model, nnx.Intermediate), and return it as aux, with has_aux=True."
      )
    if nnx.graphdef(model) != self.graphdef:
      raise ValueError(
        _LOST.format("an attribute of the model, or the metadata of a Variable")
      )


def _held(model: nnx.Module) -> dict[str, Tree]:
  """What the Variables of a model hold, by name."""
  return {
    name: variables.value(x)
    for name, x in variables.named(nnx.state(model)).items()
  }


def _ids(value: Tree) -> list[int]:
  """The arrays of a value, which may be a tree: the same unless something was computed."""
  return list(map(id, jax.tree.leaves(value)))
