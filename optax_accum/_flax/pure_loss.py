"""A loss of an nnx model, as a function of the arrays that the model holds."""

from collections.abc import Callable
import dataclasses
import operator
from typing import Any

from flax import nnx
import jax

from optax_accum._flax import graph
from optax_accum._flax.forwarded import forwarded
from optax_accum._microbatches import keys_and_carry


class ChangedByLossError(Exception):
  """The loss changed Variables that are not threaded yet. `NnxTrainStep` then threads them."""

  def __init__(self, names: frozenset[str]):
    super().__init__(names)
    self.names = names


@dataclasses.dataclass(frozen=True, eq=False)
class PureLoss:
  """``loss(params, batch, fixed, carry)``, of a loss that is called with a model."""

  fun: Callable[..., Any]
  has_aux: bool
  graphdef: Any
  changed: frozenset[str]  # the names of the Variables in the carry
  axis: Any  # of the devices, each of which draws its own noise

  @property
  def __name__(self) -> str:
    return getattr(self.fun, "__name__", repr(self.fun))

  def __call__(self, params: Any, batch: Any, fixed: Any, carry: Any = None) -> Any:
    """The loss; with a carry ``(loss, (new_carry, aux))``."""
    fixed = keys_and_carry.on_device(fixed, self.axis)  # and so with noise of its own, as a carry
    states = params, fixed, *([] if carry is None else [carry])
    model = nnx.merge(self.graphdef, *states)
    before = _held(model)
    out = self.fun(model, batch)
    if self.has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
      raise TypeError(
        f"loss_fn returned a {type(out).__name__}; with has_aux=True it must return (loss, aux)."
      )
    after = _held(model)
    self._check_structure(before, after, model, states)
    changed = {name for name, x in after.items() if not _is_same(x, before[name])}
    if not changed <= self.changed:
      self._check_changed(changed & self._computed(states, batch), params, model)
    if carry is None:
      return out
    loss, aux = out if self.has_aux else (out, None)
    return loss, (graph.values(graph.partition(nnx.state(model), self.changed)[0]), aux)

  def _computed(self, states: Any, batch: Any) -> set[str]:
    """The names of what the loss computes anew, and does not only give back."""
    inputs: list[list[int | None]] = []
    names: list[str] = []

    def run(states: Any) -> Any:
      model = nnx.merge(self.graphdef, *states)
      positions = {id(x): i for i, x in enumerate(jax.tree.leaves(states))}
      before = _held(model)
      self.fun(model, batch)
      after = _held(model)
      names[:] = [name for name, x in after.items() for _ in jax.tree.leaves(x)]
      inputs[:] = [[positions.get(id(x)) for x in jax.tree.leaves(before[name])] for name in after]
      return after

    program = jax.make_jaxpr(run)(states).jaxpr
    given = [i for each in inputs for i in each]
    if len(given) != len(names):
      return set(names)
    found = zip(names, given, forwarded(program), strict=True)
    return {name for name, i, j in found if i is None or i != j}

  def _check_changed(self, changed: set[str], params: Any, model: Any) -> None:
    """Checks that only what is threaded changed."""
    if of_params := sorted(changed & graph.named(params).keys()):
      raise ValueError(
        f"loss_fn changed model.{of_params[0]}, which wrt selects: only the optimizer may. Keep it"
        " in a Variable of another type, or change it before the step. (A transform that gives it"
        " back as it was, in a way that the program does not show, is taken for a change.)"
      )
    arrays = {n for n, x in graph.named(nnx.state(model)).items() if not graph.is_variable(x)}
    if lost := sorted(changed & arrays):
      raise ValueError(
        f"loss_fn changed model.{lost[0]}, an array that is no Variable, so the change would be"
        " lost: keep it in an nnx.Variable."
      )
    if not changed <= self.changed:
      raise ChangedByLossError(frozenset(changed))

  def _check_structure(self, before: Any, after: Any, model: Any, states: Any) -> None:
    """Checks that the loss left all as it was but values of Variables."""
    if added := sorted(after.keys() - before.keys()):
      raise ValueError(
        f"loss_fn added model.{added[0]}, which the next microbatch would not have: make it with"
        " the model. What nnx.Module.sow added, take out and return as aux:"
        " nnx.pop(model, nnx.Intermediate), with has_aux=True."
      )
    if removed := sorted(before.keys() - after.keys()):
      raise ValueError(f"loss_fn removed model.{removed[0]}, which the next microbatch needs.")
    if nnx.graphdef(model) == self.graphdef:
      return
    old, new = (_attributes(x) for x in (nnx.merge(self.graphdef, *states), model))
    differ = [name for name in {**old, **new} if name not in old or old[name] != new.get(name)]
    which = f"model.{differ[0]}" if differ else "the metadata of a Variable"
    raise ValueError(
      f"loss_fn changed {which}, which is no Variable, so the change would be lost: keep numbers"
      " that change in an nnx.Variable."
    )


def _attributes(model: Any) -> dict[str, Any]:
  """What a model has beside arrays, by name."""
  found = {graph.name(path): x for path, x in nnx.iter_graph(model) if not hasattr(x, "shape")}
  return {name: x for name, x in found.items() if not _is_node(x) and "_pytree__" not in name}


def _is_node(x: Any) -> bool:
  return not jax.tree_util.all_leaves([x])


def _held(model: Any) -> dict[str, Any]:
  """What the Variables of a model hold, by name."""
  return {name: graph.value(x) for name, x in graph.named(nnx.state(model)).items()}


def _is_same(a: Any, b: Any) -> bool:
  """Whether nothing was computed: a value may be a tree of arrays."""
  x, y = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(x) == len(y) and all(map(operator.is_, x, y))
