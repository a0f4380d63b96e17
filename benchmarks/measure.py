"""Paired timing: ratios within one run, since machines differ and drift; time to compile."""

from collections.abc import Callable
import statistics
import time
from typing import Any, NamedTuple

import jax


class Compiled(NamedTuple):
  """A compiled function, and what compiling it took."""

  call: Callable[..., Any]
  compile_s: float
  temp_bytes: int
  program: str


def compile_step(
  fun: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> Compiled:
  """Compiles `fun` for `args`, from nothing."""
  lower = (
    fun.lower
    if hasattr(fun, "lower")
    else jax.jit(fun, donate_argnums=donate).lower
  )
  jax.clear_caches()
  start = time.perf_counter()
  compiled = lower(*args).compile()
  seconds = time.perf_counter() - start
  temp = compiled.memory_analysis().temp_size_in_bytes
  return Compiled(compiled, seconds, temp, compiled.as_text())


def paired_ms(
  calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
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
  return statistics.median(
    a / b for a, b in zip(times[name], times[reference], strict=True)
  )
