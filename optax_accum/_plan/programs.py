"""The programs of a plan: the microbatches that a step can have, and what XLA says of one."""

from collections.abc import Callable, Mapping
import dataclasses
import math
import operator
import re
import sys
from typing import Any, TypeAlias

import jax

from optax_accum._arithmetic.trees import Args
from optax_accum._train_step.program import Step

BuildStep: TypeAlias = Callable[..., Any]
# Options of `build_step`.
Choice: TypeAlias = Mapping[str, Any]

# Errors of XLA for TPU about a program that is too large, raised before anything runs.
_LARGER_THAN_THE_CHIP = re.compile(
  "CompileTimeHbmOom|Ran out of memory in memory space hbm"
)


@dataclasses.dataclass(frozen=True)
class PlanCandidate:
  """One step that `plan_microbatches` compiled. All bytes are of one device.

  Attributes:
    num_microbatches: The number of microbatches.
    microbatch_size: The rows of one microbatch, on all devices together.
    choice: The further options that `build_step` was given.
    argument_bytes: Memory of the arguments: parameters, optimizer state, batch.
    output_bytes: Memory of the outputs that are not written into donated arguments.
    temp_bytes: Memory of temporary buffers: activations, gradients and their accumulators.
    code_bytes: Memory of the program. 0 on CPU, where XLA does not report it.
    fits: Whether `peak_bytes` is within the limit. Where XLA for TPU refused to compile what is
      larger than the chip, it is False and the bytes are 0.
  """

  num_microbatches: int
  microbatch_size: int
  choice: Choice
  argument_bytes: int = 0
  output_bytes: int = 0
  temp_bytes: int = 0
  code_bytes: int = 0
  fits: bool = False

  @property
  def peak_bytes(self) -> int:
    """Memory of arguments, outputs, temporary buffers and code, all added up."""
    return self.fixed_bytes + self.temp_bytes

  @property
  def fixed_bytes(self) -> int:
    """Memory of arguments, outputs and code."""
    return self.argument_bytes + self.output_bytes + self.code_bytes


def memory_of_a_device(args: Args) -> int:
  """What a program may use of the memory that the device of the arguments reports."""
  placed = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
  devices = [d for x in placed for d in getattr(x, "device_set", ())]
  device = min(devices or jax.devices(), key=operator.attrgetter("id"))
  try:
    # Some is left free, because free memory is fragmented.
    return int(device.memory_stats()["bytes_limit"] * 0.95)
  # What devices raise, or None does, that do not report their memory.
  except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, KeyError):
    raise ValueError(
      f"memory_limit=None uses the memory that the device reports, and {device} reports none:"
      ' give memory_limit, such as "16GiB".'
    ) from None


def possible_sizes(step, args: Args, rows: int) -> list[int]:
  """The rows that a microbatch can have, ascending: equal parts of the batch, on all devices."""
  parts = fewest = 1
  is_step = isinstance(step, Step)
  if is_step:
    parallel = step.loss.parallel
    args = args[step.batch_position :]
    if parallel is not None:
      parts = parallel.devices
    elif step.loss.local.noise_scale:
      fewest = 2
  leaves = jax.tree.leaves(args)
  batch = [x for x in leaves if getattr(x, "shape", ())[:1] == (rows,)]
  if is_step and not batch:
    raise ValueError(
      f"batch_size={rows}, and no array of the batch has so many rows: give the rows of the batch."
    )
  # All devices that have rows must divide a microbatch, not only those of the data axes.
  for x in batch:
    sharding = getattr(x, "sharding", None)
    if sharding is not None:
      parts = math.lcm(parts, rows // sharding.shard_shape(x.shape)[0])
  largest = rows // fewest
  found = [n for n in range(1, largest + 1) if rows % n == 0 and n % parts == 0]
  return found or [largest]


def compiled(
  build_step: BuildStep,
  args: Args,
  candidate: PlanCandidate,
  limit: int,
) -> PlanCandidate:
  """The candidate with the memory of its program. Nothing runs."""
  count = candidate.num_microbatches
  choice = candidate.choice
  options = "".join(f", {name}={value!r}" for name, value in choice.items())
  # Compiling may take minutes, in silence.
  print(f"compiling build_step({count}{options})", file=sys.stderr, flush=True)
  try:
    program = build_step(count, **choice).lower(*args).compile()
  except jax.errors.JaxRuntimeError as error:
    if _LARGER_THAN_THE_CHIP.search(str(error)):
      return candidate
    raise
  memory: Any = program.memory_analysis()
  found = dataclasses.replace(
    candidate,
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    code_bytes=memory.generated_code_size_in_bytes,
  )
  return dataclasses.replace(found, fits=found.peak_bytes <= limit)
