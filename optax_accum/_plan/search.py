"""The largest microbatch that fits, found by compiling few of them."""

from collections.abc import Callable

from optax_accum._plan.candidate import PlanCandidate


class Search:
  """The search among `sizes`, the possible microbatches in rows, the smallest first.

  It ends when one that fits, and the next larger one that does not, were compiled. The memory of a
  scan is nearly a straight line in the rows of a microbatch, so the next one to compile is guessed
  from a line through those that were; but no further from the middle than lets bisecting end within
  a third of the sizes. (On TPUs the line has steps, of twice the memory and more, where a layout
  changes.)

  The whole batch, the last of the sizes, is a program without a scan: without accumulators, and
  without a copy of a microbatch's rows, each of `row_bytes`. It is predicted without these, and may
  fit where half of it does not.
  """

  def __init__(
    self,
    sizes: list[int],
    limit: int,
    row_bytes: float,
    compile_size: Callable[[int], PlanCandidate],
  ):
    self._sizes, self._limit, self._row_bytes = sizes, limit, row_bytes
    self._compile, self._whole = compile_size, len(sizes) - 1
    self._budget = max(len(sizes) // 3, len(sizes).bit_length())
    self.known: dict[int, PlanCandidate] = {}

  def run(self) -> None:
    """Compiles until the largest one that fits is known."""
    low, high = -1, len(self._sizes)  # the largest that fits, the smallest that does not
    while high - low > 1:
      guess = self._guess(low, high)
      if self._measure(guess).fits:
        low = guess
      else:
        high = guess
    if self._whole not in self.known and self._predicted(self._whole) <= self._limit:
      self._measure(self._whole)

  def _measure(self, index: int) -> PlanCandidate:
    self.known[index] = self._compile(self._sizes[index])
    return self.known[index]

  def _guess(self, low: int, high: int) -> int:
    """What to compile next, between the two."""
    between = range(low + 1, high)
    if not self.known:
      return between[(len(between) - 1) // 2]
    if self._limit < self._fixed:
      return 0  # nothing will fit
    fitting = [i for i in between if self._predicted(i) <= self._limit]
    guess = fitting[-1] if fitting else between[0]
    # Either side of the guess must be small enough to be bisected with what is left.
    most = 2 ** max(self._budget - len(self.known) - 1, 0) - 1
    least, largest = high - 1 - most, low + 1 + most
    return min(max(guess, least), largest) if least <= largest else between[len(between) // 2]

  @property
  def _fixed(self) -> int:
    """What does not depend on how the batch is split."""
    return max((each.fixed_bytes for each in self._analysed.values()), default=0)

  @property
  def _analysed(self) -> dict[int, PlanCandidate]:
    """Those of which XLA has told the memory."""
    return {i: each for i, each in self.known.items() if each.analysed}

  def _predicted(self, index: int) -> float:
    """The memory of one that was not compiled."""
    scans = sorted(self._analysed.keys() - {self._whole}, key=lambda i: abs(i - index))
    points = [(self._sizes[i], self.known[i].peak_bytes) for i in scans[:2]]
    points += [(0, self._fixed)] * (2 - len(points))  # accumulators count as if they were of rows
    (x1, y1), (x2, y2) = points
    slope = max((y2 - y1) / (x2 - x1), 0) if x2 != x1 else 0
    if index == self._whole:
      return self._fixed + max(slope - self._row_bytes, 0) * self._sizes[index]
    return y1 + slope * (self._sizes[index] - x1)
