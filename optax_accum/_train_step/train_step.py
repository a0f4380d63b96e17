"""`make_train_step`: N backward passes and one optimizer step in one jitted call, a `TrainStep`."""

from collections.abc import Callable, Sequence
import inspect
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TYPE_CHECKING, TypeVar

import jax
from jax.typing import DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic.across_devices import AxisName
from optax_accum._arithmetic.reduction_words import GradReductionTree, ReductionTree
from optax_accum._microbatches import cut
from optax_accum._microbatches.options import WeightFn
from optax_accum._train_step.program import StepProgram
from optax_accum._train_step.step import Step, step_loss

OptState = TypeVar("OptState")
if TYPE_CHECKING:  # with defaults, which Python has from 3.13 on: a bare TrainStep is an annotation
  import typing_extensions

  Params = typing_extensions.TypeVar("Params", default=Any)
  Args = typing_extensions.ParamSpec("Args", default=...)
else:
  Params, Args = TypeVar("Params"), ParamSpec("Args")


class TrainStep(Step, Generic[Params, Args]):
  """A jitted training step, made by `make_train_step`.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)``. From the batch on, the
  arguments are those of the loss function, by position or by name. With `carry_argnum` the new
  carry comes before the metrics, a dict that `make_train_step` describes.
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
    return self._program.run(self._program.prepare((params, opt_state, *args), kwargs))

  def lower(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function. Its arguments may be `jax.ShapeDtypeStruct`.

    ``step.lower(...).compile().memory_analysis()`` tells the memory before anything runs.
    """
    call = self._program.prepare((params, opt_state, *args), kwargs)
    return call.jitted.lower(*call.args, **call.kwargs)

  def trace(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """As ``trace`` of a jitted function."""
    call = self._program.prepare((params, opt_state, *args), kwargs)
    return call.jitted.trace(*call.args, **call.kwargs)

  def eval_shape(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``eval_shape`` of a jitted function: shapes and dtypes of what a call returns."""
    call = self._program.prepare((params, opt_state, *args), kwargs)
    return call.jitted.eval_shape(*call.args, **call.kwargs)

  def __repr__(self) -> str:
    split, parallel = self.loss.local.split, self.loss.parallel
    size = "microbatch_size" if split.num_microbatches is None else "num_microbatches"
    mesh = f", mesh={parallel.mesh}" if parallel else ""
    name = getattr(self.loss.local.fun, "__name__", repr(self.loss.local.fun))
    donate = self._program.donate
    return f"TrainStep({name}, {size}={getattr(split, size)}{mesh}, donate={donate})"


@_validate.hinted(
  "Options go by name: make_train_step(loss_fn, tx, num_microbatches=8).",
  names={
    "every_k": "every_k= is num_microbatches= here, because a call gets the whole batch.",
    "every_k_schedule": "every_k_schedule= of optax.MultiSteps is num_microbatches= here.",
    "gradient_accumulation_steps": "gradient_accumulation_steps= is num_microbatches= here.",
  },
)
def make_train_step(
  loss_fn: Callable[Concatenate[Params, Args], Any],
  tx: optax.GradientTransformation,
  *,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  has_aux: bool = False,
  batch_argnums: int | Sequence[int] | None = None,
  batch_argnames: str | Sequence[str] = (),
  batch_axis: int | tuple[int, ...] = 0,
  reduction: Literal["mean", "sum"] = "mean",
  grad_reduction: GradReductionTree = None,
  weight_fn: WeightFn | None = None,
  aux_reduction: ReductionTree = None,
  concat_axis: int | None = None,
  rng_argnums: int | Sequence[int] | None = None,
  rng_argnames: str | Sequence[str] = (),
  carry_argnum: int | None = None,
  carry_reduction: ReductionTree = None,
  accumulator_dtype: DTypeLike | None = None,
  skip_nonfinite: bool = False,
  skip_empty: bool = False,
  in_place: bool = False,
  axis_name: AxisName | None = None,
  unroll: int | bool = 1,
  noise_scale: bool = False,
  donate: bool = True,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str | Sequence[str] = "data",
  reduce_gradients: Literal["per_cycle", "per_microbatch"] = "per_cycle",
) -> TrainStep[Params, Args]:
  """A jitted training step on a batch that is run in microbatches.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` computes the loss and
  gradients of the whole batch as `microbatch_value_and_grad` does, and takes one optimizer step
  with them, in one XLA program. If nothing in the batch counted (all weights zero, or all
  microbatches skipped), no parameter moves and the optimizer state stays, but for the mini steps of
  `accumulate`; the metrics say so. What `loss_fn` changes in place, such as the statistics of a
  flax nnx module, is lost: thread it with `carry_argnum` (``nnx.split``).

  A loss of several terms, means over different things, has no one weight: divide each term by its
  total over the batch, as the guide to padded text does. A product of means, such as a router's
  balance, needs all rows at once: that guide computes the means by `microbatch`.

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
    loss_fn: ``loss_fn(params, batch, ...)``, as `microbatch_value_and_grad` asks for. Positions,
      in the options below, count its arguments: 0 are the parameters, 1 is the batch.
    tx: Any optax transformation but `optax.lookahead`, which needs the gradients of another tree
      (give it those of `microbatch_value_and_grad`). What it is told: "The optimizer" below.
    num_microbatches: How many equal parts the batch is cut into. Must divide the rows (with `mesh`
      those of each device). Give this or `microbatch_size`.
    microbatch_size: The rows of one microbatch, whatever the batch. The last microbatch may be
      smaller. With `mesh` the rows on all devices together: a multiple of their number.
    has_aux: Whether `loss_fn` returns ``(loss, aux)``.
    batch_argnums: This, and all down to `unroll`, as in `microbatch_value_and_grad`.
    batch_argnames: The names of keyword arguments that are split too.
    batch_axis: The axis that is split, one for all leaves or a tuple with one for each argument.
    reduction: ``"mean"`` or ``"sum"``, of losses and gradients.
    grad_reduction: How gradients are reduced, where not all as losses are: for fp8 statistics. What
      they reduce to still goes through `tx`, which must overwrite and not step (see the guide to
      half precision). `linen_train_step` does both.
    weight_fn: How much a microbatch counts. It gets the batch by name where the call does.
    aux_reduction: How aux is reduced: a word or a prefix tree of words, as in `microbatch`.
      Default: the mean of what has no value for each row.
    concat_axis: The axis of aux that "concat" joins, 0 by default.
    rng_argnums: The positions of random keys, folded with the microbatch's index.
    rng_argnames: The names of such keyword arguments.
    carry_argnum: The position of an argument that is threaded through the microbatches.
    carry_reduction: With a mesh, how the devices' carries become one.
    accumulator_dtype: The dtype that losses and gradients are added up in.
    skip_nonfinite: Whether to leave out a microbatch whose loss or gradients are not finite.
    skip_empty: Whether a microbatch of weight zero is not run at all.
    in_place: Whether gradients are added up within the backward pass.
    axis_name: The axis that the batch is spread over, inside `pmap` or `shard_map`.
    unroll: As in `jax.lax.scan`.
    noise_scale: Whether to estimate what batch is worth having: ``metrics["noise_scale"]``, a
      `NoiseScaleTerms` for `gradient_noise_scale`. Parameters are the same to the bit, but for
      embeddings, whose gradients XLA adds up in another order. Needs two microbatches or more on
      all devices together, and neither `in_place` nor ``reduction="sum"``.
    donate: Whether parameters and optimizer state are updated in place. The arrays that are
      passed in are then deleted. Otherwise memory must hold both twice. An array that is passed
      again, as a teacher that starts as the parameters is, is donated as a copy and lives on.
    mesh: A `jax.sharding.Mesh` of explicit or automatic axes, or of both. Rows are spread over
      `data_axis`, and other axes are left to the compiler. Arrays that are not on the mesh are put
      there: what of the state has a parameter's shape, where that parameter is. Default: one
      device. See "Over a mesh" below.
    data_axis: The axis of the mesh that the rows are spread over, or several: ``("data", "fsdp")``.
    reduce_gradients: When gradients are summed over the devices: ``"per_cycle"``, once, after the
      last microbatch, or ``"per_microbatch"``, after each, which communicates more. It needs less
      memory where parameters are sharded over the data axis.

  Returns:
    A `TrainStep`. Arguments of `loss_fn` after the batch follow the batch in the call, and all are
    traced; fix a setting by ``functools.partial(loss_fn, train=True)``. With `carry_argnum` the new
    carry comes before the metrics. ``metrics`` is a dict of arrays: ``loss``; ``grad_norm``, the
    global norm of the gradients before `tx`, in float32 or better, without those whose
    `grad_reduction` is not `reduction`; ``total_weight``; ``skipped_microbatches`` (int32);
    ``stepped`` (bool), whether `tx` took a step: not where nothing counted, and of the calls of an
    `accumulate` or `MultiSteps` in it only in those that end a cycle; ``aux``, with `has_aux` or
    `carry_argnum`; and ``noise_scale``, if asked for. Reverse-mode differentiation passes through a
    step unless `weight_fn` or `skip_nonfinite` can have it move nothing; forward mode always does.

  Raises:
    ValueError, TypeError: As `microbatch_value_and_grad`. Also: `tx` is no optax transformation;
      the parameters are a flax `TrainState` or an nnx module, of which they are a part; arguments
      are in another order, or there is no batch; the state is that of other parameters or of
      another optimizer; there is one microbatch, with `noise_scale`; `mesh` and `axis_name` are
      both given, or the one that the call wants is not. With `mesh`: `data_axis` is no axis of it;
      the devices do not divide the rows; arrays are on another mesh; the loss was reduced already.
    RuntimeError: An array was donated to an earlier step, which deleted it.
    NotImplementedError: As `microbatch_value_and_grad`, with `in_place`.

  Over a mesh:
    `loss_fn` runs inside `jax.shard_map` over `data_axis`, on the rows of one device, and returns
    the loss of these. The mean is that of the global batch. So the loss has no ``lax.pmean``, which
    is refused, and divides by no ``lax.psum(count, axis)``, which is wrong, unnoticed: return
    ``l.sum() / count``, and let `weight_fn` count. Batch statistics are those of the device's rows.
    "stack" and "concat" have the devices' parts one after the other: for "concat", the order of the
    batch. A sharding constraint in the loss may name other axes alone, as a bare `PartitionSpec`.

    Parameters, optimizer state and carry come out sharded as they came: over the data axis too
    (FSDP), and the state alone (ZeRO-1). The guide "Sharded parameters and state" has what is then
    gathered and scattered, and when; "Several devices" has the rest.

  The optimizer:
    ``tx.update`` is given ``value``, the loss; ``grad``, the gradient; ``value_fn``, the loss of
    this batch at other parameters, for a line search, without the microbatches that did not count
    at the present ones; and ``weight``, the total weight (1 under ``reduction="sum"``). So with
    ``tx=accumulate(inner, k)`` k calls of N microbatches are one step of k x N. A call of which
    nothing counted ends no cycle. ``value_fn`` can be differentiated, at the memory of one
    microbatch; its derivative is zero by parameters whose `grad_reduction` is not `reduction`.
  """
  options = {k: x for k, x in locals().items() if k not in ("loss_fn", "tx", "donate")}
  if isinstance(loss_fn, optax.GradientTransformation) and callable(tx):
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
