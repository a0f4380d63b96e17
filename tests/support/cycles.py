"""The data of a draw: three cycles of calls, and the microbatches that each call is run in."""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IN, OUT = 8, 4
CYCLES = 3
FURTHER = 0.75  # an argument that is not split


@dataclasses.dataclass
class Microbatch:
  """The rows of one forward and backward pass; `device` and `index` are its place in the call."""

  device: int
  index: int
  rows: np.ndarray
  counts: bool  # False: it holds nothing but padding, or is not finite and left out
  skipped: bool  # it is left out because it is not finite


@dataclasses.dataclass
class Call:
  """One call of what is tested, with the batch of all devices."""

  number: int
  batch: dict[str, np.ndarray]
  microbatches: list[Microbatch]
  flush: bool
  skipped: bool  # it is no part of the cycle


def initial_params(draw) -> dict[str, Any]:
  """The parameters that training starts from, in the draw's dtype."""
  rng = np.random.default_rng((draw.seed, 1))
  params = {"w": rng.normal(size=(IN, OUT)) / 3, "b": rng.normal(size=OUT), "scale": np.array(1.5)}
  if draw.dtype == "complex64":
    # Small imaginary parts: tanh has a pole at i pi / 2.
    params["w"] = params["w"] + 0.1j * rng.normal(size=(IN, OUT))
    params["b"] = params["b"] + 0.1j * rng.normal(size=OUT)
  dtypes = {name: jnp.dtype(draw.dtype) for name in params}
  if draw.dtype == "complex64":
    dtypes["scale"] = jnp.dtype("float32")
  return {name: np.asarray(x).astype(dtypes[name]) for name, x in params.items()}


def initial_carry(draw) -> dict[str, np.ndarray]:
  """What the first call is given to thread: a running mean, and a count of rows."""
  mean = np.array(0.5, "float64" if draw.dtype == "float64" else "float32")
  return {"mean": mean, "seen": np.array(3, np.int32)}


def key_of(draw, call: Call) -> jax.Array:
  """The random key of a call."""
  seed = 1000 * draw.seed + call.number
  return jax.random.PRNGKey(seed) if draw.key == "raw" else jax.random.key(seed)


def cycles_of(draw) -> list[list[Call]]:
  """The calls of three cycles. The second is the one that is flushed, or empty."""
  rng = np.random.default_rng((draw.seed, 2))
  cycles, steps, number = [], 0, 0
  for cycle in range(CYCLES):
    wanted = 1 if not draw.accumulates else draw.every_k
    wanted = 1 + steps % 3 if wanted == "schedule" else wanted
    flush = draw.flush and cycle == 1 and wanted > 1
    wanted -= flush
    calls: list[Call] = []
    while wanted > 0:
      may_skip = not calls or not calls[-1].skipped
      fewer = dataclasses.replace(draw, size=1) if draw.uneven and wanted == 1 else draw
      empty = draw.empty and cycle == 1 and (draw.streams or not calls)
      calls.append(_call(fewer, rng, number, empty, may_skip))
      wanted, number = wanted - (not calls[-1].skipped), number + 1
    calls[-1].flush = flush
    steps += any(m.counts for call in calls for m in call.microbatches)
    cycles.append(calls)
  return cycles


def _call(draw, rng: np.random.Generator, number: int, empty: bool, may_skip: bool) -> Call:
  """A batch whose microbatches differ: those that hold fewer tokens have larger targets."""
  rows = draw.rows
  x, y = rng.normal(size=(rows, IN)), rng.normal(size=(rows, OUT))
  mask, microbatches = np.ones((rows, OUT)), []
  # As a batch that is filled up at its end: all that the last device has is padding.
  idle = draw.parts - 1 if draw.padding and draw.parts > 1 and rng.random() < 0.5 else None
  for device, index, of in _places(draw):
    dropped = rng.random()
    y[of] += 3 * dropped
    if draw.weights != "none":
      mask[of] = _tokens(draw, rng, len(of), dropped)
      mask[of] *= not (empty or device == idle or (draw.padding and rng.random() < 0.3))
    finite = not (draw.nan and may_skip and rng.random() < 0.3)
    if not finite:
      x[of[0], 0] = np.nan
    holds = bool(mask[of].any())
    microbatches.append(Microbatch(device, index, of, holds and finite, holds and not finite))
  skipped = draw.streams and any(m.skipped for m in microbatches)
  for m in microbatches:
    m.counts = m.counts and not skipped
  # A step of which nothing counts is none.
  if draw.entry == "step+accumulate":
    skipped = not any(m.counts for m in microbatches)
  real = np.float64 if draw.dtype == "float64" else np.float32
  y = (y + 1j * rng.normal(size=y.shape)).astype(np.complex64) if "complex" in draw.dtype else y
  batch = {
    "x": x.astype(real),
    "y": y if np.iscomplexobj(y) else y.astype(real),
    "mask": mask.astype(np.int32 if draw.weights == "counts" else real),
  }
  return Call(number, batch, microbatches, False, skipped)


def _tokens(draw, rng: np.random.Generator, rows: int, dropped: float) -> np.ndarray:
  """How much each token counts; the first of a row does, of the others so many do not."""
  counted = rng.random((rows, OUT)) >= dropped
  counted[:, 0] = True
  return counted * (rng.uniform(0.1, 1, (rows, OUT)) if draw.weights == "fractions" else 1.0)


def _places(draw) -> Iterator[tuple[int, int, np.ndarray]]:
  """Each microbatch's device, index and rows: a device's rows are split with a stride."""
  rows = draw.rows // draw.parts
  size = draw.full_size // draw.parts
  full, tail = divmod(rows, size)
  for device in range(draw.parts):
    for i in range(full):
      yield device, i, device * rows + np.arange(i, full * size, full)
    if tail:
      yield device, full, device * rows + np.arange(full * size, rows)


def sum_scale(draw) -> float:
  """What a loss that is a sum is multiplied with, so that its steps are no larger than a mean's."""
  return 1 / (4 * draw.rows * OUT)
