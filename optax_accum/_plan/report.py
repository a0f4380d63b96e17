"""`MicrobatchPlan`: what was compiled, which of it fits, and what takes the memory."""

from collections.abc import Callable, Sequence
import dataclasses
import operator
from typing import Any, TypeAlias

from optax_accum._plan import sizes
from optax_accum._plan.candidate import Choice, PlanCandidate

_SAME = (
  0.01  # FLOPs or bytes of choices that differ by less do not tell them apart
)
_WIDTH = 85  # of the table

_size = operator.attrgetter("microbatch_size")
Each: TypeAlias = Sequence[PlanCandidate]  # what was compiled of one choice


@dataclasses.dataclass(frozen=True)
class MicrobatchPlan:
  """The result of `plan_microbatches`. ``print(plan)`` shows a table, ``plan.plot()`` a plot.

  Attributes:
    batch_size: The rows of the batch.
    limit_bytes: The memory that a program may use on one device.
    candidates: Each `PlanCandidate` that was compiled: those that fit first; of them the choice
      with the fewest `flops` first, then with the fewest `wire_bytes`, then with the fewest
      microbatches (a difference of 1% is none); and of a choice the largest microbatch.
  """

  batch_size: int
  limit_bytes: int
  candidates: tuple[PlanCandidate, ...]

  @classmethod
  def of(cls, found: Sequence[Each], rows: int, limit: int) -> "MicrobatchPlan":
    """The plan of what was compiled of each choice."""

    def planned(each: Each) -> PlanCandidate:
      return max(each, key=lambda c: (c.fits, _size(c)))

    def nearly(
      cost: Callable[[Each], int], among: Sequence[Each]
    ) -> Callable[[Each], int]:
      least = min(map(cost, among), default=0)
      return lambda each: 0 if cost(each) <= least * (1 + _SAME) else cost(each)

    fitting = [each for each in found if planned(each).fits]
    # The same for all sizes, except one row per device, which XLA writes in a way not counted.
    work = nearly(lambda each: max(c.flops for c in each), fitting)
    sent = nearly(
      lambda each: planned(each).wire_bytes, [x for x in fitting if not work(x)]
    )
    by_cost = sorted(
      found, key=lambda each: (work(each), sent(each), -_size(planned(each)))
    )
    ordered = [
      c for each in by_cost for c in sorted(each, key=_size, reverse=True)
    ]
    return cls(rows, limit, tuple(sorted(ordered, key=lambda c: not c.fits)))

  @property
  def num_microbatches(self) -> int:
    """The number of microbatches to use."""
    return self.candidates[0].num_microbatches

  @property
  def microbatch_size(self) -> int:
    """The rows of one microbatch, on all devices together. The last may have fewer."""
    return self.candidates[0].microbatch_size

  @property
  def choice(self) -> Choice:
    """The further options of `build_step` to use."""
    return self.candidates[0].choice

  @property
  def peak_bytes(self) -> int:
    """The memory that the planned step needs on one device."""
    return self.candidates[0].peak_bytes

  def __str__(self) -> str:
    limit, count, size = (
      sizes.shown(self.limit_bytes),
      self.num_microbatches,
      self.microbatch_size,
    )
    lines = [
      f"a batch of {_rows(self.batch_size)}, within {limit} on each device",
      *self._table(),
    ]
    if not all(c.analysed for c in self.candidates):
      lines.append(
        "A line without numbers: XLA compiles no program larger than the chip's memory."
      )
    if self.candidates[0].fits:
      split = f"num_microbatches={count} (of {_rows(size)})"
      if last := self.batch_size % size:
        split = f"microbatch_size={size} ({count} microbatches, the last of {_rows(last)})"
      lines.append(", ".join([f"best: {split}", *_options(self.choice)]))
    return "\n".join(lines)

  def _table(self) -> list[str]:
    """All candidates, by choice and microbatch."""
    kept = ["fits", "microbatches", "rows", *self.choice, "peak_bytes"]
    sent = ["wire_bytes"] * any(c.collectives for c in self.candidates)
    rows = [[*kept, *sent, "temp_bytes", "matrix FLOPs"]]
    for c in self.candidates:
      in_bytes = [
        getattr(c, name) for name in ("peak_bytes", *sent, "temp_bytes")
      ]
      numbers = [*map(sizes.shown, in_bytes), f"{c.flops:.3g}"]
      split = (
        "yes" if c.fits else "no",
        str(c.num_microbatches),
        str(c.microbatch_size),
      )
      values = (_named(value)[:20] for value in c.choice.values())
      rows.append(
        [*split, *values, *(numbers if c.analysed else ["-"] * len(numbers))]
      )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while (
      len(widths) > len(kept) and sum(widths) + 2 * len(widths) - 2 > _WIDTH
    ):
      widths.pop()
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]

  def plot(self, ax: Any = None) -> Any:
    """Draws the memory of each candidate over its microbatch size, and the limit; returns the axes.

    ``plan.plot().figure.savefig("plan.png")`` writes a picture. `ax` is a `matplotlib.axes.Axes` to
    draw on; default: that of a new figure. Needs ``pip install "optax-accum[plot]"``.
    """
    if ax is None:
      try:
        from matplotlib.figure import Figure  # without its windows
      except ImportError as error:
        raise ImportError(
          'A plot needs matplotlib: pip install "optax-accum[plot]"'
        ) from error
      ax = Figure(figsize=(7, 4), layout="constrained").subplots()
    analysed = [c for c in self.candidates if c.analysed]
    most = max([self.limit_bytes, *(c.peak_bytes for c in analysed)])
    name, unit = ("GiB", 2**30) if most >= 2**31 else ("MiB", 2**20)
    for choice in {id(c.choice): c.choice for c in self.candidates}.values():
      points = sorted((c for c in analysed if c.choice is choice), key=_size)
      peaks, label = (
        [c.peak_bytes / unit for c in points],
        ", ".join(_options(choice)),
      )
      ax.plot([*map(_size, points)], peaks, "o-", label=label or "compiled")
    ax.axhline(
      self.limit_bytes / unit, color="0.5", linestyle="--", label="limit"
    )
    if (best := self.candidates[0]).fits:
      sent = (
        f", sends {sizes.shown(best.wire_bytes)}" if best.wire_bytes else ""
      )
      label = f"best: {_rows(best.microbatch_size)}{sent}"
      ax.plot(
        best.microbatch_size,
        best.peak_bytes / unit,
        "k*",
        markersize=14,
        label=label,
      )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set(ylim=(0, None), ylabel=f"peak memory of a device, {name}")
    ax.set_xlabel(f"rows of a microbatch, of a batch of {self.batch_size}")
    ax.legend()
    return ax


