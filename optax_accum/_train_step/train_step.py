"""`make_train_step`: N backward passes and one optimizer step in one jitted call."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import inspect
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TYPE_CHECKING, TypeVar

import jax
from jax.typing import DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import GradReductionTree, ReductionTree
from optax_accum._microbatches import cut, parameters
from optax_accum._microbatches.options import OTHER_NAMES, WeightFn
from optax_accum._train_step.program import PreparedCall, StepProgram
from optax_accum._train_step.step import Step, step_loss

OptState = TypeVar("OptState")
if TYPE_CHECKING:  # with defaults, which Python has from 3.13 on: a bare TrainStep is an annotation
  import typing_extensions

  from optax_accum._check_split.report import SplitReport

  Params = typing_extensions.TypeVar("Params", default=Any)
  Args = typing_extensions.ParamSpec("Args", default=...)
else:
  Params, Args = TypeVar("Params"), ParamSpec("Args")


class TrainStep(Step, Generic[Params, Args]):
  """A jitted training step, made by `make_train_step`.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)``: from the batch on, the
  arguments of the loss function, by position or by name. `make_train_step` describes the metrics.
  """

  def __init__(self, program: StepProgram):
    self._program, self.loss = program, program.loss
    self.__name__, self.__signature__ = "train_step", _signature(program.local.fun)

  def rows(self, args: Sequence[Any]) -> int | None:
    """The rows of the batch that a call is given, on all devices."""
    arguments: dict[Any, Any] = dict(enumerate((args[0], *args[2:])))
    roles = self.loss.local.split.roles(self.loss.local.fun, tuple(arguments.values()), {}, (0,))
    return cut.batch_rows(roles.batch, arguments)

  def __call__(
    self, /, params: Params, opt_state: OptState, *args: Args.args, **kwargs: Args.kwargs
  ) -> tuple[Params, OptState, *tuple[Any, ...]]:
    """Takes one step: the new parameters, the new optimizer state, and the metrics."""
    with self._prepared((params, opt_state, *args), kwargs) as call:
      return self._program.run(call)

  def check(
    self, params: Params, opt_state: OptState, *args: Args.args, **kwargs: Args.kwargs
  ) -> "SplitReport":
    """Whether microbatches leave the loss as it is; if not, why and what to write.

    `check_split` with the loss and the options of the step, for the arguments of a call, on one
    device. Nothing is donated or changed. It runs the first 4 rows of the batch unless these tell
    nothing; ``report.not_checked`` says so.

    Raises:
      Exception: What the call raises. Also inside `jax.jit`, for a batch of one row, for a loss
        with collectives, and where one device has no room.
    """
    with self._prepared((params, opt_state, *args), kwargs) as call:
      return self._report(self.loss.local, (call.args[0], *call.args[2:]), call.kwargs)

  def lower(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function. Its arguments may be `jax.ShapeDtypeStruct`."""
    with self._prepared((params, opt_state, *args), kwargs) as call:
      return call.jitted.lower(*call.args, **call.kwargs)

  def trace(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """As ``trace`` of a jitted function."""
    with self._prepared((params, opt_state, *args), kwargs) as call:
      return call.jitted.trace(*call.args, **call.kwargs)

  def eval_shape(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``eval_shape`` of a jitted function: shapes and dtypes of what a call returns."""
    with self._prepared((params, opt_state, *args), kwargs) as call:
      return call.jitted.eval_shape(*call.args, **call.kwargs)

  @contextlib.contextmanager
  def _prepared(self, given: Any, kwargs: Any) -> Iterator[PreparedCall]:
    """The call. An error in it says first what was passed wrongly."""
    try:
      yield self._program.prepare(given, kwargs)
    except Exception:
      fun = self._program.local.fun
      if why := _validate.hint_on(fun, (given[0], *given[2:]), kwargs, OTHER_NAMES):
        raise TypeError(f"step: {why}") from None
      parameters.check_order(self._program.tx, *given)
      self._program.check(given, kwargs)
      raise

  def __repr__(self) -> str:
    split, parallel = self.loss.local.split, self.loss.parallel
    size = "microbatch_size" if split.num_microbatches is None else "num_microbatches"
    mesh = f", mesh={parallel.mesh}" if parallel else ""
    name = getattr(self.loss.local.fun, "__name__", repr(self.loss.local.fun))
    donate = self._program.donate
    return f"TrainStep({name}, {size}={getattr(split, size)}{mesh}, donate={donate})"


@_validate.hinted(
  "Options go by name: make_train_step(loss_fn, tx, num_microbatches=8).", names=OTHER_NAMES
)
def make_train_step(
  loss_fn: Callable[Concatenate[Params, Args], Any],
  tx: optax.GradientTransformation,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  weight_fn: WeightFn | None = None,
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
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  reduce_gradients: Literal["per_cycle", "per_microbatch"] = "per_cycle",
  axis_name: AxisName | None = None,
  in_place: bool = False,
  accumulator_dtype: DTypeLike | None = None,
  unroll: int | bool = 1,
  grad_reduction: GradReductionTree = None,
  carry_reduction: ReductionTree = None,
  concat_axis: int | None = None,
  batch_axis: int | tuple[int, ...] = 0,
  batch_argnames: str | Sequence[str] = (),
  rng_argnames: str | Sequence[str] = (),
) -> TrainStep[Params, Args]:
  """Makes a jitted training step that runs its batch in microbatches.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` computes the loss and the
  gradients of the whole batch, one microbatch after the other, and takes one optimizer step.

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
      scalar. Positions, in the options below, count its arguments: 0 is the parameters, 1 is the
      batch.
    tx: Any optax transformation except `optax.lookahead`, whose gradients have another tree than
      its parameters. For that one use `microbatch_value_and_grad`.
    num_microbatches: The number of equal parts that the batch is split into. It must divide the
      rows of the batch, or with `mesh` the rows on each device. Give this or `microbatch_size`.
    microbatch_size: The rows of one microbatch. The last microbatch may have fewer, and then counts
      less. With `mesh`, the rows on all devices together: a multiple of the number of devices.
    weight_fn: ``weight_fn(batch) -> scalar``, how much a microbatch counts, such as its number of
      valid tokens: 0, or from 1e-30 to 1e30. It gets the arguments that are split, as the call has
      them. Default: the number of rows.
    has_aux: Whether `loss_fn` returns ``(loss, aux)``.
    aux_reduction: How the aux of all microbatches is combined: a word, or a prefix tree of words,
      as in `microbatch`. Default: the weighted mean. An aux with one value for each row is then an
      error: choose ``"concat"``, or ``"mean"`` if you do mean it.
    batch_argnums: The positions of the arguments that are split: pytrees of arrays, which all have
      the same number of rows. Default: 1. If another argument has as many rows, the default is an
      error: give ``(1, 2)`` to split both, or ``1`` to pass the other whole to each microbatch.
    reduction: ``"mean"``, weighted; or ``"sum"``, for a loss that is a sum over rows.
    donate: Whether parameters and optimizer state are updated in place, which deletes the arrays
      that are passed in. Otherwise memory must hold both twice. An array that another argument
      holds too, such as a teacher that starts as the parameters, is copied and lives on.

  Randomness and carried state:
    rng_argnums: The positions of random keys, typed or raw, or of pytrees of keys. Microbatch ``i``
      gets ``jax.random.fold_in(key, i)``. Over devices, each folds its index in first. Default:
      none, and a typed key that is not named is an error. ``()`` shares one key.
    carry_argnum: The position of an argument that each microbatch updates for the next, such as
      batch statistics. `loss_fn` then returns ``(loss, (new_carry, aux))``, and the step returns
      the new carry before the metrics. Microbatches of weight 0 do not change it.

  Robustness and monitoring:
    skip_nonfinite: Whether to leave out a microbatch whose loss or gradients are not finite.
      "stack" and "concat" still have its values, and reverse-mode derivatives are then NaN.
    skip_empty: Whether to save the time of a microbatch of weight 0, by not running it. "stack" and
      "concat" have zeros for it. Needs `weight_fn`. Reverse-mode differentiation cannot pass.
    noise_scale: Whether to estimate which batch size is worth having: ``metrics["noise_scale"]`` is
      a `NoiseScaleTerms` for `gradient_noise_scale`. Needs two microbatches or more on all devices
      together, and neither `in_place` nor ``reduction="sum"``.

  Several devices:
    mesh: A `jax.sharding.Mesh`, with explicit axes, automatic axes or both. Rows are sharded over
      `data_axis`; the compiler decides about other axes. Arrays that are not on the mesh are put
      there, and an optimizer state with the shape of a parameter where that parameter is. Default:
      one device. See "Over a mesh" below.
    data_axis: The axis of the mesh that the rows are sharded over, or several, such as
      ``("data", "fsdp")``.
    reduce_gradients: When gradients are summed over devices: ``"per_cycle"``, once, after the last
      microbatch; or ``"per_microbatch"``, which communicates more, and needs less memory where
      parameters are sharded over the data axis.
    axis_name: For a step inside `pmap` or `shard_map`, instead of `mesh`: the axis that the rows
      are sharded over. Gradients are summed over it once, after the last microbatch.

  Expert options:
    in_place: Whether the backward pass adds each layer's gradient to the accumulator at once. This
      saves memory where layers are scanned. Needs JAX 0.10, and parameters in the dtype of their
      accumulators. The page "Sharp edges" has what it saves, and what it does not go with.
    accumulator_dtype: The dtype that losses and gradients are added up in. Default: float32 or
      wider.
    unroll: As in `jax.lax.scan`.
    grad_reduction: A word or a prefix tree of words, where gradients are not combined as losses
      are: ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"last"``. It is for parameters that are
      overwritten with their "gradient", such as fp8 statistics: `tx` must then overwrite them too,
      as with `linen_train_step`. Default: `reduction`.
    carry_reduction: How the carries of all devices are combined: a word or a prefix tree of words.
      ``"mean"`` (weighted, the default for floats), ``"max"`` (the default for integers),
      ``"min"``, or ``"sum"``, the start plus all increments. Of keys, the first device's stay.
    concat_axis: The axis that "concat" joins. Default: 0. Needed where `batch_axis` is not 0.
    batch_axis: The axis that is split: one for all arrays, or a tuple with one for each argument,
      in the order of `batch_argnums` and then of `batch_argnames`.
    batch_argnames: The names of keyword arguments that are split too.
    rng_argnames: The names of keyword arguments that are random keys.

  Returns:
    A `TrainStep`. Arguments of `loss_fn` after the batch follow the batch in the call. All are
    traced, so fix a setting with ``functools.partial(loss_fn, train=True)``. ``metrics`` is a dict
    of arrays: ``loss``; ``grad_norm``, the global norm of the gradients that `tx` gets, in float32
    or wider, without those whose `grad_reduction` is another than `reduction`; ``total_weight``;
    ``skipped_microbatches`` (int32); ``stepped`` (bool), whether `tx` took a step; ``aux``, with
    `has_aux` or `carry_argnum`; ``noise_scale``, if asked for.

    ``stepped`` is False if nothing counted, because all weights are 0 or all microbatches were
    skipped: parameters and optimizer state stay as they were (but an `accumulate` counts a mini
    step). It is also False inside a cycle, if `tx` is an `accumulate` or an `optax.MultiSteps`, or
    one around another. Where only a part of `tx` is, as in `optax.partition`, it tells of that.

  Raises:
    ValueError, TypeError: As `microbatch_value_and_grad`. Also: `tx` is not an optax
      transformation; the parameters are a flax `TrainState` or an nnx module; arguments are missing
      or in another order; the optimizer state belongs to other parameters or to another optimizer;
      `noise_scale` with one microbatch. With `mesh`: `data_axis` is not one of its axes; the
      devices do not divide the rows; arrays are on another mesh; the loss was already reduced.
    RuntimeError: An array was donated to an earlier step, which deleted it.
    NotImplementedError: As `microbatch_value_and_grad`, with `in_place`.

  The loss:
    The step is that of the whole batch if the loss is a mean over what the weights count: check
    with ``step.check``. A sum of means over different things has no such weight: divide each term
    by its total over the batch. A product of means, such as a router's balance loss, needs all rows
    at once: use `microbatch`. The guide to padded text has both. What `loss_fn` changes in place,
    such as statistics of an nnx module, is lost: pass it as the carry, or use `nnx_train_step`.

  Over a mesh:
    `loss_fn` runs in `jax.shard_map` over `data_axis`. It gets the rows of one device and returns
    their loss; the step computes the mean over the global batch. So the loss must not call
    ``lax.pmean``, which is an error, nor divide by ``lax.psum(count, axis)``, which is wrong and
    not noticed. Return ``l.sum() / count``, and let `weight_fn` count. Batch statistics are those
    of the device's rows. "stack" and "concat" join what the devices have, "concat" in the order of
    the batch. A sharding constraint in the loss must be a bare `PartitionSpec`, of other axes.

    Parameters, optimizer state and carry keep the sharding that they came with: also over the data
    axis (FSDP), or the state alone (ZeRO-1). An optimizer that raises a ``ShardingTypeError``
    there, over explicit axes, works over automatic ones.

  The optimizer:
    ``tx.update`` gets ``value``, the loss; ``grad``, the gradients; ``value_fn``, the loss of this
    batch as a function of the parameters, for a line search; and ``weight``, the total weight (1
    with ``reduction="sum"``). So with ``tx=accumulate(inner, k)``, k calls of N microbatches are
    one step of k x N. A call in which nothing counted ends no cycle. ``value_fn`` leaves out the
    microbatches that did not count. Its derivative needs the memory of one microbatch, and is 0 for
    parameters with a `grad_reduction` of their own.

    Reverse-mode differentiation passes through a step, unless `weight_fn` or `skip_nonfinite` may
    leave it without any change. Forward-mode does. `in_place` refuses both.
  """
  options = {k: x for k, x in locals().items() if k not in ("loss_fn", "tx", "donate")}
  optimizers = optax.GradientTransformation, optax.MultiSteps
  of_optax = isinstance(loss_fn, optimizers) or getattr(loss_fn, "__module__", "")[:5] == "optax"
  if of_optax and callable(tx):
    raise TypeError("The loss comes before the optimizer: make_train_step(loss_fn, tx, ...).")
  _validate.transformation(tx, "tx")
  _validate.booleans(donate=donate)
  results = 3 if carry_argnum is None else 4
  tx = optax.with_extra_args_support(tx)
  return TrainStep(StepProgram(step_loss(loss_fn, **options), tx, (0, 1), results, donate))


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
  """The signature of a step, with the names that `loss_fn` gives to what follows the parameters."""
  kind = inspect.Parameter
  first = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in ("params", "opt_state")]
  try:
    parameters = list(inspect.signature(loss_fn).parameters.values())
    named = parameters and parameters[0].kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    return inspect.Signature([*first, *parameters[bool(named) :]])
  except (TypeError, ValueError):  # it has none, or one that these two names do not go with
    return inspect.signature(lambda params, opt_state, *args, **kwargs: None)
