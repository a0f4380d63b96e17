"""What the steps of linen and nnx share: options, the layout of their programs, and four calls."""

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

from flax import nnx
import jax
from jax.typing import DTypeLike
import optax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
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
from optax_accum._microbatches.options import WeightFn
from optax_accum._train_step.cycle import Cycle, CycleProgram, method
from optax_accum._train_step.program import (
  Function,
  Loss,
  PreparedCall,
  Runnable,
  Step,
  step_loss,
  StepProgram,
)

if TYPE_CHECKING:
  from optax_accum._check_split.report import SplitReport

Metrics: TypeAlias = dict[str, Any]
LossFn: TypeAlias = Callable[..., Any]


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
  carried: Tree = None  # by name, what each microbatch changes for the next
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
# Of a program that takes no optimizer step. One object, since programs are kept by theirs.
NO_OPTIMIZER = optax.identity()


class Held(NamedTuple):
  """What a call steps: the state of linen, or the model and the optimizer of nnx."""

  program: StepProgram
  arguments: Arguments  # those that it holds
  kept: Tree  # its other arrays, which no program takes
  # Makes what the call returns, of the new arguments and the metrics.
  put: Callable[[Arguments, Metrics], Any]

  def returning(self, arguments: Arguments) -> Callable[[Args], Any]:
    """A function of the results of a program with such arguments: what the call returns."""

    def returned(results):
      *new, metrics = results
      updated = dict(zip(_UPDATED, new, strict=True))
      return self.put(arguments._replace(**updated), metrics)

    return returned


class StepOptions(TypedDict, total=False):
  """The options of `make_train_step` that a step of Flax takes too."""

  num_microbatches: int | None
  microbatch_size: int | None
  has_weight: bool
  weight_fn: WeightFn | None
  aux_reduction: ReductionTree
  reduction: Literal["mean", "sum"]
  donate: bool
  skip_nonfinite: bool
  noise_scale: bool
  mesh: jax.sharding.Mesh | None
  data_axis: str | Sequence[str]
  in_place: bool
  accumulator_dtype: DTypeLike | None
  carry_reduction: ReductionTree


UNSPLIT = "Put what has the batch's rows into the batch, which alone is split."


