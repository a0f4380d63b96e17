"""What the steps of linen and nnx share: options, a layout of programs, and a count of steps."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import (
  Any,
  ClassVar,
  Literal,
  NamedTuple,
  TYPE_CHECKING,
  TypeAlias,
  TypedDict,
)

import jax
from jax.typing import DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic.reduction_words import ReductionTree
from optax_accum._arithmetic.trees import (
  Args,
  Batch,
  Kwargs,
  OptState,
  Params,
  Tree,
)
from optax_accum._microbatches import parameters
from optax_accum._microbatches.options import Slots, WeightFn
from optax_accum._train_step.cycle import Cycle, CycleProgram, method
from optax_accum._train_step.program import (
  Function,
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
Use: TypeAlias = Callable[[PreparedCall], Any]


class Further(NamedTuple):
  """Further arguments of a call and of the loss. Messages call them by these names."""

  args: Args
  kwargs: Kwargs


class Arguments(NamedTuple):
  """The arguments of a program, or what stands for each of them."""

  params: Params = None
  opt_state: OptState = None
  batch: Batch = None
  constant: Tree = None  # what the loss leaves alone
  carried: Tree = None  # what each microbatch changes for the next, if anything
  rngs: Tree = None  # keys, if any
  further: Tree = Further((), {})  # what the loss takes beside these, unsplit
  count: Any = None  # of the optimizer's steps

  def of_loss(self):
    """Those of the loss, in its order."""
    params, _, *others, _ = self
    return params, *others


_SLOT = Arguments(*Arguments._fields).of_loss().index  # in the loss, of a name
# What a program returns, before the metrics.
_UPDATED = "params", "opt_state", "carried", "count"


class StepOptions(TypedDict, total=False):
  """The options of `make_train_step` that a step of Flax takes too."""

  num_microbatches: int | None
  microbatch_size: int | None
  weight_fn: WeightFn | None
  has_weight: bool
  aux_reduction: ReductionTree
  batch_argnums: Slots
  reduction: Literal["mean", "sum"]
  donate: bool
  skip_nonfinite: bool
  noise_scale: bool
  mesh: jax.sharding.Mesh | None
  data_axis: str | Sequence[str]
  in_place: bool
  accumulator_dtype: DTypeLike | None
  carry_reduction: ReductionTree


UNSPLIT = (
  "Put what has the batch's rows into the batch. If every microbatch needs all of it, say that the"
  " batch alone is split, batch_argnums=1."
)


class FlaxStep(Step):
  """A step by a loss of a model, with the options of `make_train_step` that are the user's."""

  name: ClassVar[str]
  takes: ClassVar[str]  # the arguments of the loss
  names: ClassVar[Arguments]  # of the arguments of a program, in messages
  decided: ClassVar[Mapping[str, str]]  # options that it has not, and why
  fixes: ClassVar[Mapping[str, str]]  # what errors and `check` say instead
  call: ClassVar[str]  # as messages show it
  keys: ClassVar[str]  # where they go
  # ``(use, *args, **kwargs)``: what such a call updates, and what `use` makes of the program, its
  # arguments, and what else is kept.
  _on_program: Callable[..., tuple[Any, Any]]

  def __init__(
    self, loss_fn: LossFn, has_aux: bool, options: StepOptions, **own: Any
  ):
    known = [*own, "has_aux", *StepOptions.__annotations__]
    for option in options:
      if option not in known:
        why = self.decided.get(option, f"It takes {', '.join(known)}.")
        raise TypeError(f"{self.name} has no option {option!r}: {why}")
    _validate.check_takes(self.name, loss_fn, self.takes)
    self.__name__ = self.name
    self._loss_fn = loss_fn
    self.has_aux = has_aux
    self._shown = {**own, "has_aux": has_aux or None, **options}
    self._options: dict[str, Any] = dict(options)
    if options.get("batch_argnums") not in (None, 1):
      raise ValueError(
        f"{self.name} splits the batch alone: put what has its rows into the batch, and give"
        " batch_argnums=1 only if a further argument has as many by chance."
      )
    self._donate = self._options.pop("donate", True)
    _validate.booleans(donate=self._donate)
    # Of `finish` parameters, state, carry and count are updated.
    make = functools.partial(CycleProgram, updated=(0, 1, 3, 4))
    self._cycle_of = functools.cache(make)  # of a `StepProgram`

  def __repr__(self) -> str:
    loss = getattr(self._loss_fn, "__name__", repr(self._loss_fn))
    shown = [f"{k}={x!r}" for k, x in self._shown.items() if x is not None]
    return f"{self.name}({', '.join([loss, *shown])})"

  def _step_loss(self, loss_fn: LossFn, **decided) -> Loss:
    """The loss of a program, which returns ``(loss, (carried, aux))``."""
    return step_loss(
      loss_fn,
      has_aux=True,
      carry_argnum=_SLOT("carried"),
      rng_argnums=_SLOT("rngs"),
      of_step=(_SLOT("constant"),),
      names=dict(enumerate(self.names.of_loss())),
      fixes=self.fixes,
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

  def of_loss(self, args: Sequence[Any]):
    batch = args[self.batch_position]
    return Arguments(batch=batch).of_loss()

  def check(self, *args, **kwargs) -> "SplitReport":
    """As `TrainStep.check`: tests whether the loss is the same in microbatches."""
    # Training does without.
    from optax_accum._check_split.step_check import check_step

    def check(program, given, _):
      loss, args, _ = program.place(given, {})
      given = Arguments(*args)
      loss = loss.with_state(given.params, given.opt_state)
      return check_step(loss, given.of_loss(), {})

    return self._on_program(check, *args, **kwargs)[1]

  def _with_call(self, use: Use, /, *args, **kwargs):
    """What a call updates, and what `use` makes of it."""

    def on_program(program, given, others):
      return use(program.prepare(given, {}, others))

    return self._on_program(on_program, *args, **kwargs)

  @method
  def merge(self, cycle: Cycle, other: Cycle, /) -> PreparedCall:
    """``merge(cycle, other)`` returns one cycle of two, as `TrainStep.merge`."""
    return self._merging.merge(cycle, other)

  @functools.cached_property
  def _merging(self) -> CycleProgram:
    # Of whatever optimizer: what is merged knows of none.
    return self._cycle_of(self._program(self.loss, optax.identity()))

  def lower(self, *args, **kwargs) -> jax.stages.Lowered:
    """The program of a call, lowered, for its memory and collectives."""
    return self.trace(*args, **kwargs).lower()

  def trace(self, *args, **kwargs) -> jax.stages.Traced:
    """As ``trace`` of a jitted function."""
    return self._with_call(PreparedCall.trace, *args, **kwargs)[1]

  def _further(self, call: str, args, kwargs) -> Further:
    """The further arguments of a call, which messages show so, if the loss takes them."""
    name, _, taken = call.rstrip(")").partition("(")
    hint = (
      f"It takes {call}. Fix a setting in the loss, functools.partial(loss_fn, train=True), and"
      " make a step for each value. Put arrays with rows into the batch, keys into"
      f" {self.keys}. Further arguments, which are not split, come after these, and the loss takes"
      f" them too: {name}({taken}, teacher) and loss_fn({self.takes}, teacher)."
    )
    for x in (*args, *kwargs.values()):
      if isinstance(x, str):
        raise TypeError(f"{name}: {x!r} is a string and no array. {hint}")
    return Further(args, kwargs)


def run(call: PreparedCall) -> tuple[Arguments, Metrics]:
  """The arguments of a call as a step leaves them, and the metrics."""
  return after(call, call.run())


def after(call: PreparedCall, results) -> tuple[Arguments, Metrics]:
  """The arguments of a call with the results of its program, and the metrics."""
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
