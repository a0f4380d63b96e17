"""A step that was compiled for a plan, and what XLA says of it."""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
import logging
import math
import re
from typing import Any, TypeAlias

import jax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Leaves
from optax_accum._compiled.collectives import count_collectives
from optax_accum._compiled.matrix_flops import matrix_flops
from optax_accum._microbatches import cut
from optax_accum._train_step.program import Step

Choice: TypeAlias = Mapping[
  str, Any
]  # options of `build_step`; a plan compares them by identity
BuildStep: TypeAlias = Callable[..., Any]
GivenArgs: TypeAlias = (
  Args | Leaves | Callable[..., Args]
)  # or a function of the choice

_logger = logging.getLogger(__name__)

# Errors of XLA for TPU about a program that is too large, raised before anything runs.
_LARGER_THAN_THE_CHIP = re.compile(
  "CompileTimeHbmOom|Ran out of memory in memory space hbm"
)


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
  """One step that `plan_microbatches` compiled. All numbers are per call and per device.

  Attributes:
    num_microbatches: The number of microbatches.
    microbatch_size: The rows of one microbatch, on all devices together. The last may have fewer.
    choice: The further options that `build_step` was given.
    argument_bytes: Memory of the arguments: parameters, optimizer state, batch.
    output_bytes: Memory of the outputs that are not written into donated arguments.
    temp_bytes: Memory of temporary buffers: activations, gradients and their accumulators.
    code_bytes: Memory of the program. 0 on CPU, where XLA does not report it.
    xla_peak_bytes: XLA's ``peak_memory_in_bytes``, or None; without temporary buffers on CPU.
    flops: Operations in matrix products and convolutions. Too low with one row per device.
    collectives: The number of collectives that run.
    collective_bytes: The bytes that they return.
    wire_bytes: The bytes that the device sends to others, around a ring of those n that exchange:
      2 (n - 1) / n of the arrays that they add up, (n - 1) / n of what they gather or scatter.
    fits: Whether `peak_bytes` is within the limit.
    analysed: Whether XLA compiled it. For TPUs it refuses what does not fit: numbers are then 0.
  """

  num_microbatches: int
  microbatch_size: int
  choice: Choice
  argument_bytes: int = 0
  output_bytes: int = 0
  temp_bytes: int = 0
  code_bytes: int = 0
  xla_peak_bytes: int | None = None
  flops: int = 0
  collectives: int = 0
  collective_bytes: int = 0
  wire_bytes: int = 0
  fits: bool = False
  analysed: bool = True

  @property
  def peak_bytes(self) -> int:
    """Memory of arguments, outputs, temporary buffers and code, all added up."""
    return self.fixed_bytes + self.temp_bytes

  @property
  def fixed_bytes(self) -> int:
    """Memory of arguments, outputs and code."""
    return self.argument_bytes + self.output_bytes + self.code_bytes


