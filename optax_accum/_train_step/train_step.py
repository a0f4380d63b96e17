"""`make_train_step`: N backward passes and one optimizer step in one jitted call."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import inspect
from typing import (
  Any,
  Concatenate,
  Generic,
  Literal,
  ParamSpec,
  TYPE_CHECKING,
  TypeVar,
)

import jax
from jax.typing import DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._microbatches import cut, parameters, refusals
from optax_accum._microbatches.options import Slots, WeightFn
from optax_accum._microbatches.roles import by_slot
from optax_accum._train_step.cycle import Cycle, CycleProgram, method
from optax_accum._train_step.program import (
  as_it_is,
  Function,
  Loss,
  PreparedCall,
  Runnable,
  Step,
  step_loss,
  StepProgram,
)

OptState = TypeVar("OptState")
if TYPE_CHECKING:  # with defaults, which Python has from 3.13 on: a bare TrainStep is an annotation
  import typing_extensions

  from optax_accum._check_split.report import SplitReport

  Params = typing_extensions.TypeVar("Params", default=Any)
  Args = typing_extensions.ParamSpec("Args", default=...)
else:
  Params = TypeVar("Params")
  Args = ParamSpec("Args")


class TrainStep(Step, Runnable[Any], Generic[Params, Args]):
  """A jitted training step, made by `make_train_step`, which describes the metrics.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` takes the arguments of the
  loss function from the batch on, by position or by name.
  """

  def __init__(
    self, loss: Loss, tx: optax.GradientTransformationExtraArgs, donate: bool
  ):
    # Parameters, state and metrics, and the carry if there is one.
    results = 3 + len(loss.local.split.carry)
    self.loss = loss
    self.__name__ = "train_step"
    # Whether a call succeeded: later ones skip `_refuse_rows`.
    self._called = False
    names = "params", "opt_state", "batch"
    self._program = StepProgram(
      loss, tx, donate, _checked, results, names=names
    )
    # The loss may have no signature, or one that cannot follow params and opt_state. Then that of
    # `__call__` stays.
    with contextlib.suppress(TypeError, ValueError):
      self.__signature__ = _signature(loss.local.fun)

  def __call__(
    self,
    /,
    params: Params,
    opt_state: OptState,
    *args: Args.args,
    **kwargs: Args.kwargs,
  ) -> tuple[Params, OptState, *tuple[Any, ...]]:
    """Takes one step: the new parameters, the new optimizer state, and the metrics."""
    # Not by `_use`: one frame fewer stands between a call and the loss.
    try:
      results = self._prepare(params, opt_state, *args, **kwargs).run()
    except Exception:
      self._explain(params, opt_state, *args, **kwargs)
      raise
    self._called = True
    return results

  def _explain(self, /, params, opt_state, *others, **named) -> None:
    """Says what was passed wrongly, after a call with such arguments raised an error."""
    parameters.check_order(self._program.tx, params, opt_state)
    parameters.check_step(params, opt_state, *others, **named)

  def begin(self, params: Params, *carry: Any) -> Cycle:
    """Begins a cycle whose microbatches arrive in several calls, with the carry if there is one.

    ``cycle = step.add(cycle, params, batch)`` adds microbatches, any number of times, and
    ``params, opt_state, metrics = step.finish(params, opt_state, cycle)`` takes the step. It is
    that of one call with all the rows, up to rounding. Keep the parameters the same within a cycle,
    and assign what ``add`` returns: a cycle that has just begun has no arrays, so that nothing
    shows if it is used again. To drop a cycle, begin another.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax.sgd(1.0)
      >>> step = optax_accum.make_train_step(
      ...   lambda params, x: jnp.mean((params - x) ** 2), tx, num_microbatches=1)
      >>> params = jnp.zeros(())
      >>> cycle = step.begin(params)
      >>> for batch in jnp.ones(2), jnp.full(6, 2.0):
      ...   cycle = step.add(cycle, params, batch)
      >>> params, opt_state, metrics = step.finish(params, tx.init(params), cycle)
      >>> float(params), float(metrics["total_weight"])
      (3.5, 8.0)
    """
    return self._cycle.begin(params, carry)

  @method
  def add(self, cycle: Cycle, params, /, *args, **kwargs) -> PreparedCall:
    """``add(cycle, params, batch, ...)`` runs microbatches, and returns the cycle with these.

    It takes what the step takes after the optimizer state, but for the carry, which is in the
    cycle. It splits the batch as the step does, and goes on with the numbers of the microbatches,
    which are folded into keys. No gradient is sent to other devices. Calls may have different
    numbers of rows; each number is compiled once. ``cycle`` is donated: use what ``add`` returns.

    Raises an error if ``cycle`` was donated before, has ended, or is of other parameters, or where
    the step would raise one. "stack" and "concat" of aux need all microbatches at once, and are
    refused.
    """
    return self._cycle.add(cycle, params, args, kwargs)

  # This prepares a call, as `add` and `finish` do. `method` makes of each what runs it, with the
  # same arguments; after a call that failed, an `explain` gets these too.
  @method
  def merge(self, cycle: Cycle, other: Cycle, /) -> PreparedCall:
    """``merge(cycle, other)`` returns one cycle of two that were added up apart.

    Both began from the same parameters and carry, by one step, and are on the same devices: put
    ``other`` there, ``jax.device_put(other, device)``. Both are donated. If one has no microbatch,
    the result is the other. Sums, weights and counts add up; "max" and "min" choose; a function
    ``merge(a, b)`` merges; "last" is the second's, if its last device counted any; carries combine
    by `carry_reduction`, and keys of a carry are the first's. Microbatches of both have numbers
    from 0 on, so give each worker a random key of its own.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax.sgd(1.0)
      >>> step = optax_accum.make_train_step(
      ...   lambda params, x: jnp.mean((params - x) ** 2), tx, num_microbatches=1)
      >>> params = jnp.zeros(())
      >>> one = step.add(step.begin(params), params, jnp.ones(2))
      >>> other = step.add(step.begin(params), params, jnp.full(6, 2.0))
      >>> cycle = step.merge(one, other)
      >>> float(cycle.total_weight), int(cycle.num_microbatches)
      (8.0, 2)
    """
    return self._cycle.merge(cycle, other)

  @functools.partial(method, explain=_explain)
  def finish(self, params, opt_state, cycle: Cycle, /) -> PreparedCall:
    """``finish(params, opt_state, cycle)`` takes one optimizer step by what was added to a cycle.

    It reduces gradients over devices once, and returns what the step returns, the new carry before
    the metrics. Parameters and state are donated as in the step, and the arrays of the cycle
    deleted. A cycle without microbatches is an error, and so is an optimizer that calls
    ``value_fn``.
    """
    return self._cycle.finish(params, opt_state, cycle)

  @functools.cached_property
  def _cycle(self) -> CycleProgram:
    """The programs of `add`, `merge` and `finish`."""
    # `_checked` would take the state of the cycle, which follows the optimizer state, for a batch.
    unchecked = dataclasses.replace(self._program, compiled=as_it_is)
    return CycleProgram(unchecked, updated=(0, 1))

  def check(
    self,
    params: Params,
    opt_state: OptState,
    *args: Args.args,
    **kwargs: Args.kwargs,
  ) -> "SplitReport":
    """Tests whether the loss is the same in microbatches; if not, says why and how to fix it.

    `check_split` with the loss and options of the step, on few rows of the batch at a time (more if
    these tell nothing). Over a mesh it compares the step of up to 2 microbatches with one device on
    all of these rows; where the loss runs on no single device, with one microbatch. Nothing is
    donated. Raises what the call does, and an error inside `jax.jit`, for one row, or without room
    on one device.
    """
    # Imported here, since training does not need it.
    from optax_accum._check_split.step_check import check_step

    try:
      given = params, opt_state, *args
      loss, placed, named = self._program.place(given, kwargs)
      sharded = loss.with_state(*placed[:2])
      # The loss takes all of these but the optimizer state.
      return check_step(sharded, self.of_loss(placed), named)
    except Exception:
      self._explain(params, opt_state, *args, **kwargs)
      raise

  def _prepare(self, /, params, opt_state, *others, **named) -> PreparedCall:
    given = params, opt_state, *others
    prepared = self._program.prepare(given, named)
    if not self._called:
      self._refuse_rows(self.of_loss(given), named)
    return prepared

  def _refuse_rows(self, args, kwargs) -> None:
    """Refuses what has the batch's rows unsplit, until a call succeeds; later it may be chance."""
    local = self.loss.local
    # The user said what is split, so the rest is meant to be shared.
    if local.split.batch_argnums is not None:
      return
    roles = local.roles_of(args, kwargs)
    arguments = by_slot(args, kwargs)
    rows = cut.batch_rows(local.split, roles.batch, arguments)
    refusals.refuse_rows(local.split, roles, arguments, rows)

  def __repr__(self) -> str:
    split = self.loss.local.split
    parallel = self.loss.parallel
    fun = self.loss.local.fun
    size = "num_microbatches"
    if split.num_microbatches is None:
      size = "microbatch_size"
    name = getattr(fun, "__name__", repr(fun))
    shown = [name, f"{size}={getattr(split, size)}"]
    if parallel is not None:
      shown.append(f"mesh={parallel.mesh}")
    shown.append(f"donate={self._program.donate}")
    return f"TrainStep({', '.join(shown)})"


def _checked(run: Function) -> Function:
  """What is compiled: a step, whose arguments are checked while it is traced."""

  def train_step(params, opt_state, /, *args, **kwargs):
    parameters.check_step(params, opt_state, *args, **kwargs)
    return run(params, opt_state, *args, **kwargs)

  return train_step


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
  """The signature of a step, with the names that `loss_fn` gives to what follows the parameters."""
  parameter = inspect.Parameter
  either = parameter.POSITIONAL_OR_KEYWORD
  of_step = [parameter("params", either), parameter("opt_state", either)]
  rest = list(inspect.signature(loss_fn).parameters.values())
  # A loss that begins with ``*args`` has no name for its parameters, and keeps all.
  if rest and rest[0].kind in (either, parameter.POSITIONAL_ONLY):
    del rest[0]  # the parameters
  return inspect.Signature([*of_step, *rest])


def make_train_step(
  loss_fn: Callable[Concatenate[Params, Args], Any],
  tx: optax.GradientTransformation,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  has_weight: bool = False,
  weight_fn: WeightFn | None = None,
  has_aux: bool = False,
  aux_reduction: ReductionTree = None,
  batch_argnums: Slots = None,
  reduction: Literal["mean", "sum"] = "mean",
  donate: bool = True,
  rng_argnums: Slots = None,
  carry_argnum: int | None = None,
  skip_nonfinite: bool = False,
  noise_scale: bool = False,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  in_place: bool = False,
  accumulator_dtype: DTypeLike | None = None,
  carry_reduction: ReductionTree = None,
) -> TrainStep[Params, Args]:
  """Makes a jitted training step that runs its batch in microbatches.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` computes the gradients of
  the whole batch, one microbatch at a time, and takes one optimizer step. The six options up to
  `aux_reduction` are enough for most losses, and ``step.check`` tells whether a loss needs others.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> tx = optax.sgd(0.01)
    >>> step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=3)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> params = jnp.array([1.0, -1.0])
    >>> params, opt_state, metrics = step(params, tx.init(params), batch)
    >>> float(metrics["loss"]), float(metrics["total_weight"])
    (4.0, 6.0)

  Args:
    loss_fn: ``loss_fn(params, batch, ...)`` returns the loss of the rows in ``batch``, a real
      scalar. Positions below are those of its arguments.
    tx: Any optax transformation except `optax.lookahead`.
    num_microbatches: The number of equal parts, which divides the rows (of each device).
    microbatch_size: The rows of one microbatch, on all devices, in place of their number. The last
      may have fewer, and counts less.
    has_weight: Whether `loss_fn` returns ``(total, weight)`` where others return the loss: the sum
      of the losses of its rows, and how much they count. The step divides the sums of both.
    weight_fn: ``weight_fn(batch) -> scalar``, how much a microbatch counts, such as its valid
      tokens. The loss is multiplied by it, so both must be in float32: cast the logits, not the
      mean. Default: its rows.
    has_aux: Whether `loss_fn` returns ``(loss, aux)``, aux for ``metrics["aux"]``; with
      `has_weight` ``((total, weight), aux)``.
    aux_reduction: How aux is combined: ``"mean"`` (weighted; the default, not for values of rows),
      ``"sum"``, ``"max"``, ``"min"``, ``"last"``, ``"stack"`` (one per microbatch), ``"concat"``
      (values of rows), a function ``merge(a, b)``, or a prefix tree of these.
    batch_argnums: What is split along its first axis: a position, the name of a keyword, or a tuple
      of these. Default: 1.
    reduction: ``"mean"``, weighted; or ``"sum"``, for a loss that is a sum over rows.
    donate: Whether parameters and state are updated in place, which deletes what was passed in.

  Randomness and carried state:
    rng_argnums: The positions, or names of keywords, of random keys. Microbatch ``i`` gets
      ``jax.random.fold_in(key, i)``; on device ``d``, with N each, it is number ``d * N + i``.
      Default: none, and then a typed key is an error. With ``()`` all microbatches share it.
    carry_argnum: The position of an argument that each microbatch updates for the next, such as
      batch statistics. `loss_fn` then returns ``(loss, (new_carry, aux))``, and the step the new
      carry before the metrics.

  Robustness and monitoring:
    skip_nonfinite: Whether to leave out microbatches whose loss or gradients are not finite.
    noise_scale: Whether to return ``metrics["noise_scale"]``, for `gradient_noise_scale`.

  Several devices:
    mesh: A `jax.sharding.Mesh`, where arrays are put: see "Over a mesh". Without it the compiler
      reduces gradients in every microbatch.
    data_axis: The axis that rows are sharded over, or several: ``("replica", "data")``.

  Expert options:
    in_place: Whether the backward pass adds layers' gradients to the accumulator directly,
      which saves memory if layers are scanned.
    accumulator_dtype: The dtype to add up in. Default: the gradient's, float32 at least.
    carry_reduction: How devices, or merged cycles, combine a carry: a prefix tree of ``"mean"``
      (weighted; default for floats), ``"sum"`` (the start plus increments), ``"max"``, ``"min"``
      and None, the default: ``{"right": "sum", "stats": None}``. A bare word is for every leaf,
      floats too. Integers and booleans that the loss changes need one.

  Returns:
    A `TrainStep`, with ``begin``, ``add``, ``merge`` and ``finish`` for microbatches that arrive.
    Further arguments of `loss_fn` follow the batch. ``metrics`` is a dict of arrays:

    ========================  ======================================================================
    ``loss``                  of the whole batch
    ``grad_norm``             the global norm of the gradients
    ``total_weight``          the sum of the weights
    ``skipped_microbatches``  int32, how many were not finite
    ``stepped``               bool: False within a cycle of `accumulate`, or if nothing counted
    ``aux``                   with `has_aux` or `carry_argnum`
    ``noise_scale``           if asked for
    ========================  ======================================================================

  Raises:
    ValueError, TypeError: An argument, a shape or a type cannot work.
    RuntimeError: A step deleted an array.

  Over a mesh:
    `loss_fn` runs in `jax.shard_map` over `data_axis` and returns the loss of one device's rows.
    Parameters, state and carry keep their shardings. Collectives over `data_axis` have the gradient
    of the whole batch; ``l.sum() / lax.psum(count)`` has 1/n of it on n devices. Other axes are the
    compiler's: constrain them by a bare `PartitionSpec`.

  The optimizer:
    ``tx.update`` gets ``value``, the loss; ``grad``, the gradients; ``weight``, the total weight
    (1 for a sum); and ``value_fn``, from parameters to the loss.
  """
  # These are all arguments by name; `step_loss` picks those of the loss.
  asked = locals()
  _validate.transformation(tx, "tx")
  tx = optax.with_extra_args_support(tx)
  return TrainStep(step_loss(**asked), tx, donate)
