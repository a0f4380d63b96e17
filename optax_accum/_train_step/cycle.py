"""A step whose microbatches arrive in several calls: `begin`, `add` and `finish`."""

from collections.abc import Callable
import dataclasses
import functools
import operator
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import jax
import jax.numpy as jnp

from optax_accum import _spellings, _validate
from optax_accum._arithmetic.trees import Args, Carry, Kwargs
from optax_accum._mesh.loss import Loss, Placed
from optax_accum._microbatches import parameters
from optax_accum._microbatches.loop import Reduced
from optax_accum._microbatches.loss import Accumulated, LocalLoss
from optax_accum._microbatches.noise_scale import NoiseScaleTerms
from optax_accum._train_step import donation
from optax_accum._train_step.program import (
  jitted,
  PreparedCall,
  StepProgram,
)

Result = TypeVar("Result")
Returned = TypeVar("Returned", covariant=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cycle:
  """What the microbatches of one optimizer step have added up to so far, a pytree of arrays.

  ``step.begin`` makes one, ``step.add`` takes it and returns the next, ``step.finish`` ends it.
  Save and restore all of it; over a mesh on as many devices, since a device has its own sums, or
  with `virtual_devices` on any number. What to restore it into is
  ``step.add.eval_shape(step.begin(params), params, batch)``. Zeros in such a tree are no cycle: to
  add in `jax.lax.scan`, add a first batch before.

  Attributes:
    start: A tuple of the carry that the cycle began with; empty if there is none.
    held: Sums, weights and a count; with `mesh`, each with a first axis of devices. None before the
      first ``add``.
    options: How the step weighs and combines, which no array tells, and so no checkpoint: go on by
      a step of the same options. Static, and empty before that.
  """

  start: tuple[Carry, ...] = ()
  held: Accumulated | None = None
  options: tuple[str, ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )


class CycleLoss(NamedTuple):
  """A loss of which a cycle has the gradients, for a `StepProgram`.

  Its arguments are, after the parameters, what the cycle holds and the carry that it began with.
  """

  loss: Any  # a `Loss`, or one that is `Placed`

  @property
  def local(self) -> LocalLoss:
    return self.loss.local

  @property
  def parallel(self):
    return self.loss.parallel

  @property
  def out_shardings(self):
    return self.loss.out_shardings

  def place(self, args, kwargs) -> tuple["CycleLoss", Args, Kwargs]:
    """As that of a loss. `args` may have more, for what is around the step."""
    params, opt_state, held, *others = args
    carries = len(self.local.split.carry)
    loss, placed = self.loss.place_state(params, opt_state, others, carries)
    params, opt_state, others = placed
    held = loss.place_held(held)
    return CycleLoss(loss), (params, opt_state, held, *others), kwargs

  def beside(self, params, opt_state) -> "CycleLoss":
    """As that of a loss."""
    return CycleLoss(self.loss.beside(params, opt_state))

  def value_and_grad(self, _, params, held, *start) -> Reduced:
    """The loss and the gradients of the cycle."""
    return self.loss.finish(held, start, params)

  def step_beside(self, update, params, opt_state):
    """As that of a loss."""
    return self.loss.step_beside(update, params, opt_state)


class Method(Generic[Result]):
  """A method of a step, with ``lower``, ``trace`` and ``eval_shape`` of the program that it runs.

  `prepare` takes the arguments of a call, and has its signature and docstring. `explain` takes them
  too, after the call failed, and raises a better error if it knows one.
  """

  def __init__(
    self, prepare: Callable[..., Any], explain: Callable[..., object]
  ) -> None:
    self._prepare = prepare
    self._explain = explain
    self.__doc__ = prepare.__doc__
    self.__signature__ = _spellings.untyped_signature(prepare)
    self._shown = f"step.{prepare.__name__}{self.__signature__}"

  def __call__(self, *args, **kwargs) -> Result:
    return self._with_call(operator.methodcaller("run"), args, kwargs)

  def _with_call(self, use: Callable[[Any], Any], args, kwargs):
    """What `use` makes of a call, whose arguments are checked to be in their places."""
    try:
      given = self.__signature__.bind(*args, **kwargs)
    except TypeError as error:
      raise TypeError(f"{self._shown}: {error}.") from None
    check_cycle(self._shown, given.arguments["cycle"])
    try:
      return use(self._prepare(*args, **kwargs))
    except Exception:
      self._explain(*args, **kwargs)
      raise

  def trace(self, *args, **kwargs) -> jax.stages.Traced:
    """As ``trace`` of a jitted function."""
    return self._with_call(operator.methodcaller("trace"), args, kwargs)

  def lower(self, *args, **kwargs) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function. Its arguments may be `jax.ShapeDtypeStruct`."""
    return self.trace(*args, **kwargs).lower()

  def eval_shape(self, *args, **kwargs) -> Result:
    """As ``eval_shape`` of a jitted function: shapes and dtypes of what a call returns."""
    return self._with_call(operator.methodcaller("eval_shape"), args, kwargs)


class Prepared(Protocol[Returned]):
  """A call of a `Method`, before it runs. It has ``trace`` and ``eval_shape`` too."""

  def run(self) -> Returned:
    """What the call returns."""


def _knows_nothing(*args, **kwargs) -> None:
  """What explains no error."""


def method(
  prepare: Callable[..., Prepared[Result]],
  explain: Callable[..., object] = _knows_nothing,
) -> functools.cached_property[Method[Result]]:
  """A `Method` of a class, of what prepares its calls. The docstring is that of both."""

  def bound(step):
    return Method(prepare.__get__(step), functools.partial(explain, step))

  bound.__doc__ = prepare.__doc__
  return functools.cached_property(bound)


class PreparedAdd(NamedTuple):
  """A call of `add`: a jitted function, and its arguments."""

  cycle: Cycle
  jitted: Any
  args: Args
  kwargs: Kwargs

  def run(self) -> Cycle:
    """The cycle with the microbatches of this call."""
    held = self.jitted(*self.args, **self.kwargs)
    return dataclasses.replace(self.cycle, held=held)

  def trace(self) -> jax.stages.Traced:
    """The program, traced."""
    return self.jitted.trace(*self.args, **self.kwargs)

  def eval_shape(self) -> Cycle:
    """Shapes and dtypes of what `run` returns, and the shardings of what it adds to."""

    def sharded(x, before):
      return x.update(sharding=getattr(before, "sharding", None))

    before, *_ = self.args
    held = jax.tree.map(sharded, self.trace().out_info, before)
    return dataclasses.replace(self.cycle, held=held)


class PreparedFinish(NamedTuple):
  """A call of `finish`, and what makes of the results of its program what it returns."""

  call: PreparedCall
  cycle: Cycle
  finished: Callable[[Args], Any]

  def run(self):
    """Takes the step, and frees what the cycle holds, so that nothing is added to it again."""
    results = self.call.run()
    for x in donation.arrays(self.cycle.held):
      x.delete()
    return self.finished(results)

  def trace(self) -> jax.stages.Traced:
    """The program, traced."""
    return self.call.trace()

  def eval_shape(self):
    """Shapes and dtypes of what `run` returns."""
    return self.finished(self.call.eval_shape())


@dataclasses.dataclass(frozen=True)
class NoStep:
  """A call of `finish` on a cycle without microbatches."""

  results: Args
  finished: Callable[[Args], Any]

  def run(self):
    """Returns what was given, and metrics of nothing."""
    return self.finished(self.results)

  def trace(self):
    """Says that there is no program."""
    raise ValueError(
      "A cycle without microbatches runs no program: add some first."
    )

  eval_shape = trace


class CycleProgram:
  """The programs of `add` and `finish`, of which the first holds no optimizer state."""

  def __init__(self, program: StepProgram, updated: tuple[int, ...]) -> None:
    """`updated`: the arguments of `finish` that its first results replace."""
    self._loss: Loss = program.loss.in_parts()
    of_cycle: Any = CycleLoss(self._loss)
    self._finish = dataclasses.replace(
      program, loss=of_cycle, elsewhere=_refuse_value, updated=updated
    )
    self._options = self._loss.local.described
    self._begin = functools.cache(self._jit_begin)
    self._add = functools.cache(self._jit_add)

  def begin(self, params, carry: Args) -> Cycle:
    """A cycle without microbatches, that begins with a carry if the loss has one."""
    parameters.check_differentiable("params", params)
    wanted = len(self._loss.local.split.carry)
    if len(carry) != wanted:
      call = "begin(params, carry)" if wanted else "begin(params)"
      raise TypeError(
        f"begin got {1 + len(carry)} arguments, and the loss has {wanted} carry (carry_argnum): it"
        f" is {call}."
      )
    return Cycle(carry)

  def add(self, cycle: Cycle, params, args, kwargs) -> PreparedAdd:
    """Prepares a call. The carry, which is in the cycle, is not among `args`."""
    self._check_carry("add", cycle)
    of_loss, kwargs = self.of_loss(cycle, params, args, kwargs)
    names = list(map(self._loss.local.split.name, range(len(of_loss))))
    given = donation.arrays((of_loss, kwargs))
    donation.check_alive(given, names, of_loss, kwargs)
    params, *others = of_loss
    loss, placed, named = self._loss.place((params, (), *others), kwargs)
    params, _, *others = placed
    if cycle.held is None:
      begin = self._begin(loss)
      leaves = jax.tree.leaves((placed, named))
      if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        begin = functools.partial(jax.eval_shape, begin)
      held = begin(params, *others, **named)
      if loss.parallel is None:
        held = donation.beside(held, given)  # as the next call has it
    else:
      self._check_options(cycle)
      held = loss.place_held(cycle.held)
    cycle = dataclasses.replace(cycle, options=self._options)
    args = held, params, *others
    return PreparedAdd(cycle, self._add(loss), args, named)

  def of_loss(
    self, cycle: Cycle, params, args, kwargs
  ) -> tuple[list[Any], Kwargs]:
    """The arguments of the loss: those of `add`, and the carry that the cycle began with."""
    of_loss = [params, *args]
    local = self._loss.local
    position = local.split.carry_argnum
    if position is None:
      return of_loss, kwargs
    carry = next(iter(cycle.start), None)
    if position < 0:
      position += len(of_loss) + 1
    name = local.roles_of.signature.name(position)
    if name in kwargs:
      raise TypeError(
        f"add got {name}=, the carry, which is in the cycle: leave it out."
      )
    if position > len(of_loss) and name != "...":
      # What stands before it is passed by name.
      return of_loss, {**kwargs, name: carry}
    of_loss.insert(position, carry)
    return of_loss, kwargs

  def finish(
    self,
    params,
    opt_state,
    cycle: Cycle,
    *others,
    finished: Callable[[Args], Any] = tuple,
  ) -> PreparedFinish | NoStep:
    """Prepares a call. `others` go into the program, after the carry."""
    updated = *cycle.start, *others
    if cycle.held is None:
      metrics = no_metrics(self._loss)
      return NoStep((params, opt_state, *updated, metrics), finished)
    self._check_carry("finish", cycle)
    self._check_options(cycle)
    given = params, opt_state, cycle.held, *updated
    call = self._finish.prepare(given, {})
    return PreparedFinish(call, cycle, finished)

  def _check_carry(self, name: str, cycle: Cycle) -> None:
    """Checks that a cycle has a carry if the loss has one."""
    started = len(cycle.start)
    wanted = len(self._loss.local.split.carry)
    if started != wanted:
      raise ValueError(
        f"{name} got a cycle with {started} carry, and the loss has {wanted} (carry_argnum): the"
        " cycle is of another step. Pass one that begin of this step has begun."
      )

  def _check_options(self, cycle: Cycle) -> None:
    """Checks that a cycle was added up as this step does."""
    pairs = zip(cycle.options, self._options, strict=True)
    for of_cycle, own in pairs:
      if of_cycle != own:
        raise ValueError(
          f"cycle is of {of_cycle}, and this step of {own}: go on with it by the step that began"
          " it, or begin another."
        )

  def _jit_begin(self, loss: Placed):
    def begin(params, /, *args, **kwargs):
      return loss.beside(params, ()).begin(params, *args, **kwargs)

    return jitted(loss, begin, out_shardings=loss.held_shardings)

  def _jit_add(self, loss: Placed):
    def add_to_cycle(held, params, /, *args, **kwargs):
      parameters.check_differentiable("params", params)
      return loss.beside(params, ()).add(held, params, *args, **kwargs)

    shardings = loss.held_shardings
    return jitted(loss, add_to_cycle, donate_argnums=0, out_shardings=shardings)


def check_cycle(call: str, cycle) -> None:
  """Checks that something is a cycle that no call has ended or donated."""
  if not isinstance(cycle, Cycle):
    raise TypeError(
      f"{call} got a {type(cycle).__name__} as cycle: pass what begin or the last add returned, or"
      " a checkpoint that was restored into a tree like that."
    )
  deleted = operator.methodcaller("is_deleted")
  if not any(map(deleted, donation.arrays(cycle.held))):
    return
  named = _validate.named_leaves("cycle", cycle.held)
  gone = next(path for path, x in named if deleted(x))
  raise RuntimeError(
    f"{gone} has been deleted: the cycle was given to an earlier add, which updated it in place, or"
    " to finish, which ended it. Use what that add returned, or begin anew."
  )


def _refuse_value(loss, weights, args, kwargs, params, weight=None) -> NoReturn:
  """In the place of `loss_elsewhere`, for the step of a cycle, whose rows are gone."""
  raise NotImplementedError(
    "The optimizer calls value_fn, as line searches do, and the rows of a cycle that arrived call"
    " by call are gone when it finishes: take the step in one call, step(params, opt_state,"
    " batch), of all rows."
  )


def no_metrics(loss: Loss) -> dict[str, Any]:
  """The metrics of no microbatch: there is no aux."""
  zero = jnp.zeros(())
  metrics: dict[str, Any] = {
    "loss": zero,
    "grad_norm": zero,
    "total_weight": zero,
    "skipped_microbatches": jnp.int32(0),
    "stepped": jnp.bool_(False),
  }
  if "noise_scale" in loss.local.metrics.funs:
    metrics["noise_scale"] = NoiseScaleTerms(zero, zero)
  return metrics
