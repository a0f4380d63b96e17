"""`MicrobatchPlan`: what was compiled, which of it fits, and what takes the memory."""

from collections.abc import Sequence
import dataclasses
import operator

from optax_accum._plan import sizes
from optax_accum._plan.candidate import Choice, PlanCandidate

# FLOPs or bytes of choices that differ by less do not tell them apart.
_SAME = 0.01
_WIDTH = 85  # of the table
_YES = {True: "yes", False: "no"}

_best = operator.attrgetter("fits", "microbatch_size")


@dataclasses.dataclass(frozen=True)
class MicrobatchPlan:
  """The result of `plan_microbatches`. ``print(plan)`` shows a table.

  Attributes:
    batch_size: The rows of the batch.
    limit_bytes: The memory that a program may use on one device.
    candidates: Each program that was compiled: those that fit first; of them the choice with the
      fewest `flops` first, then with the fewest `wire_bytes`, then with the fewest microbatches (a
      difference of 1% is none); and of a choice the largest microbatch.
  """

  batch_size: int
  limit_bytes: int
  candidates: tuple[PlanCandidate, ...]

  @classmethod
  def of(
    cls, found: Sequence[Sequence[PlanCandidate]], rows: int, limit: int
  ) -> "MicrobatchPlan":
    """The plan of what was compiled of each choice."""
    # Of a choice the largest microbatch that fits is first.
    choices = [sorted(each, key=_best, reverse=True) for each in found]
    fitting = [each for each in choices if each[0].fits]
    least_work = min(map(_work, fitting), default=0)
    light = [each for each in fitting if not _beyond(least_work, _work(each))]
    least_sent = min((each[0].wire_bytes for each in light), default=0)

    def cost(each):
      work = _beyond(least_work, _work(each))
      sent = _beyond(least_sent, each[0].wire_bytes)
      return work, sent, -each[0].microbatch_size

    candidates = [c for each in sorted(choices, key=cost) for c in each]
    candidates.sort(key=operator.attrgetter("fits"), reverse=True)
    return cls(rows, limit, tuple(candidates))

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
    limit = sizes.shown(self.limit_bytes)
    lines = [
      f"a batch of {_rows(self.batch_size)}, within {limit} on each device",
      *self._table(),
    ]
    if not all(c.analysed for c in self.candidates):
      lines.append(
        "A line without numbers: XLA compiles no program larger than the chip's memory."
      )
    if self.candidates[0].fits:
      options = [f"{name}={_named(x)}" for name, x in self.choice.items()]
      lines.append(", ".join([f"best: {self._split()}", *options]))
    return "\n".join(lines)

  def _split(self) -> str:
    """The option of a step that has the planned microbatches."""
    count = self.num_microbatches
    size = self.microbatch_size
    last = self.batch_size % size
    if not last:
      return f"num_microbatches={count} (of {_rows(size)})"
    return f"microbatch_size={size} ({count} microbatches, the last of {_rows(last)})"

  def _table(self) -> list[str]:
    """All candidates, by choice and microbatch."""
    in_bytes = ["peak_bytes", "temp_bytes"]
    if any(c.collectives for c in self.candidates):
      in_bytes.insert(1, "wire_bytes")
    kept = ["fits", "microbatches", "rows", *self.choice]
    table = [[*kept, *in_bytes, "matrix FLOPs"]]
    for c in self.candidates:
      row = [_YES[c.fits], str(c.num_microbatches), str(c.microbatch_size)]
      row += [_named(value)[:20] for value in c.choice.values()]
      numbers = [sizes.shown(getattr(c, name)) for name in in_bytes]
      numbers.append(f"{c.flops:.3g}")
      if not c.analysed:
        numbers = ["-" for _ in numbers]
      table.append(row + numbers)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    # What a page has no room for is left out from the right, to the memory that is reserved.
    while (
      sum(widths) + 2 * len(widths) - 2 > _WIDTH and len(widths) > len(kept) + 1
    ):
      widths.pop()
    return ["  ".join(map(str.rjust, row, widths)) for row in table]


def _work(each: Sequence[PlanCandidate]) -> int:
  """The operations of a step of one choice."""
  # The same for all sizes, except one row per device, which XLA writes in a way not counted.
  return max(c.flops for c in each)


def _beyond(least: int, cost: int) -> int:
  """A cost, and 0 where it is so near the least one that they are not told apart."""
  if cost <= least * (1 + _SAME):
    return 0
  return cost


def _named(value: object) -> str:
  return getattr(value, "__name__", repr(value))


def _rows(number: int) -> str:
  if number == 1:
    return "1 row"
  return f"{number} rows"


def does_not_fit(plan: MicrobatchPlan) -> str:
  """The message that says what takes the memory, if not even one row fits."""
  fix = (
    "shard parameters or optimizer state over more devices, use donate=True, in_place=True or"
    f" rematerialization, or use a smaller model.\n{plan}"
  )
  analysed = [c for c in plan.candidates if c.analysed]
  if not analysed:
    return f"Nothing fits into the memory of the chip: {fix}"
  least = min(
    analysed, key=operator.attrgetter("peak_bytes", "microbatch_size")
  )
  parts = [
    (least.argument_bytes, "arguments: parameters, optimizer state, batch"),
    (least.output_bytes, "outputs without a donated argument"),
    (least.code_bytes, "code"),
    (
      least.temp_bytes,
      "temporary buffers: activations, gradients, accumulators",
    ),
  ]
  listed = [f"\n  {sizes.shown(n):>10}  {name}" for n, name in parts if n]
  needs = sizes.shown(least.peak_bytes)
  limit = sizes.shown(plan.limit_bytes)
  return (
    f"Nothing fits: microbatches of {_rows(least.microbatch_size)} need {needs} on each device, and"
    f" the limit is {limit}. Most of it is {max(parts)[1]}:{''.join(listed)}\n"
    f"Give a larger memory_limit, {fix}"
  )
