"""What every training step has, and its program: N backward passes and one optimizer step."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate
from optax_accum._arithmetic import in_order
from optax_accum._arithmetic.trees import Args, Kwargs, Leaves, Tree
from optax_accum._mesh import virtual
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.loss import Loss, LossWithoutMesh, MeshLoss, Placed
from optax_accum._mesh.placement import out_shardings, sharding_of
from optax_accum._mesh.refused import explained, LOWERED
from optax_accum._microbatches import cut
from optax_accum._microbatches.loop import Reduced
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.noise_scale import noise_terms, squared_norm
from optax_accum._microbatches.options import Split
from optax_accum._streaming.calls import ValueOfOneCall
from optax_accum._train_step import donation
from optax_accum._train_step.optimizer_step import OptimizerStep
from optax_accum._train_step.value_fn import loss_elsewhere

Function: TypeAlias = Callable[..., Args]


class Step:
  """What every training step of the library has: a loss of rows on devices, and no pickle."""

  loss: Loss  # that it steps by the gradient of
  batch_position = 2  # in a call

  @property
  def devices(self) -> list[jax.Device]:
    """Those of its mesh, if any."""
    parallel = self.loss.parallel
    if parallel is None:
      return []
    return list(parallel.mesh.devices.flat)

  def rows(self, args: Sequence[Any]) -> int | None:
    """The rows of the batch that a call is given, on all devices."""
    if len(args) <= self.batch_position:
      return None
    local = self.loss.local
    given = self._of_loss(args)
    axes = local.roles_of(given, {}).batch
    return cut.batch_rows(local.split, axes, dict(enumerate(given)))

  def _of_loss(self, args: Sequence[Any]):
    """The arguments of the loss that are in a call."""
    params, _, *others = args
    return params, *others

  def sizes(self, rows: int, uneven: bool) -> list[int]:
    """The sizes of a microbatch of so many rows, on all devices together: see `cut.sizes`."""
    parallel = self.loss.parallel
    devices = fewest = 1
    if parallel is not None:
      parallel.check_rows(rows)
      devices = parallel.devices
    if "noise_scale" in self.loss.local.metrics.funs and devices == 1:
      fewest = 2
    count = self.loss.local.split.virtual_devices
    if count is not None:
      devices = count
      uneven = False
    sizes = cut.sizes(rows // devices, uneven, fewest)
    return [devices * size for size in sizes]

  def __reduce__(self):
    raise TypeError(
      f"{self!r} cannot be pickled, because it holds compiled programs and functions: pickle the"
      " parameters and the optimizer state, and make the step anew where they are read."
    )

  def __copy__(self, memo=None):
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

  def run(self):
    """Takes one step."""
    with explained(LOWERED, self.loss.parallel):
      out = self.jitted(*self.args, **self.kwargs)
    self.program.remember(out, self.others)
    return out

  def trace(self) -> jax.stages.Traced:
    """The program, traced."""
    return self.jitted.trace(*self.args, **self.kwargs)

  def eval_shape(self):
    """Shapes and dtypes of what `run` returns."""
    return self.jitted.eval_shape(*self.args, **self.kwargs)

  def check(self, args):
    """The report of `check` on the loss, with such positional arguments."""
    # Training does without.
    from optax_accum._check_split.step_check import check_step

    params, opt_state, *_ = self.args
    loss = self.loss.beside(params, opt_state)
    return check_step(loss, args, self.kwargs)


@dataclasses.dataclass(eq=False, repr=False)
class StepProgram:
  """A step of `tx` with the gradient of a loss, compiled for each sharding of its arguments.

  It takes the parameters, the optimizer state, and the other arguments of the loss. It returns new
  ones of the first two, the carry if there is one, and the metrics.
  """

  loss: Loss
  tx: optax.GradientTransformationExtraArgs
  donate: bool  # whether what is updated is donated
  # Makes what is jitted, of the function that takes one step.
  compiled: Callable[[Function], Function]
  results: int  # how many that returns
  # The arguments that the first results replace.
  updated: tuple[int, ...] = (0, 1)
  names: tuple[str, ...] = ()  # of the arguments, in messages
  # What `value_fn` calls.
  elsewhere: Callable[..., jax.Array] = loss_elsewhere

  def __post_init__(self) -> None:
    self._jitted = functools.cache(self._jit)
    self._last = donation.Known([])  # of the last call

  def prepare(self, args, kwargs, kept=()) -> PreparedCall:
    """Checks and places the arguments, and copies those donated twice or still needed (`kept`)."""
    passed = donation.arrays([args[i] for i in self.updated])
    rest = [x for i, x in enumerate(args) if i not in self.updated]
    others = donation.arrays((rest, kwargs, kept))
    given = [*passed, *others]
    donation.check_alive(given, self.names, args, kwargs)
    loss, placed, named = self.loss.place(args, kwargs)
    updated = {i: placed[i] for i in self.updated}
    held = passed
    if self.loss.parallel is None:
      updated = donation.committed(updated, held)
    else:  # they were put on the mesh
      held = donation.arrays(updated)
    unknown = self._last.unknown(given)
    new = set(map(id, unknown))
    donation.check_memory(x for x in passed if id(x) in new)
    if self.donate:
      updated = donation.distinct(updated, held, others, unknown)
    placed = tuple(updated.get(i, x) for i, x in enumerate(placed))
    jitted = self._jitted(loss, _shardings(loss, updated, held))
    return PreparedCall(self, loss, jitted, placed, named, others)

  def remember(self, results, others) -> None:
    """Tells the next call which arrays are of this one, whose buffers are known."""
    updated = donation.arrays(results[: len(self.updated)])
    self._last = donation.Known([*updated, *others])

  def _jit(self, loss: Placed, kept):
    """The jitted function for a loss, and for the shardings that results keep without `mesh`."""
    shardings = loss.out_shardings
    donated = self.updated
    if kept is not None:
      treedef, known = kept
      shardings = treedef.unflatten(known).values()
    if shardings is not None:
      unknown = self.results - len(shardings)
      shardings = (*shardings, *[None] * unknown)
    if not self.donate:
      donated = ()
    run = self.compiled(self._step_by(loss))
    return jitted(loss, run, donate_argnums=donated, out_shardings=shardings)

  def _step_by(self, loss: Placed) -> Function:
    """One step of `tx` by the gradient of `loss`."""
    local = self.loss.local

    def step(params, opt_state, /, *args, **kwargs):
      beside = loss.beside(params, opt_state)
      reduced = beside.value_and_grad(None, params, *args, **kwargs)
      out = reduced.outputs
      total = reduced.stats.total_weight
      counted = total != 0
      if local.reduction.name == "mean":
        weight = total
      elif local.split.weighs:
        weight = counted.astype(total.dtype)  # a sum is not to be weighed again
      else:
        weight = 1.0
      if not local.split.weighs:
        counted = True
      if local.split.virtual_devices is not None:
        # Under a condition, the optimizer is compiled by itself.
        counted = counted & in_order.true_of(out.loss)
      extra_args = {
        "value": out.loss,
        "grad": out.grads,
        "value_fn": ValueOfOneCall(
          self.elsewhere, beside, out.weights, args, kwargs
        ),
        "weight": weight,
      }
      update = OptimizerStep(self.tx, out.grads, extra_args, counted)
      with jax.named_scope("optimizer"):
        params, (opt_state, stepped) = beside.step_beside(
          update, params, opt_state
        )
      metrics = self._metrics(reduced) | {"stepped": stepped}
      return params, opt_state, *reduced.carry, metrics

    return step

  def _metrics(self, reduced: Reduced) -> dict[str, Tree]:
    """What a step returns about a batch."""
    local = self.loss.local
    out = reduced.outputs
    stats = reduced.stats
    derivatives = local.derivatives(out.grads)
    of_mean = local.split.devices.apart(squared_norm, derivatives)
    metrics = {
      "loss": out.loss,
      "grad_norm": jnp.sqrt(of_mean),
      **stats._asdict(),
      **out.metrics,
    }
    if "noise_scale" in metrics:
      metrics["noise_scale"] = noise_terms(
        metrics["noise_scale"], of_mean, stats.total_weight
      )
    if local.has_aux or reduced.carry:
      metrics["aux"] = out.aux
    return metrics


# With this pass, the algebraic simplifier, XLA for CPU writes one computation in different ways in
# programs for one device and for several. For GPUs and TPUs nothing was found that helps.
_SAME_BITS = {"xla_disable_hlo_passes": "algsimp"}


def jitted(loss: Placed, run: Function, **options):
  """`jax.jit`, with what `virtual_devices` asks of the compiler."""
  if loss.local.split.virtual_devices is None:
    return jax.jit(run, **options)
  platform = jax.default_backend()
  if loss.parallel is not None:
    mesh = loss.parallel.mesh
    platform = mesh.devices.flat[0].platform
    run = _on_automatic(mesh, run)
  if platform == "cpu":
    options["compiler_options"] = _SAME_BITS
  return jax.jit(run, **options)


def _on_automatic(mesh: jax.sharding.Mesh, run: Function) -> Function:
  """`run` where this mesh is set, and not one of explicit axes."""

  @functools.wraps(run)
  def on_mesh(*args, **kwargs):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return run(*args, **kwargs)

  return on_mesh


def _shardings(loss: Placed, updated, held):
  """Without `mesh`: those of the leaves of what is updated, with their tree; None on one device."""
  if loss.parallel is not None:
    return None
  if held and isinstance(held[0].sharding, jax.sharding.SingleDeviceSharding):
    return None  # asking each array would take longer
  leaves, treedef = jax.tree.flatten(updated)
  known = out_shardings(map(sharding_of, leaves))
  if not any(known):
    return None
  return treedef, known


def step_loss(
  loss_fn,
  *,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  reduce_gradients: str = "per_cycle",
  **options,
) -> Loss:
  """The loss of a step with these options of `make_train_step`, which are checked."""
  _validate.one_of(
    "reduce_gradients", reduce_gradients, ("per_cycle", "per_microbatch")
  )
  asked = {
    "reduction": "mean",
    "has_aux": False,
    "grad_reduction": None,
    "aux_reduction": None,
    "names": {0: "params"},
    **options,
  }
  split = Split.of(asked, default_argnum=1)
  local = LocalLoss.of(loss_fn, 0, asked["has_aux"], split, asked)
  in_loop = reduce_gradients == "per_microbatch"
  virtual.check_order(split, in_loop)
  if mesh is None:
    return LossWithoutMesh(local)
  parallel = DataParallel.of(mesh, data_axis, split.axis_name, in_loop)
  if split.virtual_devices is not None:
    parallel = dataclasses.replace(parallel, mesh=virtual.automatic(mesh))
  return MeshLoss(local, parallel)
