"""What every training step has, and its program: N backward passes and one optimizer step."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic.trees import Args, Kwargs, Tree
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._mesh.loss import Loss, OverMesh
from optax_accum._mesh.placement import out_shardings, sharding_of
from optax_accum._microbatches import cut
from optax_accum._microbatches.accumulator import Reduced
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.noise_scale import noise_terms, squared_norm
from optax_accum._microbatches.options import Split
from optax_accum._streaming.calls import ValueOfOneCall
from optax_accum._train_step import donation
from optax_accum._train_step.optimizer_step import OptimizerStep

Function: TypeAlias = Callable[..., Any]
Result = TypeVar("Result")


class Step:
  """What every training step of the library has: a loss of rows on devices."""

  loss: Loss  # that it steps by the gradient of
  batch_position = 2  # in a call

  def of_loss(self, args: Sequence[Any]) -> Args:
    """The arguments of the loss that are in a call."""
    params, _, *others = args
    return params, *others

  def __copy__(self, memo=None):
    return self  # as a function is its own copy

  __deepcopy__ = __copy__


def as_it_is(results):
  """What is changed in no way."""
  return results


class PreparedCall(NamedTuple):
  """A call of a step, or of a method of it: a jitted function, and the arguments for it."""

  jitted: Any
  args: Args
  kwargs: Kwargs
  # What is returned, of the results of the function.
  returned: Callable[[Any], Any] = as_it_is
  # The arrays that nothing is to use again.
  ended: Tree = ()

  def run(self):
    """Runs the program."""
    results = self.jitted(*self.args, **self.kwargs)
    # Without jit a result may be an array of the arguments.
    returned = set(map(id, donation.arrays(results)))
    for x in donation.arrays(self.ended):
      if id(x) not in returned:
        x.delete()
    return self.returned(results)

  def trace(self) -> jax.stages.Traced:
    """The program, traced."""
    return self.jitted.trace(*self.args, **self.kwargs)

  def eval_shape(self):
    """Shapes and dtypes of what `run` returns."""
    results = self.jitted.eval_shape(*self.args, **self.kwargs)
    return self.returned(results)


class Runnable(Generic[Result]):
  """What is called with arguments, and has the program that it then runs."""

  _prepare: Callable[..., PreparedCall]
  _explain: Callable[..., object]

  def _use(self, name: str, args, kwargs):
    """What a method of the prepared call returns."""
    try:
      call = self._prepare(*args, **kwargs)
      return getattr(call, name)()
    except Exception:
      self._explain(*args, **kwargs)
      raise

  def trace(self, *args, **kwargs) -> jax.stages.Traced:
    """As ``trace`` of a jitted function."""
    return self._use("trace", args, kwargs)

  def lower(self, *args, **kwargs) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function. Its arguments may be `jax.ShapeDtypeStruct`."""
    return self.trace(*args, **kwargs).lower()

  def eval_shape(self, *args, **kwargs) -> Result:
    """As ``eval_shape`` of a jitted function: shapes and dtypes of what a call returns."""
    return self._use("eval_shape", args, kwargs)


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

  def __post_init__(self) -> None:
    self._jitted = functools.cache(self._jit)

  def prepare(self, args, kwargs, others=(), returned=as_it_is) -> PreparedCall:
    """Checks and places the arguments, and copies those donated twice, or also among `others`."""
    loss, placed, kwargs = self.place(args, kwargs)
    placed, shardings = self.donated(loss, placed, (kwargs, others))
    jitted = self._jitted(loss, shardings)
    return PreparedCall(jitted, placed, kwargs, returned)

  def place(self, args, kwargs) -> tuple[Loss, Args, Kwargs]:
    """The loss for such arguments, and the arguments where they belong."""
    check_given(self.names, args, kwargs)
    return self.loss.place(args, kwargs)

  def donated(self, loss: Loss, placed, others):
    """The arguments, of which those that are updated can be donated, and shardings of these."""
    updated = {i: placed[i] for i in self.updated}
    # These are asked for shardings after copies are made, too: a copy is sharded as its array.
    arrays = donation.arrays(updated)
    donation.check_memory(arrays)
    if self.donate:
      rest = [x for i, x in enumerate(placed) if i not in self.updated]
      # From here on these are all arrays that this call does not donate.
      others = donation.arrays((rest, others))
      updated = donation.distinct(updated, arrays, others)
    # All are committed, or none, as the results will be: else the next call compiles again. Over a
    # mesh `place` has committed them.
    if loss.parallel is None:
      updated = donation.committed(updated, arrays)
    placed = tuple(updated.get(i, x) for i, x in enumerate(placed))
    return placed, _shardings(loss, updated, arrays)

  def _jit(self, loss: Loss, kept_shardings):
    """The program of a step on the whole batch."""

    def step(params, opt_state, /, *args, **kwargs):
      # Over a mesh a gradient goes where its parameter is, or the state of that (ZeRO-1).
      sharded = loss.with_state(params, opt_state)
      reduced = sharded.value_and_grad(params, *args, **kwargs)
      # `kept` says which microbatches were not skipped; None: all.
      value = functools.partial(sharded.value, reduced.outputs.kept)
      # By this type an `accumulate` in `tx` knows that it is of one call alone.
      value_fn = ValueOfOneCall(_value_at, value, args, kwargs)
      return self.take(sharded, reduced, params, opt_state, value_fn)

    return self.jit(loss, step, kept_shardings)

  def jit(self, loss: Loss, step: Function, kept_shardings):
    """A jitted function that steps, for the shardings that results keep without a mesh."""
    # Those of parameters, state and carry over a mesh; None without one.
    shardings = loss.out_shardings
    if kept_shardings is not None:
      # A tree of a dict by position, so its values are in the order of results.
      treedef, known = kept_shardings
      shardings = treedef.unflatten(known).values()
    if shardings is not None:
      # Further results, such as the metrics, are left to the compiler by None.
      unknown = self.results - len(shardings)
      shardings = (*shardings, *[None] * unknown)
    donated: tuple[int, ...] = ()
    if self.donate:
      donated = self.updated
    return jax.jit(
      self.compiled(step), donate_argnums=donated, out_shardings=shardings
    )

  def take(
    self, loss: Loss, reduced: Reduced, params, opt_state, value_fn: Function
  ) -> Args:
    """One step of `tx` by the gradient of `loss`, and the metrics."""
    local = loss.local
    out = reduced.outputs
    total = reduced.stats.total_weight
    # Weights are 0 or more, so a total of 0 is that nothing counted.
    counted: Any = total != 0
    weight: Any = total
    if local.reduction.name == "sum":
      weight = counted.astype(total.dtype)  # a sum is not to be weighed again
    # Here the weights are known before the program runs: it needs no conditional.
    if not local.split.counts:
      counted = True
    # Line searches use the first three, and an `accumulate` in `tx` weighs by the last.
    extra_args = {
      "value": out.loss,
      "grad": out.grads,
      "value_fn": value_fn,
      "weight": weight,
    }
    update = OptimizerStep(self.tx, out.grads, extra_args, counted)
    with jax.named_scope("optimizer"):
      # Over a mesh this steps on shards, and gathers the new parameters.
      params, (opt_state, stepped) = loss.update(update, params, opt_state)
    metrics = _metrics(local, reduced)
    metrics["stepped"] = stepped
    # `carry` is a tuple, which is empty if the loss has none.
    return params, opt_state, *reduced.carry, metrics


