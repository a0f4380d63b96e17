"""What the steps of linen and nnx share: options, a layout of programs, and a count of steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import (
  Any,
  ClassVar,
  Literal,
  NamedTuple,
  ParamSpec,
  TypeAlias,
  TypedDict,
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
from optax_accum._arithmetic.trees import Batch, OptState, Params, Tree
from optax_accum._microbatches import parameters
from optax_accum._microbatches.grad_metrics import GradMetricsFn
from optax_accum._microbatches.options import WeightFn
from optax_accum._train_step.program import (
  Function,
  Loss,
  PreparedCall,
  Step,
  step_loss,
  StepProgram,
)

Metrics: TypeAlias = dict[str, Any]
LossFn: TypeAlias = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


class Arguments(NamedTuple):
  """The arguments of a program, or what stands for each of them."""

  params: Params = None
  opt_state: OptState = None
  batch: Batch = None
  constant: Tree = None  # what the loss leaves alone
  carried: Tree = None  # what each microbatch changes for the next, if anything
  rngs: Tree = None  # keys, if any
  count: Any = None  # of the optimizer's steps

  def of_loss(self):
    """Those of the loss, in its order."""
    return self.params, self.batch, self.constant, self.carried, self.rngs


_SLOT = Arguments(*Arguments._fields).of_loss().index  # in the loss, of a name
# What a program returns, before the metrics.
_UPDATED = "params", "opt_state", "carried", "count"


class StepOptions(TypedDict, total=False):
  """The options of `make_train_step` that a step of Flax takes too."""

  num_microbatches: int | None
  microbatch_size: int | None
  weight_fn: WeightFn | None
  aux_reduction: ReductionTree
  reduction: Literal["mean", "sum"]
  donate: bool
  skip_nonfinite: bool
  skip_empty: bool
  noise_scale: bool
  grad_metrics_fn: GradMetricsFn | None
  grad_metrics_reduction: ReductionTree
  mesh: jax.sharding.Mesh | None
  data_axis: str | Sequence[str]
  reduce_gradients: Literal["per_cycle", "per_microbatch"]
  axis_name: AxisName | None
  in_place: bool
  accumulator_dtype: DTypeLike | None
  grad_reduction: GradReductionTree
  carry_reduction: ReductionTree
  batch_axis: int | tuple[int, ...]


# Options that the steps have not, and why.
DECIDED = {
  "batch_argnums": "The batch is the second argument.",
  "batch_argnames": "The batch is the second argument.",
}


class FlaxStep(Step):
  """A step by a loss of a model, with the options of `make_train_step` that are the user's."""

  name: ClassVar[str]
  takes: ClassVar[str]  # the arguments of the loss
  names: ClassVar[Arguments]  # of the arguments of a program, in messages
  decided: ClassVar[Mapping[str, str]]  # options that it has not, and why
  fixes: ClassVar[Mapping[str, str]]  # what `check` says instead

  def __init__(
    self, loss_fn: LossFn, has_aux: bool, options: StepOptions, **own: Any
  ):
    known = [*own, "has_aux", *StepOptions.__annotations__]
    for option in options:
      if option not in known:
        why = _spellings.instead(option, known, self.decided)
        raise TypeError(f"{self.name} has no option {option!r}: {why}")
    _validate.check_takes(self.name, loss_fn, self.takes)
    self.__name__ = self.name
    self._loss_fn = loss_fn
    self.has_aux = has_aux
    self._shown = {**own, "has_aux": has_aux or None, **options}
    self._options: dict[str, Any] = dict(options)
    self._donate = self._options.pop("donate", True)
    _validate.booleans(donate=self._donate)

  def __repr__(self) -> str:
    loss = getattr(self._loss_fn, "__name__", repr(self._loss_fn))
    shown = [f"{k}={x!r}" for k, x in self._shown.items() if x is not None]
    return f"{self.name}({', '.join([loss, *shown])})"

  def _step_loss(self, loss_fn: LossFn, **decided) -> Loss:
    """The loss of a program, which returns ``(loss, (carried, aux))``."""
    return step_loss(
      loss_fn,
      has_aux=True,
      batch_argnums=_SLOT("batch"),
      carry_argnum=_SLOT("carried"),
      rng_argnums=_SLOT("rngs"),
      names=dict(enumerate(self.names.of_loss())),
      **self._options | decided,
    )

  def _program(
    self, loss: Loss, tx: optax.GradientTransformation
  ) -> StepProgram:
    tx, donate = optax.with_extra_args_support(tx), self._donate
    updated = tuple(map(Arguments._fields.index, _UPDATED))
    results = len(updated) + 1
    return StepProgram(
      loss, tx, donate, self._counting, results, updated, self.names
    )

  def _counting(self, run: Function) -> Function:
    """What is compiled: it also counts how many steps the optimizer took."""

    def counting(*args):
      *given, count = args
      params = Arguments(*args).params
      parameters.check_differentiable(self.names.params, params)
      *new, metrics = run(*given)
      if not self.has_aux:
        del metrics["aux"]
      count += metrics["stepped"].astype(count.dtype)
      return *new, count, metrics

    counting.__name__ = self.name
    return counting

  def _of_loss(self, args: Sequence[Any]):
    batch = args[self.batch_position]
    return Arguments(batch=batch).of_loss()

  def _checked(self, call: PreparedCall):
    """The report of `check` on a call."""
    args = Arguments(*call.args).of_loss()
    drawing = "rng", "carry", "shared"
    return call.check(args, drawing=drawing, fixes=self.fixes)


def after(call: PreparedCall, results) -> tuple[Arguments, Metrics]:
  """The arguments of a call as a step leaves them, and the metrics."""
  *new, metrics = results
  updated = dict(zip(_UPDATED, new, strict=True))
  return Arguments(*call.args)._replace(**updated), metrics


def check_calls(step: str, value: object, method: str) -> None:
  """Refuses an object whose class has a `method` of a user's own, which a step does not call."""
  kind = type(value)
  found = getattr(kind, method)
  module = getattr(found, "__module__", "")
  if module.partition(".")[0] not in ("flax", "optax_accum"):
    where = f"{module}.{getattr(found, '__qualname__', method)}"
    raise TypeError(
      f"{kind.__name__} has a method {method} that flax has not written ({where}), and {step}"
      " does not call it. Put what it does to gradients into tx, optax.chain(change, tx), and do"
      " the rest after the step: an average of weights, which begins with a copy of them, is"
      ' optax.incremental_update(new_params, average, 0.1 * metrics["stepped"]). Then'
      f" pass an object whose class has no {method} of its own."
    )


def hinted(
  call: str, places: str, names: Mapping[str, str]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Decorates the methods of a step that take such a call, to say where else keys and arrays go."""
  return _spellings.hinted(
    f"It takes {call}. Fix a setting in the loss, functools.partial(loss_fn, train=True), and make"
    f" a step for each value. Put arrays with rows into the batch, keys into {places}.",
    **names,
  )
