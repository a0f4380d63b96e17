"""What the steps of linen and nnx share: options, and a count of the optimizer's steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import (
  Any,
  ClassVar,
  Literal,
  ParamSpec,
  TYPE_CHECKING,
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
from optax_accum._arithmetic.trees import Args, Kwargs, OptState, Params, Tree
from optax_accum._microbatches import parameters
from optax_accum._microbatches.options import Slot, WeightFn
from optax_accum._train_step.program import (
  Loss,
  PreparedCall,
  Step,
  step_loss,
  StepProgram,
)

if TYPE_CHECKING:
  from optax_accum._check_split.report import SplitReport

Metrics: TypeAlias = dict[str, Any]
LossFn: TypeAlias = Callable[..., Any]
P = ParamSpec("P")
Result = TypeVar("Result")
# Of a call of a program, and the state or the Variables that hold its arguments.
Use: TypeAlias = Callable[[PreparedCall, Any], Result]


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
  mesh: jax.sharding.Mesh | None
  data_axis: str | Sequence[str]
  reduce_gradients: Literal["per_cycle", "per_microbatch"]
  axis_name: AxisName | None
  in_place: bool
  accumulator_dtype: DTypeLike | None
  grad_reduction: GradReductionTree
  carry_reduction: ReductionTree
  batch_axis: int | tuple[int, ...]


class FlaxStep(Step):
  """A step by a loss of a model, with the options of `make_train_step` that are the user's."""

  further_results = 2  # the count and the metrics
  name: ClassVar[str]
  takes: ClassVar[str]  # the arguments of the loss
  slot_names: ClassVar[
    Mapping[Slot, str]
  ]  # of the arguments of the loss of a program, in messages
  decided: ClassVar[
    Mapping[str, str]
  ]  # options of `make_train_step` that it has not, and why
  fixes: ClassVar[Mapping[str, str]]  # what `check` says instead

  def __init__(
    self, loss_fn: LossFn, has_aux: bool, options: StepOptions, **own: Any
  ):
    batch = dict.fromkeys(
      ("batch_argnums", "batch_argnames"), "The batch is the second argument."
    )
    known = [*own, "has_aux", *StepOptions.__annotations__]
    for option in options:
      if option not in known:
        why = _spellings.instead(option, known, {**batch, **self.decided})
        raise TypeError(f"{self.name} has no option {option!r}: {why}")
    _validate.check_takes(self.name, loss_fn, self.takes)
    self.__name__, self._loss_fn, self.has_aux = self.name, loss_fn, has_aux
    self._shown = {**own, "has_aux": has_aux or None, **options}
    self._options: Kwargs = dict(options)
    self._donate = self._options.pop("donate", True)
    _validate.booleans(donate=self._donate)
    self._programs: dict[object, StepProgram] = {}

  def __repr__(self) -> str:
    loss = getattr(self._loss_fn, "__name__", repr(self._loss_fn))
    named = [
      f"{name}={value!r}"
      for name, value in self._shown.items()
      if value is not None
    ]
    return f"{self.name}({', '.join([loss, *named])})"

  def _program(
    self, loss: Loss, tx: optax.GradientTransformation
  ) -> StepProgram:
    return StepProgram(
      self, loss, optax.with_extra_args_support(tx), self._donate
    )

  def _check_arguments(self, params: Params, *others: Tree, **_: Tree) -> None:
    parameters.check_differentiable(self.slot_names[0], params)

  def _finished(self, run: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled: it also counts how many steps the optimizer took.

    Its arguments are the parameters, the optimizer state, the batch, what the loss leaves alone,
    what it changes (without arrays where it changes nothing), keys if any, and the count.
    """

    def counting(params: Params, opt_state: OptState, /, *args: Any) -> Args:
      *others, count = args
      *new, metrics = run(params, opt_state, *others)
      if not self.has_aux:
        del metrics["aux"]
      return *new, count + metrics["stepped"].astype(count.dtype), metrics

    counting.__name__ = self.name
    return counting

  def _step_loss(self, loss_fn: LossFn, **decided: Any) -> Loss:
    """The loss of a `StepProgram`, which returns ``(loss, (new_carry, aux))``."""
    options = {**self._options, **decided, "names": self.slot_names}
    return step_loss(
      loss_fn, has_aux=True, batch_argnums=1, carry_argnum=3, **options
    )

  def _checked(self, call: PreparedCall, _: Any) -> "SplitReport":
    drawing, args = ("rng", "carry", "shared"), (call.args[0], *call.args[2:-1])
    return self._report(call, args, drawing=drawing, fixes=self.fixes)

  def _traced(self, call: PreparedCall, _: Any) -> jax.stages.Traced:
    traced: jax.stages.Traced = call.jitted.trace(*call.args)
    return traced


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
  call: str, places: str, decided: Mapping[str, str]
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
  """Decorates the methods of a step that take such a call, to say where else keys and arrays go."""
  return _spellings.hinted(
    f"It takes {call}. Fix a setting in the loss, functools.partial(loss_fn, train=True), and make"
    f" a step for each value. Put arrays with rows into the batch, keys into {places}.",
    **decided,
  )
