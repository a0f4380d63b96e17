"""What every training step has, and its program: N backward passes and one optimizer step."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate
from optax_accum._arithmetic.trees import (
  Args,
  Kwargs,
  Leaves,
  OptState,
  Params,
  Tree,
)
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.loss import LossWithoutMesh, MeshLoss, PlacedLoss
from optax_accum._mesh.placement import out_shardings, sharding_of
from optax_accum._mesh.refused import explained, LOWERED
from optax_accum._microbatches import cut
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.noise_scale import noise_terms, squared_norm
from optax_accum._microbatches.options import Split
from optax_accum._streaming.cycle import ValueOfOneCall
from optax_accum._train_step.donation import (
  arrays,
  check_alive,
  distinct,
  Known,
)
from optax_accum._train_step.optimizer_step import OptimizerStep
from optax_accum._train_step.value_fn import loss_elsewhere

if TYPE_CHECKING:
  from optax_accum._check_split.report import SplitReport

Loss: TypeAlias = LossWithoutMesh | MeshLoss
Placed: TypeAlias = (
  LossWithoutMesh | PlacedLoss
)  # what a call with given shardings steps by


class Step:
  """What every training step of the library has: a loss, compiled programs, and no pickle."""

  loss: Loss  # that it steps by the gradient of
  batch_position: int  # in a call
  updated: tuple[
    int, ...
  ]  # the arguments of a program that its first results replace
  further_results: int  # how many results follow parameters, state and carry
  _names: Callable[
    ..., dict[str, Tree]
  ]  # arguments of a program, as messages call them
  _check_arguments: Callable[..., None]  # of a program, while it is traced

  def _finished(self, run: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled, of the function that takes one step."""
    return run

  @property
  def devices(self) -> list[jax.Device]:
    """Those of its mesh, if any."""
    return (
      []
      if self.loss.parallel is None
      else [*self.loss.parallel.mesh.devices.flat]
    )

  def rows(self, args: Sequence[Any]) -> int | None:
    """The rows of the batch that a call is given, on all devices."""
    if len(args) <= self.batch_position:
      return None
    split = self.loss.local.split
    return cut.batch_rows(
      split, {1: split.batch_axis[0]}, {1: args[self.batch_position]}
    )

  def sizes(self, rows: int, uneven: bool) -> list[int]:
    """The sizes of a microbatch of so many rows, on all devices together: see `cut.sizes`."""
    devices = 1
    if (parallel := self.loss.parallel) is not None:
      parallel.check_rows(rows)
      devices = parallel.devices
    fewest = 2 if self.loss.local.noise_scale and devices == 1 else 1
    return [
      devices * size for size in cut.sizes(rows // devices, uneven, fewest)
    ]

  def _report(
    self, call: "PreparedCall", args: Args, **of_flax: Any
  ) -> "SplitReport":
    """That of `check` on a call, with such positional arguments of the loss."""
    from optax_accum._check_split.check_split import (
      check_step,
    )  # training does without

    return check_step(
      call.loss.beside(*call.args[:2]), args, call.kwargs, **of_flax
    )

  def __reduce__(self) -> Any:
    raise TypeError(
      f"{self!r} cannot be pickled, because it holds compiled programs and functions: pickle the"
      " parameters and the optimizer state, and make the step anew where they are read."
    )

  def __copy__(self, memo: Any = None) -> Any:
    return self  # as a function is its own copy

  __deepcopy__ = __copy__


class PreparedCall(NamedTuple):
  """What a call runs: a jitted function, and the arguments as it takes them."""

  program: "StepProgram"
  loss: Placed
  jitted: Any
  args: Args
  kwargs: Kwargs
  others: Leaves  # the arrays of what is not updated, as they were passed


@dataclasses.dataclass(eq=False, repr=False)
class StepProgram:
  """A step of `tx` with the gradient of a loss, compiled for each sharding of its arguments.

  It takes the parameters, the optimizer state, and the other arguments of the loss. It returns new
  ones of the first two, the carry if there is one, and the metrics.
  """

  step: Step  # whose program it is
  loss: Loss
  tx: optax.GradientTransformationExtraArgs
  donate: bool  # whether what is updated is donated

  def __post_init__(self) -> None:
    self.local = self.loss.local
    self._jitted: dict[tuple[Placed, Any], Any] = {}
    self._returned, self._passed = Known([]), Known([])  # in the last call

  def prepare(
    self, args: Args, kwargs: Kwargs, kept: Tree = ()
  ) -> PreparedCall:
    """Checks and places the arguments, and copies those donated twice or still needed (`kept`)."""
    held = arrays(self._updated_of(args))
    others = arrays(
      (
        [x for i, x in enumerate(args) if i not in self.step.updated],
        kwargs,
        kept,
      )
    )
    check_alive([*held, *others], lambda: self.step._names(*args, **kwargs))
    loss, placed, named = self.loss.place(args, kwargs)
    if self.donate:
      new = [*self._returned.new(held), *self._passed.new(others)]
      there = self._updated_of(placed)
      once = distinct(
        there, held if placed is args else arrays(there), others, new
      )
      if once is not there:
        copied = dict(zip(self.step.updated, once, strict=True))
        placed = tuple(copied.get(i, x) for i, x in enumerate(placed))
    key = (
      loss,
      None if loss.parallel else _shardings(self._updated_of(placed), held),
    )
    if key not in self._jitted:
      self._jitted[key] = self._compiled(*key)
    return PreparedCall(self, loss, self._jitted[key], placed, named, others)

  def run(self, call: PreparedCall) -> tuple[Any, ...]:
    """One step."""
    with explained(LOWERED, self.loss.parallel):
      out = call.jitted(*call.args, **call.kwargs)
    if self.donate:
      updated = out[: len(self.step.updated)]
      self._returned, self._passed = Known(arrays(updated)), Known(call.others)
    return out

  def _updated_of(self, args: Args) -> Args:
    return tuple(args[i] for i in self.step.updated)

  def _compiled(self, loss: Placed, kept: Any) -> Any:
    """The jitted function for a loss, and for the shardings that results keep without a mesh."""
    known = loss.out_shardings or (kept and kept[0].unflatten(kept[1]))
    results = (
      2
      + (self.local.split.carry_argnum is not None)
      + self.step.further_results
    )
    shardings = (*known, *[None] * (results - len(known))) if known else None
    donated = self.step.updated if self.donate else ()
    run = self.step._finished(self.function(loss))
    return jax.jit(run, donate_argnums=donated, out_shardings=shardings)

  def function(self, loss: Placed) -> Callable[..., Any]:
    """One step of `tx` by the gradient of `loss`."""
    local = self.local

    def train_step(
      params: Params, opt_state: OptState, /, *args: Any, **kwargs: Any
    ) -> Args:
      self.step._check_arguments(params, opt_state, *args, **kwargs)
      beside = loss.beside(params, opt_state)
      reduced = beside.value_and_grad(None, params, *args, **kwargs)
      out, stats = reduced.outputs, reduced.stats
      weight, counted = stats.total_weight, stats.total_weight != 0
      if local.reduction.name != "mean":  # a sum is not to be weighed again
        weight = counted.astype(weight.dtype) if local.split.weighs else 1.0
      value_fn = ValueOfOneCall(
        loss_elsewhere, beside, out.weights, args, kwargs
      )
      extra_args = {
        "value": out.loss,
        "grad": out.grads,
        "value_fn": value_fn,
        "weight": weight,
      }

      with jax.named_scope("optimizer"):
        moves = counted if local.split.weighs else True
        update = OptimizerStep(self.tx, out.grads, extra_args, moves)
        params, (opt_state, stepped) = beside.step_beside(
          update, params, opt_state
        )
      of_mean = squared_norm(local.derivatives(out.grads))
      metrics = {
        "loss": out.loss,
        "grad_norm": jnp.sqrt(of_mean),
        **stats._asdict(),
      }
      metrics["stepped"] = stepped
      if local.noise_scale:
        metrics["noise_scale"] = noise_terms(
          out.noise, of_mean, stats.total_weight
        )
      if local.has_aux or reduced.carry:
        metrics["aux"] = out.aux
      return params, opt_state, *reduced.carry, metrics

    return train_step


def _shardings(updated: Args, held: Leaves) -> Any:
  """Those of the leaves of what is updated, with their tree; None where none is on a mesh."""
  if held and isinstance(held[0].sharding, jax.sharding.SingleDeviceSharding):
    return None  # asking each array would take longer
  leaves, treedef = jax.tree.flatten(updated)
  known = out_shardings(map(sharding_of, leaves))
  return (treedef, known) if any(known) else None


def step_loss(
  loss_fn: Any,
  *,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  reduce_gradients: str = "per_cycle",
  **options: Any,
) -> Loss:
  """The loss of a step with these options of `make_train_step`, which are checked."""
  _validate.one_of(
    "reduce_gradients", reduce_gradients, ("per_cycle", "per_microbatch")
  )
  asked: dict[str, Any] = {
    "reduction": "mean",
    "has_aux": False,
    "noise_scale": False,
  }
  asked |= dict.fromkeys(("grad_reduction", "aux_reduction")) | options
  split = Split.of(options, default_argnum=1)
  local = LocalLoss.of(
    loss_fn, 0, asked["has_aux"], split, asked, asked["noise_scale"]
  )
  if mesh is None:
    return LossWithoutMesh(local)
  return MeshLoss(
    local,
    DataParallel.of(mesh, data_axis, reduce_gradients == "per_microbatch"),
  )
