"""A step whose microbatches arrive in several calls: `begin`, `add`, `merge` and `finish`."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Carry
from optax_accum._mesh.loss import Loss
from optax_accum._microbatches import parameters
from optax_accum._microbatches.loss import CycleState
from optax_accum._streaming.calls import ValueOfOneCall
from optax_accum._train_step import donation
from optax_accum._train_step.program import (
  check_given,
  PreparedCall,
  Runnable,
  StepProgram,
)

Result = TypeVar("Result")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cycle:
  """What the microbatches of one optimizer step have added up to so far, a pytree of arrays.

  ``step.begin`` makes one, ``step.add`` takes it and returns the next, ``step.merge`` makes one of
  two, and ``step.finish`` ends it. Save and restore all of it; over a mesh on as many devices,
  since a device has its own sums. What to restore it into is
  ``step.add.eval_shape(step.begin(params), params, batch)``. Zeros in such a tree are no cycle: to
  add in `jax.lax.scan`, add a first batch before.

  Attributes:
    start: A tuple of the carry that the cycle began with; empty if there is none.
    state: Sums, weights and a count; with `mesh`, each with a first axis of devices. None before
      the first ``add``.
  """

  start: tuple[Carry, ...] = ()
  state: CycleState | None = None

  @property
  def total_weight(self) -> jax.Array:
    """The sum of the weights so far, of all devices: a float32 scalar (float64 with x64)."""
    if self.state is None:
      return jnp.zeros(())
    return jnp.sum(self.state.accumulated.weight)

  @property
  def num_microbatches(self) -> jax.Array:
    """The number of microbatches so far, of all devices: an int32 scalar."""
    if self.state is None:
      return jnp.zeros((), jnp.int32)
    return jnp.max(self.state.number)  # each device has that of all


class Method(Runnable[Result]):
  """A method of a step, which runs a program.

  `prepare` takes the arguments of a call, and has its signature and docstring. `explain` takes them
  too, after the call failed, and raises a better error if it knows one.
  """

  def __init__(
    self, prepare: Callable[..., PreparedCall], explain: Callable[..., object]
  ) -> None:
    self._prepare = prepare
    self._explain = explain
    functools.update_wrapper(self, prepare)

  def __call__(self, *args, **kwargs) -> Result:
    """Prepares the call, and runs it."""
    return self._use("run", args, kwargs)


def _knows_nothing(*args, **kwargs) -> None:
  """The `explain` of a method that has no better error."""


def method(
  prepare: Callable[..., Any],
  explain: Callable[..., object] = _knows_nothing,
) -> functools.cached_property[Method[Any]]:
  """A `Method` of a class, of what prepares its calls. The docstring is that of both."""

  def bound(step):
    # `__get__` binds the function to the step, as Python does for methods.
    return Method(prepare.__get__(step), functools.partial(explain, step))

  bound.__doc__ = prepare.__doc__
  return functools.cached_property(bound)


# `merge` runs this where at most one of the two cycles has microbatches.
_SAME = jax.jit(lambda states: states, donate_argnums=0)


class CycleProgram:
  """The programs of `add`, `merge` and `finish`. Only the last holds an optimizer state."""

  def __init__(self, program: StepProgram, updated: tuple[int, ...]) -> None:
    """`updated`: the arguments of `finish` that its first results replace."""
    self._loss: Loss = program.loss.in_parts()
    self._local = self._loss.local
    self._names = program.names
    # In messages, the arguments of `finish`: parameters, optimizer state, cycle.
    names = (*program.names[:2], "cycle")
    self._step = dataclasses.replace(program, updated=updated, names=names)
    # One program for each loss that `place` returns, so for each sharding.
    self._begin = functools.cache(self._jit_begin)
    self._add = functools.cache(self._jit_add)
    # Only the first cycle is donated: the result fits its buffers.
    self._merge = jax.jit(self._loss.merge, donate_argnums=0)
    self._finish = functools.cache(self._jit_finish)

  def begin(self, params, carry: Args) -> Cycle:
    """A cycle without microbatches, that begins with a carry if the loss has one."""
    parameters.check_differentiable("params", params)
    self._check_carry("begin", carry)
    return Cycle(carry)

  def add(self, cycle: Cycle, params, args, kwargs) -> PreparedCall:
    """Prepares a call. The carry, which is in the cycle, is not among `args`."""
    check_cycle("add", cycle)
    self._check_carry("add", cycle.start)
    # From here on `args` has all arguments of the loss, the parameters first.
    args, kwargs = self._with_carry(cycle, [params, *args], kwargs)
    params, *others = args
    # The empty tuple stands for the optimizer state, which a step takes and a cycle has not.
    given = (params, (), *others)
    check_given(self._names, given, kwargs)
    loss, placed, kwargs = self._loss.place(given, kwargs)
    params, _, *others = placed
    if cycle.state is None:
      # The first `add` of a cycle makes the zeros that its sums start from.
      begin = self._begin(loss)
      # `lower` and `eval_shape` may be given shapes, from which no program can run.
      leaves = jax.tree.leaves((placed, kwargs))
      if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        begin = functools.partial(jax.eval_shape, begin)
      state = begin(params, *others, **kwargs)
    else:
      state = loss.place_cycle(cycle.state)
    returned = functools.partial(Cycle, cycle.start)
    args = state, params, *others
    return PreparedCall(self._add(loss), args, kwargs, returned)

  def merge(self, cycle: Cycle, other: Cycle) -> PreparedCall:
    """Prepares a call on two cycles."""
    for each in (cycle, other):
      check_cycle("merge", each)
    returned = functools.partial(Cycle, cycle.start)
    # A state is None before the first `add`.
    states = [x.state for x in (cycle, other) if x.state is not None]
    if len(states) < 2:
      # `states` has one state, or none: then `Cycle(start)` has None again.
      return PreparedCall(_SAME, (states,), {}, lambda x: returned(*x))
    first, second = states
    different = _validate.difference(
      "other", other, cycle, "type", _validate.type_of
    )
    if different:
      raise ValueError(
        f"{different}: the cycle is of another step, or of other parameters. Merge two of one step"
        " that began from the same parameters and carry."
      )
    # The first is donated and the second deleted, so they may share no array.
    donated = {*map(id, donation.arrays(first))}
    deleted = {*map(id, donation.arrays(second))}
    if donated & deleted:
      raise ValueError(
        "merge got one cycle twice: a cycle is used once. Begin another for each worker."
      )
    args = first, second, cycle.start
    return PreparedCall(self._merge, args, {}, returned, ended=second)

  def finish(
    self, params, opt_state, cycle: Cycle, *others, returned=tuple, kept=()
  ) -> PreparedCall:
    """Prepares a call. `others` go into the program, after the carry.

    What is `kept` does not go into it: the caller keeps it, so its arrays are not donated.
    """
    check_cycle("finish", cycle)
    if cycle.state is None:
      raise ValueError(
        "finish got an empty cycle, which is no step: add microbatches first, and use the cycle"
        " that add returns, cycle = step.add(cycle, params, batch)."
      )
    self._check_carry("finish", cycle.start)
    step = self._step
    args = params, opt_state, cycle.state, *cycle.start, *others
    check_given(step.names, args, {})
    loss, placed = self._loss.place_updated(
      params, opt_state, cycle.start, others
    )
    state = loss.place_cycle(cycle.state)
    # The program takes the sums third, after parameters and optimizer state.
    placed = *placed[:2], state, *placed[2:]
    placed, shardings = step.donated(loss, placed, kept)
    jitted = self._finish(loss, shardings)
    # No result replaces the sums, so they are not donated: they are deleted after the run.
    return PreparedCall(jitted, placed, {}, returned, ended=cycle.state)

  def _check_carry(self, name: str, start: Args) -> None:
    """Checks that there is a carry if the loss has one."""
    wanted = len(self._local.split.carry)
    if len(start) != wanted:
      raise TypeError(
        f"{name} got {len(start)} carry, and the loss has {wanted} (carry_argnum): begin(params,"
        " carry) begins a cycle where there is one, and begin(params) where there is none."
      )

  def _with_carry(self, cycle: Cycle, args: list[Any], kwargs):
    """The arguments of the loss: those of `add`, and the carry that the cycle began with."""
    position = self._local.split.carry_argnum
    if position is None:
      return args, kwargs
    # A negative position counts from the end, with the carry among the arguments.
    if position < 0:
      position += len(args) + 1
    name = self._local.roles_of.signature.name(position)
    if position > len(args):  # what stands before it is passed by name
      return args, {**kwargs, name: cycle.start[0]}
    args.insert(position, cycle.start[0])
    return args, kwargs

  def _jit_begin(self, loss: Loss):
    """The program that makes the zeros of a cycle."""

    def begin_cycle(params, /, *args, **kwargs):
      # Without an optimizer state gradients are sharded as their parameters.
      return loss.with_state(params, ()).begin(params, *args, **kwargs)

    # Unused arguments are kept, since they decide on which device the cycle begins.
    return jax.jit(
      begin_cycle, out_shardings=loss.cycle_shardings, keep_unused=True
    )

  def _jit_add(self, loss: Loss):
    """The program of `add`."""

    def add_to_cycle(state, params, /, *args, **kwargs):
      # Without an optimizer state gradients are sharded as their parameters.
      return loss.with_state(params, ()).add(state, params, *args, **kwargs)

    return jax.jit(
      add_to_cycle, donate_argnums=0, out_shardings=loss.cycle_shardings
    )

  def _jit_finish(self, loss: Loss, kept_shardings):
    """The program of `finish`."""

    def finish_cycle(params, opt_state, state, *start):
      sharded = loss.with_state(params, opt_state)
      reduced = sharded.finish(state, start, params)
      # The rows are gone, so an optimizer that calls this gets an error.
      value_fn = ValueOfOneCall(_refuse_value)
      return self._step.take(sharded, reduced, params, opt_state, value_fn)

    return self._step.jit(loss, finish_cycle, kept_shardings)


def check_cycle(name: str, cycle) -> None:
  """Checks that something is a cycle that no call has ended or donated."""
  if not isinstance(cycle, Cycle):
    raise TypeError(
      f"{name} got a {type(cycle).__name__} as cycle: pass what begin or the last add returned, or"
      " a checkpoint that was restored into a tree like that."
    )
  # This test is quick; names of leaves are made only for the message.
  if not any(x.is_deleted() for x in donation.arrays(cycle.state)):
    return
  for path, x in _validate.named_leaves("cycle", cycle.state):
    if donation.arrays(x) and x.is_deleted():
      raise RuntimeError(
        f"{path} has been deleted: the cycle was given to an earlier add or merge, which updated it"
        " in place, or to finish, which ended it. Use what that returned, or begin anew."
      )


def _refuse_value(params, weight=None) -> NoReturn:
  """The `value_fn` of the step of a cycle, whose rows are gone."""
  raise NotImplementedError(
    "The optimizer calls value_fn, as line searches do, and the rows of a cycle that arrived call"
    " by call are gone when it finishes: take the step in one call, step(params, opt_state,"
    " batch), of all rows."
  )
