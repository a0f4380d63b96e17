"""What every training step has, and the loss that one steps by the gradient of."""

from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING, TypeAlias

import jax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.loss import MeshLoss, PlacedLoss
from optax_accum._microbatches import cut
from optax_accum._microbatches.loss import local_loss, LocalLoss
from optax_accum._microbatches.options import Split

if TYPE_CHECKING:
  from optax_accum._check_split.report import SplitReport

Loss: TypeAlias = LocalLoss | MeshLoss
Placed: TypeAlias = LocalLoss | PlacedLoss  # what a call with given shardings steps by


class Step:
  """What every training step of the library has: a loss, compiled programs, and no pickle."""

  loss: Loss  # that it steps by the gradient of
  batch_position: int  # in a call
  updated: tuple[int, ...]  # the arguments of a program that its first results replace
  beside: int  # how many results follow parameters, state and carry
  names: Callable[..., dict[str, Tree]]  # arguments of a program, as messages call them
  check_arguments: Callable[..., None]  # of a program, while it is traced
  trace: Callable[..., jax.stages.Traced]

  def finished(self, run: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled, of the function that takes one step."""
    return run

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function. Arguments may be `jax.ShapeDtypeStruct`."""
    return self.trace(*args, **kwargs).lower()

  @property
  def devices(self) -> list[jax.Device]:
    """Those of its mesh, if any."""
    return [] if self.loss.parallel is None else [*self.loss.parallel.mesh.devices.flat]

  def rows(self, args: Sequence[Any]) -> int | None:
    """The rows of the batch that a call is given, on all devices."""
    if len(args) <= self.batch_position:
      return None
    [axis] = self.loss.local.split.batch_axis
    return cut.batch_rows({1: axis}, {1: args[self.batch_position]})

  def sizes(self, rows: int, uneven: bool) -> list[int]:
    """The sizes of a microbatch of so many rows, on all devices together: see `cut.sizes`."""
    devices = 1
    if (parallel := self.loss.parallel) is not None:
      parallel.check_rows(rows)
      devices = parallel.devices
    fewest = 2 if self.loss.local.noise_scale and devices == 1 else 1
    return [devices * size for size in cut.sizes(rows // devices, uneven, fewest)]

  def _report(self, loss: LocalLoss, args: Args, kwargs: Kwargs, **of_flax: Any) -> "SplitReport":
    """That of `check` on a call of the loss."""
    from optax_accum._check_split.of_step import check_step  # training does without

    return check_step(loss, self.loss.parallel, args, kwargs, **of_flax)

  def __reduce__(self) -> Any:
    raise TypeError(
      f"{self!r} cannot be pickled, because it holds compiled programs and functions: pickle the"
      " parameters and the optimizer state, and make the step anew where they are read."
    )

  def __copy__(self, memo: Any = None) -> Any:
    return self  # as a function is its own copy

  __deepcopy__ = __copy__


def step_loss(
  loss_fn: Any,
  *,
  has_aux: bool = False,
  aux_reduction: Any = None,
  reduction: Any = "mean",
  noise_scale: bool = False,
  mesh: Any = None,
  data_axis: Any = "data",
  reduce_gradients: str = "per_cycle",
  grad_reduction: Any = None,
  concat_axis: int | None = None,
  **split: Any,
) -> Loss:
  """The loss of a step with these options of `make_train_step`, which are checked."""
  _validate.one_of("reduce_gradients", reduce_gradients, ("per_cycle", "per_microbatch"))
  microbatches = Split(default_argnum=1, **split)
  reductions = reduction, grad_reduction, aux_reduction
  local = local_loss(loss_fn, 0, has_aux, *reductions, concat_axis, microbatches, noise_scale)
  if mesh is None:
    return local
  return MeshLoss(local, DataParallel(mesh, data_axis, reduce_gradients == "per_microbatch"))
