"""`make_train_step`: N backward passes and one optimizer step in one jitted call."""

from collections.abc import Callable, Iterator, Sequence
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

from optax_accum import _spellings, _validate
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import (
  GradReductionTree,
  ReductionTree,
)
from optax_accum._microbatches import parameters
from optax_accum._microbatches.grad_metrics import GradMetricsFn
from optax_accum._microbatches.options import WeightFn
from optax_accum._train_step.cycle import (
  Cycle,
  CycleProgram,
  method,
  PreparedAdd,
)
from optax_accum._train_step.program import (
  Function,
  Loss,
  PreparedCall,
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


class TrainStep(Step, Generic[Params, Args]):
  """A jitted training step, made by `make_train_step`, which describes the metrics.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` takes the arguments of the
  loss function from the batch on, by position or by name.
  """

  def __init__(
    self, loss: Loss, tx: optax.GradientTransformationExtraArgs, donate: bool
  ):
    results = 3  # parameters, state and metrics, and perhaps the carry
    if loss.local.split.carry_argnum is not None:
      results += 1
    self.loss = loss
    self.__name__ = "train_step"
    self._program = StepProgram(loss, tx, donate, _checked, results)
    # One whose names do not go with these two has that of `__call__`.
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
    with self._prepared(params, opt_state, *args, **kwargs) as call:
      return call.run()

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

  def _explain_add(self, cycle: Cycle, params, /, *args, **kwargs) -> None:
    """Raises an error that says what was passed wrongly to `add`, if anything was."""
    fun = self.loss.local.fun
    of_loss, named = self._cycle.of_loss(cycle, params, args, kwargs)
    hint = (
      "It takes step.add(cycle, params, batch, ...): no optimizer state, and no carry, which is in"
      " the cycle."
    )
    names = _spellings.WHOLE_BATCH
    why = _spellings.hint_on(fun, of_loss, named, names, hint)
    if why:
      raise TypeError(f"step.add: {why}") from None
    parameters.check_arrays(*args, **kwargs)

  def _explain_finish(self, params, opt_state, cycle: Cycle, /) -> None:
    """Raises an error that says what was passed wrongly to `finish`, if anything was."""
    order = "finish(params, opt_state, cycle)"
    parameters.check_order(self._program.tx, order, params, opt_state)
    parameters.check_step(params, opt_state, cycle)

  @functools.partial(method, explain=_explain_add)
  def add(self, cycle: Cycle, params, /, *args, **kwargs) -> PreparedAdd:
    """``add(cycle, params, batch, ...)`` runs microbatches, and returns the cycle with these.

    It takes what the step takes after the optimizer state, but for the carry, which is in the
    cycle. It splits the batch as the step does, and goes on with the numbers of the microbatches,
    which are folded into keys. No gradient is sent to other devices, except with
    ``reduce_gradients="per_microbatch"``. Calls may have different numbers of rows; each number is
    compiled once. ``cycle`` is donated: use what ``add`` returns.

    Raises an error if ``cycle`` was donated before, has ended, or is of other parameters or, as far
    as its arrays tell, of another step, or where the step would raise one. "stack" and "concat" of
    aux need all microbatches at once, and are refused.
    """
    return self._cycle.add(cycle, params, args, kwargs)

  @functools.partial(method, explain=_explain_finish)
  def finish(self, params, opt_state, cycle: Cycle, /):
    """``finish(params, opt_state, cycle)`` takes one optimizer step by what was added to a cycle.

    It reduces gradients over devices once, and returns what the step returns, the new carry before
    the metrics. Parameters and state are donated as in the step, and the arrays of the cycle
    deleted. A cycle without microbatches is no step: parameters and state are returned as they are,
    ``metrics["stepped"]`` is False, and there is no aux and no ``grad_metrics``. An optimizer that
    calls ``value_fn`` is refused.
    """
    return self._cycle.finish(params, opt_state, cycle)

  @functools.cached_property
  def _cycle(self) -> CycleProgram:
    own = dataclasses.replace(self._program, compiled=_named)
    return CycleProgram(own, updated=(0, 1))

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
    on one device. With `axis_name` it knows one device, and says so.
    """
    with self._prepared(params, opt_state, *args, **kwargs) as call:
      return call.check(self._of_loss(call.args))

  def lower(
    self, params: Any, opt_state: Any, *args: Any, **kwargs: Any
  ) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function. Its arguments may be `jax.ShapeDtypeStruct`."""
    return self.trace(params, opt_state, *args, **kwargs).lower()

  def trace(
    self, params: Any, opt_state: Any, *args: Any, **kwargs: Any
  ) -> jax.stages.Traced:
    """As ``trace`` of a jitted function."""
    with self._prepared(params, opt_state, *args, **kwargs) as call:
      return call.trace()

  def eval_shape(
    self, params: Any, opt_state: Any, *args: Any, **kwargs: Any
  ) -> Any:
    """As ``eval_shape`` of a jitted function: shapes and dtypes of what a call returns."""
    with self._prepared(params, opt_state, *args, **kwargs) as call:
      return call.eval_shape()

  @contextlib.contextmanager
  def _prepared(
    self, params, opt_state, /, *others, **named
  ) -> Iterator[PreparedCall]:
    """The call. An error in it says first what was passed wrongly."""
    given = params, opt_state, *others
    try:
      yield self._program.prepare(given, named)
    except Exception:
      fun = self.loss.local.fun
      of_loss = self._of_loss(given)
      why = _spellings.hint_on(fun, of_loss, named, _spellings.WHOLE_BATCH)
      if why:
        raise TypeError(f"step: {why}") from None
      order = "step(params, opt_state, batch)"
      parameters.check_order(self._program.tx, order, *given)
      parameters.check_step(*given, **named)
      raise

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
    if split.virtual_devices is not None:
      shown.append(f"virtual_devices={split.virtual_devices}")
    shown.append(f"donate={self._program.donate}")
    return f"TrainStep({', '.join(shown)})"


def _checked(run: Function) -> Function:
  """What is compiled: a step, whose arguments are checked while it is traced."""

  def train_step(params, opt_state, /, *args, **kwargs):
    parameters.check_step(params, opt_state, *args, **kwargs)
    return run(params, opt_state, *args, **kwargs)

  return train_step


def _named(run: Function) -> Function:
  """What is compiled to finish a cycle."""

  def finish_cycle(params, opt_state, held, *start):
    return run(params, opt_state, held, *start)

  return finish_cycle


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
  """The signature of a step, with the names that `loss_fn` gives to what follows the parameters."""
  kind = inspect.Parameter
  named = kind.POSITIONAL_OR_KEYWORD
  first = [kind("params", named), kind("opt_state", named)]
  rest = list(inspect.signature(loss_fn).parameters.values())
  if rest and rest[0].kind in (named, kind.POSITIONAL_ONLY):
    del rest[0]  # the parameters
  return inspect.Signature([*first, *rest])


@_spellings.hinted(
  "Options go by name: make_train_step(loss_fn, tx, num_microbatches=8). See help(make_train_step)."
)
def make_train_step(
  loss_fn: Callable[Concatenate[Params, Args], Any],
  tx: optax.GradientTransformation,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  weight_fn: WeightFn | None = None,
  has_weight: bool = False,
  has_aux: bool = False,
  aux_reduction: ReductionTree = None,
  batch_argnums: int | Sequence[int] | None = None,
  reduction: Literal["mean", "sum"] = "mean",
  donate: bool = True,
  rng_argnums: int | Sequence[int] | None = None,
  carry_argnum: int | None = None,
  skip_nonfinite: bool = False,
  skip_empty: bool = False,
  noise_scale: bool = False,
  grad_metrics_fn: GradMetricsFn | None = None,
  grad_metrics_reduction: ReductionTree = None,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  reduce_gradients: Literal["per_cycle", "per_microbatch"] = "per_cycle",
  virtual_devices: int | None = None,
  axis_name: AxisName | None = None,
  in_place: bool = False,
  accumulator_dtype: DTypeLike | None = None,
  grad_reduction: GradReductionTree = None,
  carry_reduction: ReductionTree = None,
  batch_axis: int | tuple[int, ...] = 0,
  batch_argnames: str | Sequence[str] = (),
  rng_argnames: str | Sequence[str] = (),
) -> TrainStep[Params, Args]:
  """Makes a jitted training step that runs its batch in microbatches.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` computes the gradients of
  the whole batch, one microbatch at a time, and takes one optimizer step.

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
      scalar. Positions below count its arguments: 0 is the parameters, 1 is the batch.
    tx: Any optax transformation except `optax.lookahead`: with it use `microbatch_value_and_grad`.
    num_microbatches: The number of equal parts. It must divide the rows of the batch (with `mesh`,
      the rows on each device; with `virtual_devices`, on each of those). Give this or
      `microbatch_size`.
    microbatch_size: The rows of one microbatch; with `mesh` or `virtual_devices`, on all devices
      together, a multiple of their number. The last microbatch may have fewer rows, and then counts
      less.
    weight_fn: ``weight_fn(batch) -> scalar``, how much a microbatch counts, such as its valid
      tokens: 0, or from 1e-30 to 1e30. It gets every argument that is split. Default: its rows.
    has_weight: Whether `loss_fn` returns ``(total, weight)`` where others return the loss: the sum
      of the losses of its rows, and how much they count, as for `weight_fn`. The step divides the
      sum of the totals by that of the weights, once. The weight has no gradient, and may count a
      mask that the loss draws. Excludes `weight_fn`, ``reduction="sum"`` and `skip_empty`. With
      `in_place`, what weighs 0 must have gradients of 0.
    has_aux: Whether `loss_fn` returns ``(loss, aux)``, with further results in a pytree. They are
      combined over the microbatches, and are then ``metrics["aux"]``.
    aux_reduction: How aux is combined: ``"mean"`` (weighted), ``"sum"``, ``"max"``, ``"min"``,
      ``"last"``, ``"stack"`` (along a new first axis, of microbatches), ``"concat"`` (values per
      row, in the order of the batch), a function ``merge(a, b)``, or a prefix tree of these, as in
      ``{"logits": "concat", "correct": "sum"}``. Default: the weighted mean, which refuses an aux
      with one value per row: give ``"concat"`` to keep all, or ``"mean"``.
    batch_argnums: The positions of the arguments that are split, all with as many rows. Default: 1,
      and then no other may have as many rows: give ``(1, 2)`` to split both, or ``1`` not to.
    reduction: ``"mean"``, weighted; or ``"sum"``, for a loss that is a sum over rows.
    donate: Whether to update parameters and optimizer state in place, which halves their memory and
      deletes the arrays passed in. An array that is also in another argument is copied instead.

  Randomness and carried state:
    rng_argnums: The positions of random keys, typed or raw, or of pytrees of keys. Microbatch ``i``
      gets ``jax.random.fold_in(key, i)``; on device ``d`` of several, with N each, it is number
      ``d * N + i``. For keys of "unsafe_rbg", whose folds commute, 2**30 is added, so that it is no
      step number that you folded in. Default: none, and then a typed key is an error. With ``()``
      all microbatches share it.
    carry_argnum: The position of an argument that each microbatch updates for the next, such as
      batch statistics. `loss_fn` then returns ``(loss, (new_carry, aux))``, and the step returns
      the new carry before the metrics. Microbatches of weight 0 do not change it. If the loss
      reads it, the step is not that of the whole batch: let the loss read the values of the last
      step instead, from a further argument that is not split.

  Robustness and monitoring:
    skip_nonfinite: Whether to leave out microbatches whose loss or gradients are not finite.
      "stack" and "concat" keep their values, and reverse-mode derivatives are then NaN.
    skip_empty: Whether not to run microbatches of weight 0, to save time; on a `mesh` with further
      axes, those of weight 0 on all devices. "stack" and "concat" have zeros for weight 0. Needs
      `weight_fn`, and excludes reverse-mode differentiation.
    noise_scale: Whether to return ``metrics["noise_scale"]``, for `gradient_noise_scale`. Needs two
      microbatches over all devices, ``reduction="mean"`` and no `in_place`.
    grad_metrics_fn: ``grad_metrics_fn(grads)`` returns arrays, such as the norm of each leaf, of
      the gradient of one microbatch, which is not kept. ``grads`` is a tree like the parameters,
      whole also where these are sharded, with None where `grad_reduction` is not `reduction`. With
      `mesh` it is the gradient of what one device has of the microbatch, before anything is summed
      over devices, however `reduce_gradients` is. Weights are not in it. Excludes `in_place`.
    grad_metrics_reduction: How these are combined over microbatches and devices, as by
      `aux_reduction` (but not "concat"), into ``metrics["grad_metrics"]``. Default: the weighted
      mean, without what counts nothing or is skipped.

  Several devices:
    mesh: A `jax.sharding.Mesh`, of explicit or automatic axes: see "Over a mesh". Arrays elsewhere
      are put there, optimizer state where its parameters are. Default: none. The step then runs
      where the arrays are, and over automatic axes the compiler gathers and reduces in every
      microbatch.
    data_axis: The axis that rows are sharded over and gradients are summed over once per step, or
      several: ``("data", "fsdp")``. Rows may be sharded over further automatic axes after these.
    reduce_gradients: When to sum gradients over `data_axis`: once ``"per_cycle"``, or
      ``"per_microbatch"``, which sends more but saves memory if parameters are sharded over it.
      Over further axes they are summed in every microbatch.
    virtual_devices: A power of two, such as 8, which the devices divide: on CPUs the step is then
      the same to the bit on 1, 2, 4 or 8 devices, and elsewhere up to how the compiler writes a
      microbatch. Rows, keys, carries and sums are those of so many devices, and each device stands
      for its share of them, one after the other. Microbatches have one size. Processes with other
      numbers of devices need the same environment variable ``NPROC``. Excludes `in_place`,
      `axis_name`, ``reduce_gradients="per_microbatch"``, further axes of the mesh, collectives over
      `data_axis` in `loss_fn`, and a call inside `jax.jit`. (``lax.axis_size`` and ``lax.psum(1,
      axis)`` are not seen, and tell of the real devices.) Default: none, as it costs memory. See
      the guide "The same bits".
    axis_name: Instead of `mesh`, for a step that is called inside `pmap` or `shard_map`: the axis
      that rows are sharded over, or several. Gradients are summed over it once per step, and every
      device takes the same step. "stack" and "concat" keep the values of each device.

  Expert options:
    in_place: Whether the backward pass adds each layer's gradient to the accumulator directly,
      which saves memory if layers are scanned ("Sharp edges" has measurements). Needs JAX 0.10, and
      parameters in the dtype of their accumulators. Excludes `skip_nonfinite`, `noise_scale`,
      `grad_metrics_fn`, `grad_reduction` and ``reduce_gradients="per_microbatch"``.
    accumulator_dtype: The dtype to add losses and gradients up in. Default: that of each gradient,
      but float32 at least. The optimizer gets gradients in their own dtypes again.
    grad_reduction: How gradients are combined: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``,
      ``"last"``, or a prefix tree of these over the parameters. For parameters that are overwritten
      with their "gradient", such as fp8 statistics: `tx` must overwrite them too. Default:
      `reduction`.
    carry_reduction: How the carries of devices are combined: a prefix tree of ``"mean"`` (weighted;
      default for floats), ``"max"`` (default for integers), ``"min"``, or ``"sum"``, the start plus
      all increments. Keys are not combined: each device folds its index into its own, and those of
      the first come out.
    batch_axis: The axis that is split: one for all arrays, or a tuple with one per argument, in the
      order of `batch_argnums` and then `batch_argnames`.
    batch_argnames: The names of keyword arguments that are split, in addition to `batch_argnums`.
    rng_argnames: The names of keyword arguments that are random keys, as those of `rng_argnums`.

  Returns:
    A `TrainStep`, with ``check``, ``lower``, ``trace`` and ``eval_shape``. Further arguments of
    `loss_fn` follow the batch. All are traced, so fix a setting with
    ``functools.partial(loss_fn, train=True)``. ``metrics`` is a dict of arrays:

    ========================  ======================================================================
    ``loss``                  of the whole batch
    ``grad_norm``             the global norm of the gradients, in float32 or wider, without leaves
                              whose `grad_reduction` differs from `reduction`
    ``total_weight``          the sum of the weights
    ``skipped_microbatches``  int32, how many were not finite, with `skip_nonfinite`
    ``stepped``               bool, whether `tx` took a step
    ``aux``                   with `has_aux` or `carry_argnum`
    ``noise_scale``           if asked for
    ``grad_metrics``          with `grad_metrics_fn`
    ========================  ======================================================================

    ``stepped`` is False:

    - within the cycle of a `tx` that accumulates, or a part of which does, as in `optax.partition`;
    - where `optax.apply_if_finite` rejects gradients, and nothing else moves;
    - if all microbatches were skipped or weigh 0. Then nothing is updated, except that an
      `accumulate` counts a mini step and ends no cycle.

  Raises:
    ValueError: A count, a name, an argument or a shape cannot work; arguments are missing, out of
      order or on another mesh; the state is of other parameters or optimizers, or `tx` changes its
      tree or shapes; or the loss was already reduced over the mesh, or divides by a sum over it, or
      sends something under a condition that devices do not share.
    TypeError: A value has the wrong type: the loss is not a real scalar, `tx` is not an optax
      transformation, or parameters are a flax `TrainState` or an nnx module.
    NotImplementedError: ``in_place=True`` with JAX before 0.10, in `jax.vmap`, or differentiated;
      or what is within an `accumulate` calls ``value_fn``.
    RuntimeError: An array was donated to an earlier step, which deleted it.

  The loss:
    The step is that of the whole batch if the loss is a mean over what the weights count, which
    ``step.check`` tests. For several denominators see the page "Your loss, and what to write".
    What `loss_fn` changes in place is lost: pass it as the carry, or use `nnx_train_step`.

  Over a mesh:
    `loss_fn` runs in `jax.shard_map` over `data_axis` and returns the loss of one device's rows
    (with further axes, of the rows that the devices along these share); the step averages over the
    global batch. Batch statistics are those of the device's own rows in one microbatch. "stack" and
    "concat" join the values of all devices, "concat" in the order of the batch. Parameters, state
    and carry keep their shardings: see the guide "Which way to shard".

    A loss that was reduced over devices (``lax.pmean``), or divided by ``lax.psum(count, axis)``,
    raises an error: return ``l.sum() / count``, and let `weight_fn` count. Where ``count`` is a
    Python number, only ``step.check`` finds the division.

    Other collectives over `data_axis` within the loss have the gradient of the whole batch, with
    weights too. If gradients go through them, the loss is multiplied by its weight before it is
    differentiated: return it in float32, and finite on a device whose weight is 0
    (``/ jnp.maximum(count, 1)``). With `skip_nonfinite` all devices then skip together, and with
    `in_place` a microbatch that is empty on one device runs if it counts on another.

    The compiler decides about other axes: write a sharding constraint as a bare `PartitionSpec` of
    these.

  The optimizer:
    ``tx.update`` gets ``value``, the loss; ``grad``, the gradients; ``weight``, the total weight (1
    with ``reduction="sum"``), so that k calls of N microbatches with ``tx=accumulate(inner, k)``
    are one step of k x N; and ``value_fn``, from parameters to the loss of the microbatches that
    counted, differentiable in the memory of one (with derivative 0 for parameters with their own
    `grad_reduction`). It is of one call, so line searches in `accumulate` are an error if k > 1.
    If one transformation of a chain raises an error for such a name, none of the chain gets it.
  """
  options = {
    k: x for k, x in locals().items() if k not in ("loss_fn", "tx", "donate")
  }
  package = str(getattr(loss_fn, "__module__", "")).partition(".")[0]
  if callable(tx) and package in ("optax", "optax_accum"):
    raise TypeError(
      "The loss comes before the optimizer: make_train_step(loss_fn, tx, ...)."
    )
  _validate.transformation(tx, "tx")
  _validate.booleans(donate=donate)
  tx = optax.with_extra_args_support(tx)
  return TrainStep(step_loss(loss_fn, **options), tx, donate)