class FlaxStep(Runnable[Any], Step):
  """A step by a loss of a model, with the options of `make_train_step` that are the user's."""

  name: ClassVar[str]
  names: ClassVar[Arguments]  # of the arguments of a program, in messages
  fixes: ClassVar[Mapping[str, str]]  # what errors and `check` say instead
  # The words for what is carried beside what the user names.
  own_words: ClassVar[Mapping[str, str]] = {}
  # ``(static, *arguments)``, the loss of a user as one that `make_train_step` takes.
  _loss: Callable[..., Any]
  # Of the arguments of a call: what it steps, the batch, the keys and further arguments.
  _parts: Callable[..., tuple[Held, Batch, Tree, Further]]

  def __init__(
    self, loss_fn: LossFn, has_aux: bool, options: StepOptions, **own: Any
  ):
    for option in options:
      if option not in StepOptions.__annotations__:
        raise TypeError(
          f"{self.name}() got an unexpected keyword argument {option!r}"
        )
    _validate.function(loss_fn)
    self.__name__ = self.name
    self._loss_fn = loss_fn
    self._has_aux = has_aux
    self._shown = {**own, "has_aux": has_aux or None, **options}
    self._options: dict[str, Any] = dict(options)
    self._donate = self._options.pop("donate", True)
    _validate.booleans(donate=self._donate)
    self._words = self._options.pop("carry_reduction", None)
    # Checks the options at once; which words there are for a carry is known with the carry.
    self.loss = self._step_loss(None, self._words)
    self._program = functools.cache(self._make_program)
    self._cycles = functools.cache(self._make_cycles)

  def __repr__(self) -> str:
    loss = getattr(self._loss_fn, "__name__", repr(self._loss_fn))
    shown = [f"{k}={x!r}" for k, x in self._shown.items() if x is not None]
    return f"{self.name}({', '.join([loss, *shown])})"

  def _step_loss(self, static, words: Tree) -> Loss:
    """The loss of a program, which returns ``(loss, (carried, aux))``."""
    return step_loss(
      functools.partial(self._loss, static),
      has_aux=True,
      carry_argnum=_SLOT("carried"),
      carry_reduction=words,
      rng_argnums=_SLOT("rngs"),
      # A model among the further arguments may have keys, which is no mistake: see `_check_keys`.
      of_step=(_SLOT("constant"), _SLOT("further")),
      names=dict(enumerate(self.names.of_loss())),
      fixes=self.fixes,
      **self._options,
    )

  def _make_program(
    self,
    static: Any,
    tx: optax.GradientTransformation,
    carried: tuple[str, ...],
  ) -> StepProgram:
    """The program of an optimizer, for a loss that carries what has these names."""
    # None is the default word of a leaf.
    words = self._words
    if not isinstance(words, Mapping):
      words = dict.fromkeys(carried, words)
    words = {**dict.fromkeys(carried), **words, **self.own_words}
    return StepProgram(
      self._step_loss(static, words),
      optax.with_extra_args_support(tx),
      self._donate,
      self._counting,
      results=len(_UPDATED) + 1,
      updated=tuple(map(Arguments._fields.index, _UPDATED)),
      names=self.names,
    )

  def _make_cycles(self, program: StepProgram) -> CycleProgram:
    # Of `finish` parameters, state, carry and count are updated.
    return CycleProgram(program, updated=(0, 1, 3, 4))

  def _counting(self, run: Function) -> Function:
    """What is compiled: it also counts how many steps the optimizer took."""

    def counting(*args):
      *given, count = args
      parameters.check_differentiable(self.names.params, given[0])
      *new, metrics = run(*given)
      if not self._has_aux:
        del metrics["aux"]
      count += metrics["stepped"].astype(count.dtype)
      return *new, count, metrics

    counting.__name__ = self.name
    return counting

  def _taken_apart(self, out, mutable: bool):
    """The loss, what it changed, and aux, of what the loss of a user returned."""
    updates: Tree = {}
    aux = None
    match mutable, self._has_aux, out:
      case True, True, [loss, [updates, aux]]:
        pass
      case True, False, [loss, updates]:
        pass
      case False, True, [loss, aux]:
        pass
      case False, False, loss:
        pass
      case _:
        raise TypeError(
          f"The loss returned a {type(out).__name__}: with has_aux=True it must return (loss, aux);"
          " in linen with mutable (loss, updates), and with both (loss, (updates, aux))."
        )
    return loss, updates, aux

  def _given(self, *args, **kwargs) -> tuple[Held, Arguments]:
    """What a call steps, and the arguments of its program."""
    held, batch, rngs, further = self._parts(*args, **kwargs)
    self._check_keys(further)
    given = held.arguments._replace(batch=batch, rngs=rngs, further=further)
    return held, given

  def check(self, *args, **kwargs) -> "SplitReport":
    """As `TrainStep.check`: tests whether the loss is the same in microbatches."""
    # Training does without.
    from optax_accum._check_split.step_check import check_step

    held, given = self._given(*args, **kwargs)
    loss, placed, _ = held.program.place(given, {})
    given = Arguments(*placed)
    loss = loss.with_state(given.params, given.opt_state)
    return check_step(loss, given.of_loss(), {})

  def _prepare(self, *args, **kwargs) -> PreparedCall:
    held, given = self._given(*args, **kwargs)
    prepared = held.program.prepare(given, {}, held.kept)
    # What is constant is returned where the program had it, so that it need not move again.
    returned = held.returning(Arguments(*prepared.args))
    return prepared._replace(returned=returned)

  def _explain(self, *args, **kwargs) -> None:
    """Explains no error: what is wrong was said before."""

  def _begin(self, held: Held) -> Cycle:
    params, carried = held.arguments.params, held.arguments.carried
    return self._cycles(held.program).begin(params, (carried,))

  def _add(self, cycle: Cycle, held: Held, batch, rngs, further):
    self._check_keys(further)
    given = batch, held.arguments.constant, rngs, further
    params = held.arguments.params
    return self._cycles(held.program).add(cycle, params, given, {})

  def _check_keys(self, further: Further) -> None:
    """Checks that no key is among the further arguments but in models, which cannot draw."""

    def is_model(x):
      return isinstance(x, nnx.Pytree)

    for name, x in _validate.named_leaves("", further, is_model):
      if dtypes.is_key(x):
        raise ValueError(
          f"{name} is a random key, from which every microbatch would get the same noise:"
          f" {self.fixes['random']}"
        )

  @method
  def merge(self, cycle: Cycle, other: Cycle, /) -> PreparedCall:
    """``merge(cycle, other)`` returns one cycle of two, as `TrainStep.merge`."""
    # Of whatever model and optimizer: what is merged has the names of what is carried.
    names = tuple(*cycle.start)
    program = self._program(None, NO_OPTIMIZER, names)
    return self._cycles(program).merge(cycle, other)

  def _finish(self, held: Held, cycle: Cycle) -> PreparedCall:
    given = held.arguments
    return self._cycles(held.program).finish(
      given.params,
      given.opt_state,
      cycle,
      given.count,
      returned=held.returning(given),
      kept=(given.constant, held.kept),
    )


def check_calls(step: str, value: object, method: str) -> None:
  """Refuses an object whose class has a `method` of a user's own, which a step does not call."""
  kind = type(value)
  found = getattr(kind, method)
  if found.__module__.partition(".")[0] not in ("flax", "optax_accum"):
    raise TypeError(
      f"{kind.__name__} has a method {method} that flax has not written"
      f" ({found.__module__}.{found.__qualname__}), and {step} does not call it. Put what it does"
      " to gradients into tx, optax.chain(change, tx), and do the rest after the step: an average"
      " of weights, which begins with a copy of them, is optax.incremental_update(new_params,"
      f' average, 0.1 * metrics["stepped"]). Then pass an object whose class has no {method} of'
      " its own."
    )
