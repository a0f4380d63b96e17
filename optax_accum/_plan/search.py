"""The largest microbatch that fits, found by compiling few of them."""

from collections.abc import Callable

from optax_accum._plan.candidate import PlanCandidate

_NEARLY = (
  1.05  # times the limit: where nothing fits, and the smallest does nearly, one more is tried
)


class Search:
  """The search among `sizes`, the possible microbatches in rows, the smallest first.

  It ends when one that fits, and the next larger one that does not, were compiled. The memory of a
  scan is nearly a straight line in the rows of a microbatch, so the next one to compile is guessed
  from a line through those that were; but no further from the middle than lets bisecting end within
  a third of the sizes. (On TPUs the line has steps, of twice the memory and more, where a layout
  changes.)

  Where the last of the sizes is the `whole` batch, it is a program without a scan: without
  accumulators, and without a copy of a microbatch's rows, each of `row_bytes`. It is predicted
  without these, and may fit where half of it does not.
  """

  def __init__(
    self,
    sizes: list[int],
    whole: int,
    limit: int,
    row_bytes: float,
    compile_size: Callable[[int], PlanCandidate],
  ):
    self._sizes, self._limit, self._row_bytes = sizes, limit, row_bytes
    self._compile = compile_size
    self._whole = len(sizes) - 1 if sizes[-1] == whole else None
    self._budget = max(len(sizes) // 3, len(sizes).bit_length())
    self.known: dict[int, PlanCandidate] = {}

  def run(self) -> None:
    """Compiles until the largest one that fits is known."""
    low, high = -1, len(self._sizes)  # the largest that fits, the smallest that does not
    while high - low > 1:
      guess = self._guess(range(low + 1, high))
      if self._measure(guess).fits:
        low = guess
      else:
        high = guess
    for index in {self._whole, 1 if low < 0 else None} - {None} - self.known.keys():
      assert index is not None
      if index < len(self._sizes) and self._may_fit(index):
        self._measure(index)

  def _measure(self, index: int) -> PlanCandidate:
    self.known[index] = self._compile(self._sizes[index])
    return self.known[index]

  def _may_fit(self, index: int) -> bool:
    if index == self._whole:
      return self._predicted(index) <= self._limit
    return self.known[0].analysed and self.known[0].peak_bytes <= _NEARLY * self._limit

  def _guess(self, between: range) -> int:
    """What to compile next, of some that follow one another."""
    middle = between[(len(between) - 1) // 2]
    if not self.known:
      return middle
    analysed = [each for each in self.known.values() if each.analysed]
    if analysed and self._limit < min(each.fixed_bytes for each in analysed):
      return between[0]  # nothing will fit
    fitting = [i for i in between if analysed and self._predicted(i) <= self._limit]
    guess = fitting[-1] if fitting else between[0]
    # Either side of the guess must be small enough to be bisected with what is left.
    most = 2 ** max(self._budget - len(self.known) - 1, 0) - 1
    least, largest = between[-1] - most, between[0] + most
    return min(max(guess, least), largest) if least <= largest else middle

  def _predicted(self, index: int) -> float:
    """The memory of one that was not compiled."""
    scans = [i for i, each in self.known.items() if each.analysed and i != self._whole]
    if not scans:
      return 0  # nothing is known
    scans.sort(key=lambda i: abs(i - index))
    fixed = self.known[scans[0]].fixed_bytes
    two = scans[:2] if index != self._whole else [scans[0], *scans[:0:-1]][:2]  # far apart
    points = [(self._sizes[i], self.known[i].peak_bytes) for i in two]
    points += [(0, fixed)] * (2 - len(points))  # accumulators count as if they were of rows
    (x1, y1), (x2, y2) = points
    slope = max((y2 - y1) / (x2 - x1), 0)
    if index == self._whole:
      return fixed + max(slope - self._row_bytes, 0) * self._sizes[index]
    return y1 + slope * (self._sizes[index] - x1)