class Builder:
  """The steps that a user's `build_step` makes with one choice, and the arguments of that."""

  def __init__(
    self, build_step: BuildStep, args: GivenArgs, rows: int, choice: Choice
  ):
    self._build_step, self._rows, self._choice = build_step, rows, choice
    self._options = [f"{name}={value!r}" for name, value in choice.items()]
    self.args = self._given(args)
    self._programs: dict[str, int] = {}  # sizes, by the text of the program
    # If `build_step` takes the rows of a microbatch, they need not divide the batch.
    parameters = inspect.signature(build_step).parameters
    counts = parameters.get("num_microbatches")  # must a number be given too?
    needs_count = counts is not None and counts.default is counts.empty
    self.uneven = (
      "microbatch_size" in {*parameters} - {*choice} and not needs_count
    )
    self.first = self._step(rows)

  def _given(self, args: GivenArgs) -> Args:
    """The arguments of a call of the step, which may depend on the choice."""
    name = self._named = (
      f"args({', '.join(self._options)})" if callable(args) else "args"
    )
    if callable(args):
      if why := _validate.why_not(args, **self._choice):
        raise TypeError(
          f"{name}: {why}. A function must take the options in choices."
        )
      args = args(**self._choice)
    if not isinstance(args, (tuple, list)):
      raise TypeError(
        f"{name} must be a tuple, all that a step is called with: {args!r:.80}."
      )
    return tuple(args)

  def call(self, size: int) -> str:
    """A call of `build_step`, as a user would write it."""
    given = (
      f"microbatch_size={size}" if self.uneven else str(self._rows // size)
    )
    return f"build_step({', '.join([given, *self._options])})"

  def sizes(self) -> tuple[list[int], list[int]]:
    """The microbatches that the step can have, in rows, the smallest first: even and uneven."""
    rows, name = self._rows, self._named
    step = self.first if isinstance(self.first, Step) else None
    if (found := step.rows(self.args) if step else None) not in (None, rows):
      fix = f"give {found}" + ", as in every choice" * (name != "args")
      raise ValueError(
        f"batch_size={rows}, and the batch in {name} has {found} rows: {fix}."
      )
    dims = {
      n for x in jax.tree.leaves(self.args) for n in getattr(x, "shape", ())
    }
    if not any(n and n % rows == 0 for n in dims):
      raise ValueError(
        f"batch_size={rows}, and no array in {name} has so many rows: give the rows of the batch."
      )
    # All devices that have rows must divide each microbatch, not only those of the data axes.
    batch = self.args[getattr(step, "batch_position", 2) :] if step else ()
    parts = math.lcm(*map(self._parts, jax.tree.leaves(batch)))
    possible = step.sizes if step else cut.sizes

    def sizes(uneven: bool) -> list[int]:
      return [
        n
        for n in possible(rows, uneven)
        if not n % parts and not rows % n % parts
      ]

    # If there is none, as for noise_scale=True with one row, lowering raises an error of its own.
    return sizes(False) or [rows], sizes(True) if self.uneven else []

  def _parts(self, x: Any) -> int:
    """How many parts the rows of an array are in, over the devices."""
    shape, sharding = getattr(x, "shape", ()), getattr(x, "sharding", None)
    held = shape if sharding is None else sharding.shard_shape(shape)
    return math.lcm(
      *(
        n // part
        for n, part in zip(shape, held, strict=True)
        if n == self._rows
      )
    )

  def compile(self, size: int, limit: int, bar: Any) -> PlanCandidate:
    """Compiles one step, which a log and the progress `bar` show. Nothing runs."""
    _logger.info("compiling %s", self.call(size))
    bar.set_postfix_str(self.call(size))
    bar.update()
    split = -(-self._rows // size), size, self._choice
    try:
      lowered: jax.stages.Lowered = self._step(size).lower(*self.args)
      if (same := self._programs.setdefault(lowered.as_text(), size)) != size:
        option = "microbatch_size" if self.uneven else "num_microbatches"
        raise ValueError(
          f"{self.call(same)} and {self.call(size)} made the same program: build_step must pass the"
          f" number on, as in make_train_step(..., {option}={option})."
        )
      compiled = lowered.compile()
    except Exception as error:
      if _LARGER_THAN_THE_CHIP.search(str(error)):
        return PlanCandidate(*split, analysed=False)
      error.add_note(
        f"This is {self.call(size)}, lowered and compiled with args."
      )
      raise
    memory, collectives = (
      compiled.memory_analysis(),
      count_collectives(compiled).operations,
    )
    if memory is None:
      raise ValueError(
        "This backend's compiler does not report the memory of a program."
      )
    candidate = PlanCandidate(
      *split,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
      temp_bytes=memory.temp_size_in_bytes,
      code_bytes=memory.generated_code_size_in_bytes,
      xla_peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
      flops=matrix_flops(compiled.as_text() or ""),
      collectives=sum(c.executions for c in collectives),
      collective_bytes=sum(c.executions * c.bytes for c in collectives),
      wire_bytes=sum(c.executions * c.sent for c in collectives),
    )
    return dataclasses.replace(candidate, fits=candidate.peak_bytes <= limit)

  def _step(self, size: int) -> Any:
    if self.uneven:
      step = self._build_step(**self._choice, microbatch_size=size)
    else:
      step = self._build_step(self._rows // size, **self._choice)
    if not callable(getattr(step, "lower", None)):
      raise TypeError(
        f"{self.call(size)} returned {step!r:.80}, which has no lower(): return the result of"
        " make_train_step, or a function wrapped by jax.jit."
      )
    return step
