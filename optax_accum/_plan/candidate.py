"""What XLA says of a step that was compiled for a plan."""

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeAlias

import jax

from optax_accum._compiled.collectives import count_collectives
from optax_accum._compiled.matrix_flops import matrix_flops

# Options of `build_step`; a plan compares them by identity.
Choice: TypeAlias = Mapping[str, Any]


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


def measured(
  candidate: PlanCandidate, compiled: jax.stages.Compiled, limit: int
) -> PlanCandidate:
  """The candidate with the numbers of its program, and whether it fits."""
  memory: Any = compiled.memory_analysis()
  collectives = count_collectives(compiled).operations
  found = dataclasses.replace(
    candidate,
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
  return dataclasses.replace(found, fits=found.peak_bytes <= limit)