def _options(choice: Choice) -> list[str]:
  return [f"{name}={_named(value)}" for name, value in choice.items()]


def _named(value: object) -> str:
  return getattr(value, "__name__", None) or repr(value)


def _rows(number: int) -> str:
  return "1 row" if number == 1 else f"{number} rows"


def does_not_fit(plan: MicrobatchPlan) -> str:
  """The message that says what takes the memory, if not even one row fits."""
  fix = "shard parameters or optimizer state over more devices, use donate=True, in_place=True or"
  fix += f" rematerialization, or use a smaller model.\n{plan}"
  analysed = [c for c in plan.candidates if c.analysed]
  if not analysed:
    return f"Nothing fits into the memory of the chip: {fix}"
  least = min(analysed, key=lambda c: (c.peak_bytes, c.microbatch_size))
  parts = {
    "arguments: parameters, optimizer state, batch": least.argument_bytes,
    "outputs without a donated argument": least.output_bytes,
    "code": least.code_bytes,
    "temporary buffers: activations, gradients, accumulators": least.temp_bytes,
  }
  listed = "\n".join(
    f"  {sizes.shown(size):>10}  {name}" for name, size in parts.items() if size
  )
  needs, limit = sizes.shown(least.peak_bytes), sizes.shown(plan.limit_bytes)
  return (
    f"Nothing fits: microbatches of {_rows(least.microbatch_size)} need {needs} on each device, and"
    f" the limit is {limit}. Most of it is {max(parts, key=parts.__getitem__)}:\n{listed}\n"
    f"Give a larger memory_limit, {fix}"
  )
