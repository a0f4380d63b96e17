"""`MicrobatchPlan`: what was compiled, which of it fits, and what takes the memory."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import inspect
import math
from typing import Any

import jax

from optax_accum._plan import sizes
from optax_accum._plan.candidate import PlanCandidate

# Of steps whose work differs by less, the one with the larger microbatch is better.
_SAME_WORK = 0.01


@dataclasses.dataclass(frozen=True)
class MicrobatchPlan:
  """What `plan_microbatches` found; it prints as a table.

  Attributes:
    batch_size: The rows of the batch.
    limit_bytes: What a program may reserve on one device.
    candidates: The `PlanCandidate`s that were compiled. First those that fit, of the cheapest
      choice in floating-point operations first, and the largest microbatch of each choice first.
  """

  batch_size: int
  limit_bytes: int
  candidates: tuple[PlanCandidate, ...]

  @classmethod
  def of(cls, candidates: Iterable[PlanCandidate], rows: int, limit: int) -> "MicrobatchPlan":
    """The plan of what was compiled, in order."""
    candidates = list(candidates)
    choices: list[Mapping[str, Any]] = []
    for each in candidates:
      choices += [] if each.choice in choices else [each.choice]
    best = {}
    for i, choice in enumerate(choices):
      fitting = [c for c in candidates if c.choice == choice and c.fits]
      best[i] = max(fitting, key=lambda c: c.microbatch_size, default=None)
    found = [c for c in best.values() if c is not None]
    least = min((c.flops for c in found), default=0)

    def cost(i: int) -> tuple[Any, ...]:
      """Of a choice: by its largest microbatch that fits."""
      if (c := best[i]) is None:
        return (math.inf,)
      same = c.flops <= least * (1 + _SAME_WORK)
      return (0 if same else c.flops, -c.microbatch_size, i)

    ordered = sorted(
      candidates,
      key=lambda c: (not c.fits, cost(choices.index(c.choice)), -c.microbatch_size),
    )
    return cls(rows, limit, tuple(ordered))

  @property
  def num_microbatches(self) -> int:
    """How many microbatches to run."""
    return self.candidates[0].num_microbatches

  @property
  def microbatch_size(self) -> int:
    """The rows of one microbatch, on all devices together."""
    return self.candidates[0].microbatch_size

  @property
  def choice(self) -> Mapping[str, Any]:
    """The further options of `build_step`."""
    return self.candidates[0].choice

  @property
  def peak_bytes(self) -> int:
    """What the planned step reserves on one device."""
    return self.candidates[0].peak_bytes

  def __str__(self) -> str:
    limit = sizes.shown(self.limit_bytes)
    lines = [f"a batch of {self.batch_size} rows, within {limit} on each device", *self._table()]
    if self.candidates[0].fits:
      chosen = "".join(f", {name}={value!r}" for name, value in self.choice.items())
      split = f"num_microbatches={self.num_microbatches} (of {_rows(self.microbatch_size)})"
      lines.append(f"best: {split}{chosen}")
    return "\n".join(lines)

  def _table(self) -> list[str]:
    """All candidates, by choice and microbatch."""
    names = list(self.candidates[0].choice)
    head = ["microbatch", "N", *names, "arguments", "outputs", "temp", "code", "total", "XLA peak"]
    rows = [[*head, "matrix FLOPs", "collectives", "fits"]]
    for each in self.candidates:
      peak = "-" if each.xla_peak_bytes is None else sizes.shown(each.xla_peak_bytes)
      kinds = (each.argument_bytes, each.output_bytes, each.temp_bytes, each.code_bytes)
      memory = [*map(sizes.shown, kinds), sizes.shown(each.peak_bytes), peak, f"{each.flops:.3g}"]
      sent = (
        f"{each.collectives}, {sizes.shown(each.collective_bytes)}" if each.collectives else "-"
      )
      options = [str(each.choice[name]) for name in names]
      split = [str(each.microbatch_size), str(each.num_microbatches)]
      fits = "yes" if each.fits else "no"
      if not each.analysed:
        memory, sent = ["-"] * len(memory), "larger than the chip"
      rows.append([*split, *options, *memory, sent, fits])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
      "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]

  def plot(self, ax: Any = None) -> Any:
    """Draws the memory of each candidate over its microbatch, and the limit.

    Args:
      ax: A `matplotlib.axes.Axes` to draw on. Default: a new figure's.

    Returns:
      The axes; ``plan.plot().figure.savefig("plan.png")`` writes the picture.

    Raises:
      ImportError: matplotlib is not there: ``pip install "optax-accum[plot]"``.
    """
    ax = new_figure().subplots() if ax is None else ax
    mib = 2**20
    choices = list(dict.fromkeys(tuple(c.choice.items()) for c in self.candidates))
    for choice in choices:
      points = [c for c in self.candidates if tuple(c.choice.items()) == choice and c.analysed]
      points.sort(key=lambda c: c.microbatch_size)
      label = ", ".join(f"{name}={value}" for name, value in choice) or "compiled"
      x, y = [c.microbatch_size for c in points], [c.peak_bytes / mib for c in points]
      ax.plot(x, y, "o-", label=label)
    ax.axhline(self.limit_bytes / mib, color="black", linestyle="--", label="limit")
    fixed = self.candidates[0].fixed_bytes / mib
    ax.axhspan(0, fixed, color="0.9", label="arguments, outputs, code")
    if self.candidates[0].fits:
      best = f"best: {self.microbatch_size} rows"
      ax.plot(self.microbatch_size, self.peak_bytes / mib, "*", markersize=16, label=best)
    ax.set_xscale("log", base=2)
    ticks = sorted({c.microbatch_size for c in self.candidates})
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"rows of a microbatch, of a batch of {self.batch_size}")
    ax.set_ylabel("memory of a device, MiB")
    ax.legend()
    return ax


def new_figure() -> Any:
  """A figure of matplotlib, without its windows."""
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError('A plot needs matplotlib: pip install "optax-accum[plot]"') from error
  return Figure(figsize=(7, 4), layout="constrained")


def does_not_fit(plan: MicrobatchPlan, step: Any, args: Sequence[Any]) -> str:
  """Says what takes the memory where not even one row fits."""
  analysed = [c for c in plan.candidates if c.analysed]
  if not analysed:
    rows = _rows(min(c.microbatch_size for c in plan.candidates))
    return (
      f"Nothing fits: XLA compiles not even microbatches of {rows}, which are larger than the"
      " chip's memory. Shard parameters or state over more devices, or take a smaller model."
    )
  least = min(analysed, key=lambda c: (c.peak_bytes, c.microbatch_size))
  alike = [c for c in analysed if c.choice == least.choice and c.num_microbatches > 1]
  parts = _arguments(step, args)
  if least.output_bytes:
    parts["outputs that no argument was donated for"] = least.output_bytes
  if least.code_bytes:
    parts["code"] = least.code_bytes
  a, b = min(alike, key=lambda c: c.microbatch_size, default=least), least
  others = sorted((c for c in alike if c is not a), key=lambda c: c.microbatch_size)
  if others:
    b = others[0]
    per_row = max(b.temp_bytes - a.temp_bytes, 0) / (b.microbatch_size - a.microbatch_size)
    of_rows = min(int(per_row * a.microbatch_size), a.temp_bytes)
    parts["activations of a microbatch"] = of_rows
    parts["gradients, their accumulators and what else does not grow with it"] = (
      a.temp_bytes - of_rows
    )
  else:
    parts["temporary buffers (activations, gradients, accumulators)"] = a.temp_bytes
  most = max(parts, key=lambda name: parts[name])
  listed = "\n".join(f"  {sizes.shown(size):>10}  {name}" for name, size in parts.items())
  needs = sizes.shown(least.peak_bytes)
  return (
    f"Nothing fits: microbatches of {_rows(least.microbatch_size)} need {needs} on each device, and"
    f" the limit is {sizes.shown(plan.limit_bytes)}. Most of it is {most}:\n{listed}\n"
    "Give a larger memory_limit, shard parameters or state over more devices, have steps donate"
    f" them, use in_place=True or rematerialisation, or a smaller model.\n{plan}"
  )


def _rows(number: int) -> str:
  return "1 row" if number == 1 else f"{number} rows"


def _arguments(step: Any, args: Sequence[Any]) -> dict[str, int]:
  """The bytes of each argument on one device."""
  names = [f"argument {i}" for i in range(len(args))]
  try:
    parameters = [*inspect.signature(step).parameters][: len(args)]
    names[: len(parameters)] = parameters
  except (TypeError, ValueError):
    pass
  leaves = (sum(map(sizes.shard_bytes, jax.tree.leaves(x))) for x in args)
  return dict(zip(names, leaves, strict=True))
