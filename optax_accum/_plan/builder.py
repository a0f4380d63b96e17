"""The steps of one choice: what a user's `build_step` makes for a size, compiled and measured."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import logging
import math
import operator
import re
from typing import Any, TypeAlias

import jax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Leaves
from optax_accum._plan import of_step, sizes
from optax_accum._plan.candidate import Choice, measured, PlanCandidate
from optax_accum._train_step.program import Step

BuildStep: TypeAlias = Callable[..., Any]
# The arguments of a call of the step, or a function of the choice that returns them.
GivenArgs: TypeAlias = Args | Leaves | Callable[..., Args]

_logger = logging.getLogger(__name__)

# Errors of XLA for TPU about a program that is too large, raised before anything runs.
_LARGER_THAN_THE_CHIP = re.compile(
  "CompileTimeHbmOom|Ran out of memory in memory space hbm"
)

# What devices raise, or None does, that do not report their memory.
_NOT_REPORTED = (
  jax.errors.JaxRuntimeError,
  NotImplementedError,
  TypeError,
  KeyError,
)


class Builder:
  """The steps of one choice, and the arguments that they are called with."""

  def __init__(
    self, build_step: BuildStep, args: GivenArgs, rows: int, choice: Choice
  ):
    self._build_step = build_step
    self._rows = rows
    self._choice = choice
    self._options = [f"{name}={value!r}" for name, value in choice.items()]
    self._programs: dict[str, str] = {}  # their calls, by their texts

    self._args_name = "args"
    if callable(args):
      self._args_name = f"args({', '.join(self._options)})"
      misfit = _validate.why_not(args, **choice)
      if misfit:
        raise TypeError(
          f"{self._args_name}: {misfit}. A function must take the options in choices."
        )
      args = args(**choice)
    if not isinstance(args, (tuple, list)):
      raise TypeError(
        f"{self._args_name} must be a tuple, all that a step is called with: {args!r:.80}."
      )
    self._args = tuple(args)

    # `build_step` may take the rows of a microbatch instead, which need not divide the batch.
    names = inspect.signature(build_step).parameters.keys() - choice.keys()
    self._takes_size = "microbatch_size" in names and not _validate.why_not(
      build_step, microbatch_size=rows, **choice
    )
    self._first = self._step(rows)

  def limit(self, given: int | str | None) -> int:
    """What a program may use on one device, as given, or of the memory that the device reports."""
    if given is not None:
      return sizes.parse(given)
    found = []
    if isinstance(self._first, Step):
      found = of_step.devices(self._first)
    if not found:
      held = (getattr(x, "sharding", None) for x in jax.tree.leaves(self._args))
      found = [d for x in held for d in getattr(x, "device_set", ())]
    device = min(found or jax.devices(), key=operator.attrgetter("id"))
    try:
      # Some is left free, because free memory is fragmented.
      return int(device.memory_stats()["bytes_limit"] * 0.95)
    except _NOT_REPORTED:
      raise ValueError(
        f"memory_limit=None uses the memory that the device reports, and {device} reports none:"
        ' give memory_limit, such as "16GiB".'
      ) from None

  def sizes(self) -> tuple[list[int], list[int]]:
    """The microbatches that there can be, in rows, the smallest first: even and uneven."""
    rows = self._rows
    step = self._first
    args = self._args_name
    possible: Any = of_step.sizes_of
    batch: Args = ()
    if isinstance(step, Step):
      possible = functools.partial(of_step.sizes, step)
      batch = self._args[getattr(step, "batch_position", 2) :]
      found = of_step.rows(step, self._args)
      if found not in (None, rows):
        fix = f"give {found}"
        if args != "args":
          fix += ", as in every choice"
        raise ValueError(
          f"batch_size={rows}, and the batch in {args} has {found} rows: {fix}."
        )
    shapes = [getattr(x, "shape", ()) for x in jax.tree.leaves(self._args)]
    if not any(n and n % rows == 0 for shape in shapes for n in shape):
      raise ValueError(
        f"batch_size={rows}, and no array in {args} has so many rows: give the rows of the batch."
      )
    # All devices that have rows must divide each microbatch, not only those of the data axes.
    parts = math.lcm(*map(self._parts, jax.tree.leaves(batch)))

    def in_parts(uneven):
      return [n for n in possible(rows, uneven) if n % parts == 0]

    even = in_parts(False) or [rows]
    if self._takes_size:
      return even, in_parts(True)
    return even, []

  def compile(self, size: int, limit: int, bar) -> PlanCandidate:
    """Compiles one step, which a log and the progress `bar` show. Nothing runs."""
    call = self._call(size)
    _logger.info("compiling %s", call)
    bar.set_postfix_str(call)
    bar.update()
    candidate = PlanCandidate(-(-self._rows // size), size, self._choice)
    try:
      lowered = self._step(size).lower(*self._args)
      same = self._programs.setdefault(lowered.as_text(), call)
      if same != call:
        raise ValueError(
          f"{same} and {call} made the same program: build_step must pass on to make_train_step"
          " what it is given."
        )
      compiled = lowered.compile()
    except Exception as error:
      if _LARGER_THAN_THE_CHIP.search(str(error)):
        return dataclasses.replace(candidate, analysed=False)
      error.add_note(f"This is {call}, lowered and compiled with args.")
      raise
    return measured(candidate, compiled, limit)

  def _step(self, size: int):
    """The step with microbatches of so many rows."""
    if self._takes_size:
      step = self._build_step(microbatch_size=size, **self._choice)
    else:
      step = self._build_step(self._rows // size, **self._choice)
    if not callable(getattr(step, "lower", None)):
      raise TypeError(
        f"{self._call(size)} returned {step!r:.80}, which has no lower(): return the result of"
        " make_train_step, or a function wrapped by jax.jit."
      )
    return step

  def _call(self, size: int) -> str:
    """The call of `build_step` that makes this step, as a user would write it."""
    given = str(self._rows // size)
    if self._takes_size:
      given = f"microbatch_size={size}"
    return f"build_step({', '.join([given, *self._options])})"

  def _parts(self, x) -> int:
    """How many parts the rows of an array are in, over the devices."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
      return 1
    axes = zip(x.shape, sharding.shard_shape(x.shape), strict=True)
    return math.lcm(*(n // part for n, part in axes if n == self._rows))
