"""A step that was compiled for a plan, and what XLA says of it."""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any, TypeAlias

import jax

from optax_accum._arithmetic.trees import Args
from optax_accum._compiled.collectives import count_collectives
from optax_accum._compiled.matrix_flops import matrix_flops
from optax_accum._train_step.step import Step

Choice: TypeAlias = Mapping[str, Any]  # options of `build_step`; a plan tells them by identity
BuildStep: TypeAlias = Callable[..., Any]

# XLA for TPU says so of a program when it has analysed its memory, and before anything runs.
_LARGER_THAN_THE_CHIP = re.compile("CompileTimeHbmOom|Ran out of memory in memory space hbm")


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
  """One step that `plan_microbatches` compiled. All numbers are per call and per device.

  Attributes:
    num_microbatches: What `build_step` was given.
    microbatch_size: The rows of one microbatch, on all devices together.
    choice: The further options that `build_step` was given.
    argument_bytes: Of the arguments: parameters, optimizer state, batch.
    output_bytes: Of what is returned, but for what is returned in donated arguments.
    temp_bytes: Of temporary buffers: activations, gradients and their accumulators.
    code_bytes: Of the program. (0 on CPU, where XLA does not say.)
    xla_peak_bytes: XLA's ``peak_memory_in_bytes``, to compare with. On CPU it leaves temporary
      buffers out. None where this JAX has no such number.
    flops: Floating-point operations in matrix products and convolutions. (Fewer where a device has
      one row of each microbatch: XLA writes such products as sums, which are not counted.)
    collectives: How many run.
    collective_bytes: What they return.
    fits: Whether `peak_bytes` is within the limit.
    analysed: Whether there are such numbers. XLA for TPU compiles no program that is larger than
      the chip's memory, and says so: it does not fit, and its numbers are 0.
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
  fits: bool = False
  analysed: bool = True

  @property
  def peak_bytes(self) -> int:
    """What is reserved for arguments, outputs, temporary buffers, and code."""
    return self.fixed_bytes + self.temp_bytes

  @property
  def fixed_bytes(self) -> int:
    """All but temporary buffers."""
    return self.argument_bytes + self.output_bytes + self.code_bytes


class Builder:
  """The steps that a user's `build_step` makes with one choice, for these arguments."""

  def __init__(self, build_step: BuildStep, args: Args, rows: int, choice: Choice):
    self._build_step, self._args, self._rows, self._choice = build_step, args, rows, choice
    self._programs: dict[str, int] = {}  # `num_microbatches`, by the text of the program
    self.first = self._step(1)

  def call(self, num_microbatches: int) -> str:
    """A call of `build_step`, as a user would write it."""
    options = [f"{name}={value!r}" for name, value in self._choice.items()]
    return f"build_step({', '.join([str(num_microbatches), *options])})"

  def counts(self) -> list[int]:
    """The numbers of microbatches that the step can have, the largest first."""
    rows, step = self._rows, self.first if isinstance(self.first, Step) else None
    found = step.rows(self._args) if step else None
    if found not in (None, rows):
      raise ValueError(f"batch_size={rows}, and the batch in args has {found} rows: give {found}.")
    dims = {n for x in jax.tree.leaves(self._args) for n in getattr(x, "shape", ())}
    if not any(n and n % rows == 0 for n in dims):
      raise ValueError(
        f"batch_size={rows}, and no array in args has so many rows: give the rows of the batch."
      )
    # What can have none, such as noise_scale of one row, has an error of its own when lowered.
    return (step.counts(rows) or [1]) if step else [n for n in range(rows, 0, -1) if rows % n == 0]

  def compile(self, num_microbatches: int, limit: int) -> PlanCandidate:
    """Compiles one step. Nothing runs."""
    candidate = PlanCandidate(num_microbatches, self._rows // num_microbatches, self._choice)
    try:
      lowered: jax.stages.Lowered = self._step(num_microbatches).lower(*self._args)
      self._check_other_program(lowered, num_microbatches)
      compiled = lowered.compile()
    except Exception as error:
      if _LARGER_THAN_THE_CHIP.search(str(error)):
        return dataclasses.replace(candidate, analysed=False)
      error.add_note(f"This is {self.call(num_microbatches)}, lowered and compiled with args.")
      raise
    memory, collectives = compiled.memory_analysis(), count_collectives(compiled).operations
    if memory is None:
      raise ValueError("This backend's compiler does not say how much memory a program needs.")
    candidate = dataclasses.replace(
      candidate,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
      temp_bytes=memory.temp_size_in_bytes,
      code_bytes=memory.generated_code_size_in_bytes,
      xla_peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
      flops=matrix_flops(compiled.as_text() or ""),
      collectives=sum(c.executions for c in collectives),
      collective_bytes=sum(c.executions * c.bytes for c in collectives),
    )
    return dataclasses.replace(candidate, fits=candidate.peak_bytes <= limit)

  def _check_other_program(self, lowered: jax.stages.Lowered, num_microbatches: int) -> None:
    same = self._programs.setdefault(lowered.as_text(), num_microbatches)
    if same != num_microbatches:
      raise ValueError(
        f"build_step made the same program for num_microbatches={same} and {num_microbatches}: it"
        " must split the batch into as many microbatches as it is given, as in"
        " make_train_step(..., num_microbatches=num_microbatches)."
      )

  def _step(self, num_microbatches: int) -> Any:
    step = self._build_step(num_microbatches, **self._choice)
    if not callable(getattr(step, "lower", None)):
      raise TypeError(
        f"{self.call(num_microbatches)} returned {step!r:.80}, which has no lower(): return what"
        " make_train_step returns, or a function that jax.jit has wrapped."
      )
    return step