def _value_at(value: Function, args, kwargs, params, weight=None) -> jax.Array:
  """The loss of a call at other parameters, over the microbatches that were not skipped."""
  del weight  # optax's line searches refuse an extra argument that this lacks
  return value(params, *args, **kwargs)


def _metrics(local: LocalLoss, reduced: Reduced) -> dict[str, Tree]:
  """What a step returns about a batch."""
  out = reduced.outputs
  squared = squared_norm(out.grads)
  metrics = {
    "loss": out.loss,
    "grad_norm": jnp.sqrt(squared),
    **reduced.stats._asdict(),
  }
  if local.noise_scale:
    total = reduced.stats.total_weight
    metrics["noise_scale"] = noise_terms(out.noise, squared, total)
  # A loss with a carry returns ``(loss, (carry, aux))``, so it has aux too.
  if local.has_aux or reduced.carry:
    metrics["aux"] = out.aux
  return metrics


def check_given(names: Sequence[str], args, kwargs) -> None:
  """Checks what a step, or `add`, is given: parameters, state, batch, and further arguments."""
  check_not_mapped()
  # `names` has the first positions; other slots are named by number or keyword.
  roots = dict[Any, str](enumerate(names))
  slots = (*enumerate(args), *kwargs.items())
  given = [(roots.get(slot, f"argument {slot!r}"), x) for slot, x in slots]
  # Of parameters and state, the first two, there are other checks.
  for root, tree in given[2:]:
    cut.check_arrays(root, tree)
  donation.check_alive(given)


def check_not_mapped() -> None:
  """Checks that a step is not called where each device would take a step of its own."""
  # Manual axes are those of a `pmap` or `shard_map` around the call.
  axes = jax.sharding.get_abstract_mesh().manual_axes
  if axes:
    raise ValueError(
      f"The step is called inside pmap or shard_map over {axes}, and would step on each device by"
      " itself: call it outside, with mesh=. Inside call"
      " optax_accum.microbatch_value_and_grad(axis_name=...) and an optimizer, or"
      " optax_accum.accumulate(axis_name=...)."
    )


def _shardings(loss: Loss, updated, arrays):
  """The tree of what is updated, and its leaves' shardings. None with `mesh=`, or on one device."""
  # A loss over a mesh has its own `out_shardings`.
  if loss.parallel is not None:
    return None
  of_one_device = jax.sharding.SingleDeviceSharding
  # The first stands for all: asking each would take longer.
  if arrays and isinstance(arrays[0].sharding, of_one_device):
    return None
  leaves, treedef = jax.tree.flatten(updated)
  known = out_shardings(map(sharding_of, leaves))
  # None stands for what is not sharded over a mesh.
  if not any(known):
    return None
  return treedef, known


def step_loss(
  loss_fn,
  *,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  **options,
) -> Loss:
  """The loss of a step with these options of `make_train_step`, which are checked."""
  # Defaults, which `options` replaces. `names` are of arguments, in messages.
  asked = {
    "reduction": "mean",
    "has_aux": False,
    "aux_reduction": None,
    "names": {0: "params"},
    **options,
  }
  # Argument 0 of the loss is differentiated; 1 is the batch, unless `batch_argnums` says otherwise.
  split = Split.of(asked, default_argnum=1)
  local = LocalLoss.of(loss_fn, 0, asked["has_aux"], split, asked)
  if mesh is None:
    return local
  return OverMesh(local, DataParallel.of(mesh, data_axis))
