"""Paired timing and compiled sizes: ratios within one run, since machines differ and drift."""

from collections.abc import Callable
import math
import re
import statistics
import time
from typing import Any, NamedTuple

import jax

from optax_accum import _hlo


class Compiled(NamedTuple):
  """A compiled function, and what compiling it took."""

  call: Callable[..., Any]
  compile_s: float
  temp_bytes: int
  program: str


def compile_step(fun: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Compiled:
  """Compiles `fun` for `args`, from nothing."""
  lower = fun.lower if hasattr(fun, "lower") else jax.jit(fun, donate_argnums=donate).lower
  jax.clear_caches()
  start = time.perf_counter()
  compiled = lower(*args).compile()
  seconds = time.perf_counter() - start
  temp = compiled.memory_analysis().temp_size_in_bytes
  return Compiled(compiled, seconds, temp, compiled.as_text())


def paired_ms(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """Milliseconds of every call in every round; the calls take turns, in changing order."""
  for call in calls.values():
    jax.block_until_ready(call())
  times: dict[str, list[float]] = {name: [] for name in calls}
  for i in range(rounds):
    names = list(calls)[:: 1 if i % 2 else -1]
    for name in names:
      start = time.perf_counter()
      jax.block_until_ready(calls[name]())
      times[name].append(1e3 * (time.perf_counter() - start))
  return times


def ratio(times: dict[str, list[float]], name: str, reference: str) -> float:
  """The median over rounds of one call's time over another's in the same round."""
  return statistics.median(a / b for a, b in zip(times[name], times[reference], strict=True))


def copies_of(program: str, elements: int) -> int:
  """How many ``copy`` operations on at least `elements` elements a compiled program has.

  Transfers to or from a TPU's on-chip memory (space ``S(1)``) are not among them: there a
  result is computed on the chip and the transfer is what writes it to memory.
  """
  copies = re.findall(r"= (\(?\w+\[([\d,]*)\].*) copy(?:-start)?\(", program)
  return sum(
    math.prod(int(n) for n in dims.split(",") if n) >= elements
    for types, dims in copies
    if "S(1)" not in types
  )


def dot_flops(program: str) -> int:
  """Floating-point operations of the matrix products of a compiled program, on one device.

  Two for each multiplication and addition, times the trip counts of the loops around them.
  """
  total = 0
  for run in _hlo.Module(program).runs(lambda op: op.opcode == "dot"):
    lhs = run.computation.operations[run.operation.operands[0]]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", run.operation.attributes)
    dims = [int(d) for d in contracted[1].split(",")] if contracted else []
    sizes = [_dims(lhs.shape)[d] for d in dims]
    total += 2 * math.prod(_dims(run.operation.shape)) * math.prod(sizes) * run.executions
  return total


def _dims(shape: str) -> list[int]:
  return [int(n) for n in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if n]
