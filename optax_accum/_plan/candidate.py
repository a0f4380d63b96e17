"""A step that was compiled for a plan, and what XLA says of it."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import inspect
import re
from typing import Any, TypeAlias

import jax

from optax_accum._compiled.collectives import count_collectives
from optax_accum._compiled.matrix_flops import matrix_flops
from optax_accum._train_step.step import Step

Choice: TypeAlias = Mapping[str, Any]  # options of `build_step`; a plan tells them by identity

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
    xla_peak_bytes: XLA's ``peak_memory_in_bytes``, to compare with: less where buffers are not in
      use at the same time. On CPU it leaves temporary buffers out; on TPUs it may be more. None
      where this JAX has no such number.
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

  def __init__(
    self, build_step: Callable[..., Any], args: tuple[Any, ...], rows: int, choice: Choice
  ):
    self._build_step, self._args, self._rows, self._choice = build_step, args, rows, choice
    self._programs: dict[int, str] = {}  # by `num_microbatches`
    self.first = self._step(1)

  def call(self, num_microbatches: int) -> str:
    """A call of `build_step`, as a user would write it."""
    options = [f"{name}={value!r}" for name, value in self._choice.items()]
    return f"build_step({', '.join([str(num_microbatches), *options])})"

  def counts(self) -> list[int]:
    """The numbers of microbatches that the step can have, the largest first."""
    rows, step = self._rows, self.first if isinstance(self.first, Step) else None
    if step and (found := step.rows(self._args)) not in (None, rows):
      raise ValueError(f"batch_size={rows}, and the batch in args has {found} rows: give {found}.")
    dims = {n for x in jax.tree.leaves(self._args) for n in getattr(x, "shape", ())}
    if not any(n % rows == 0 for n in dims if n):
      raise ValueError(
        f"batch_size={rows}, and no array in args has so many rows: give the rows of the batch."
      )
    counts = step.counts(rows) if step else [n for n in range(rows, 0, -1) if rows % n == 0]
    if not counts:
      raise ValueError(f"batch_size={rows}, and a step with noise_scale=True needs 2 rows or more.")
    return counts

  def compile(self, num_microbatches: int, limit: int) -> PlanCandidate:
    """Compiles one step. Nothing runs."""
    candidate = PlanCandidate(num_microbatches, self._rows // num_microbatches, self._choice)
    try:
      compiled = self._lowered(num_microbatches).compile()
    except Exception as error:
      if _LARGER_THAN_THE_CHIP.search(str(error)):
        return dataclasses.replace(candidate, analysed=False)
      error.add_note(
        f"This is {self.call(num_microbatches)}, which plan_microbatches lowers and compiles with"
        " args. It is an error, and not a step that does not fit."
      )
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

  def check_used(self, counts: Sequence[int]) -> None:
    """Checks that another `num_microbatches` gives another program."""
    known = [n for n in counts if n in self._programs]
    others = [n for n in counts if n not in known]
    if len(known) == 1 and others:
      self._lowered(others[0])
      known.append(others[0])
    if len({self._programs[n] for n in known}) < len(known):
      raise ValueError(
        f"build_step made the same program for num_microbatches={known[0]} and {known[1]}: it must"
        " split the batch into as many microbatches as it is given, as in make_train_step(...,"
        " num_microbatches=num_microbatches)."
      )

  def _step(self, num_microbatches: int) -> Any:
    step = self._build_step(num_microbatches, **self._choice)
    if not callable(getattr(step, "lower", None)):
      raise TypeError(
        f"{self.call(num_microbatches)} returned {step!r:.80}, which has no lower(): return what"
        " make_train_step returns, or a function that jax.jit has wrapped."
      )
    return step

  def _lowered(self, num_microbatches: int) -> jax.stages.Lowered:
    lowered: jax.stages.Lowered = self._step(num_microbatches).lower(*self._args)
    self._programs[num_microbatches] = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    return lowered


def check_choices(build_step: Callable[..., Any], choices: Any) -> None:
  """Checks that `choices` are options, with values, that `build_step` takes."""
  is_step = hasattr(build_step, "lower") and not isinstance(build_step, type)
  if not callable(build_step) or is_step:
    raise TypeError(
      f"build_step={build_step!r:.80} must be a function build_step(num_microbatches, **choice)"
      " that returns a jitted step."
    )
  if not isinstance(choices, Mapping) or not all(isinstance(name, str) for name in choices):
    raise TypeError(
      f"choices={choices!r} must be a dict from options of build_step to lists of values to try,"
      ' such as {"remat": [False, True]}.'
    )
  for name, values in choices.items():
    if not isinstance(values, (list, tuple)) or not values:
      raise TypeError(f"choices[{name!r}]={values!r} must be a list of one value or more to try.")
  try:
    inspect.signature(build_step).bind(1, **dict.fromkeys(choices))
  except TypeError as error:
    takes = f"build_step{inspect.signature(build_step)}"
    given = ", ".join(["num_microbatches", *choices])
    raise TypeError(
      f"build_step is called with ({given}), and is {takes}: {error}. It must take num_microbatches"
      " as its first positional parameter, and the names of choices as others."
    ) from None
  except ValueError:
    pass  # a builtin, which has no signature
