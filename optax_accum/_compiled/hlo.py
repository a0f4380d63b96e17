"""The text of an optimized HLO module: its operations, and how often each runs."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import math
import operator
import re
from typing import Any, NamedTuple, TypeAlias

from optax_accum import _scopes


class Operation(NamedTuple):
  """``name = shape opcode(operands), attributes``."""

  name: str
  shape: str
  opcode: str
  # Names; of a constant its value, of a parameter its number.
  operands: list[str]
  attributes: str

  def called(self) -> Iterator[tuple[str, str]]:
    """Roles and names of the computations that it runs."""
    if self.opcode.endswith(("-done", "-update")):
      return  # the start has run them
    for role, names in _CALLED.findall(_QUOTED.sub("", self.attributes)):
      # What a reduction applies (and an all-reduce is one) is arithmetic on scalars.
      if role != "to_apply" or self.opcode in ("call", "call-start"):
        for name in re.findall(r"[\w.\-]+", names):
          yield role, name


@dataclasses.dataclass
class Computation:
  """A block of operations; the program's, a loop's body, a fusion's, ..."""

  name: str
  root: str = ""
  operations: dict[str, Operation] = dataclasses.field(default_factory=dict)


class Place(NamedTuple):
  """Where a program reaches an operation."""

  # Per call of the program: the product of the loops' trip counts.
  executions: int = 1
  loop: str | None = None  # the innermost loop around it
  # Of its metadata, or of what calls it; "" where neither has one.
  op_name: str = ""
  # Loops around it that count once, outermost first.
  unknown_trip_counts: tuple[str, ...] = ()
  at_cycle_end: bool = False  # whether what is around it runs once a cycle

  def counted_once(self, loop: str) -> "Place":
    """The place within a further loop that counts once."""
    if self.op_name:
      loop += f" ({self.op_name})"
    loops = *self.unknown_trip_counts, loop
    return self._replace(unknown_trip_counts=loops)


class Run(NamedTuple):
  """An operation as the program reaches it in one place."""

  operation: Operation
  computation: Computation
  place: Place


# What is known of a program: an integer; of a tuple, a function from index to value.
Value: TypeAlias = Any
# The values of a computation's parameters, or of an operation's operands, by number.
Arguments: TypeAlias = Callable[[int], Value]
_UNKNOWN: Arguments = [].__getitem__  # it has none


class Module:
  """The computations of an HLO module, from its text."""

  def __init__(self, text: str):
    self.computations: dict[str, Computation] = {}
    computation = self.entry = Computation("")
    for line in text.splitlines():
      header = _HEADER.match(line)
      if header:
        computation = self.computations[header[2]] = Computation(header[2])
        if header[1]:
          self.entry = computation
        continue
      written = _OPERATION.match(line)
      if written:
        root, name, shape, opcode, inner, attributes = written.groups()
        operands = re.findall(r"%([\w.\-]+)", inner)
        operands = operands or re.findall(r"[\w.\-]+", inner)
        computation.operations[name] = Operation(
          name, shape, opcode, operands, attributes
        )
        if root:
          computation.root = name

  def runs(self, wanted: Callable[[Operation], bool]) -> Iterator[Run]:
    """The operations that are `wanted`, from wherever they are reached.

    All branches of a conditional count, and a loop of unknown trip count counts once.
    """

    def walk(scope, place):
      for op in scope.computation.operations.values():
        here = place
        named = _OP_NAME.search(op.attributes)
        if named:
          here = here._replace(op_name=named[1])
        if wanted(op):
          yield Run(op, scope.computation, here)
        # From here on: the place of what the operation runs, how often it runs that, and with what.
        if _is_named(op, _ONCE_A_CYCLE):
          here = here._replace(at_cycle_end=True)
        times = {}
        if op.opcode == "while" and not ends_cycle(op):
          here = here._replace(loop=op.name)
          trips = scope.trip_count(op)
          if trips is None:
            here = here.counted_once(op.name)
          else:
            times = {"body": trips, "condition": trips + 1}
        # What a conditional passes to a branch, and a loop to its body, is not known here.
        arguments = _UNKNOWN
        if op.opcode in ("fusion", "call"):
          arguments = scope.operands(op)
        for role, name in op.called():
          executions = here.executions * times.get(role, 1)
          inner = here._replace(executions=executions)
          yield from walk(scope.inner(name, arguments), inner)

    return walk(_Scope(self.computations, self.entry, _UNKNOWN), Place())


class _Scope(NamedTuple):
  """A computation as called from one place, with what is known of its arguments.

  XLA for TPU prints no trip counts, so what the condition of a loop compares is computed, as far as
  it is integers: an error tells that something is not known.
  """

  computations: dict[str, Computation]
  computation: Computation
  arguments: Arguments

  def trip_count(self, loop: Operation) -> int | None:
    """How often the body of a loop runs; None where the program does not fix it."""
    printed = _TRIP_COUNT.search(loop.attributes)
    if printed:
      return int(printed[1])
    called = dict(loop.called())
    try:
      state = self.operands(loop)(0)
      for trip in range(_MOST_TRIPS):
        given = [state].__getitem__
        if not self.inner(called["condition"], given).returned():
          return trip
        state = functools.cache(self.inner(called["body"], given).returned())
    except (LookupError, TypeError, ValueError):
      pass
    return None

  def inner(self, name: str, arguments: Arguments) -> "_Scope":
    """A computation that is called with these arguments."""
    return _Scope(self.computations, self.computations[name], arguments)

  def returned(self) -> Value:
    """The value of the computation."""
    return self._value(self.computation.root)

  def operands(self, op: Operation) -> Arguments:
    """The values of an operation's operands, by number."""

    def value(number):
      return self._value(op.operands[number])

    return value

  def _value(self, name: str) -> Value:
    """What an operation returns. Its operands are computed where they are asked for."""
    op = self.computation.operations[name]
    operand = self.operands(op)
    match op.opcode:
      case "constant":
        return int(op.operands[0])
      case "parameter":
        return self.arguments(int(op.operands[0]))
      case "tuple":
        # The value of a tuple is the function that has its elements by index.
        return operand
      case "get-tuple-element":
        (index,) = _INDEX.findall(op.attributes)
        elements = operand(0)
        return elements(int(index))
      case "fusion" | "call":
        _, called = next(op.called())
        return self.inner(called, operand).returned()
      case "compare":
        (direction,) = _DIRECTION.findall(op.attributes)
        return _COMPARE[direction](operand(0), operand(1))
      case "add":
        return operand(0) + operand(1)
      case "subtract":
        return operand(0) - operand(1)
      case (
        "copy" | "copy-start" | "copy-done" | "bitcast" | "convert" | "reshape"
      ):
        return operand(0)
    raise KeyError(name)


def ends_cycle(op: Operation) -> bool:
  """Whether this is the conditional that ends a cycle: `update_if` has a loop for one."""
  # Its own name is all that XLA for GPU leaves: a collective that it combines has none.
  return _is_named(op, _ENDS_CYCLE)


def _is_named(op: Operation, names: re.Pattern[str]) -> bool:
  """Whether this is a loop or a conditional of such a name."""
  if op.opcode not in ("while", "conditional"):
    return False
  return bool(names.search(op.attributes))


def parts(shape: str) -> list[str]:
  """The elements of a tuple's shape, each an array or a tuple of arrays."""
  return re.findall(rf"\([^()]*\)|{_ARRAY}", _LAYOUT.sub("", shape)[1:-1])


def arrays(shape: str) -> list[str]:
  """The arrays of a shape, without their layouts: ``["f32[8,128]", "s32[]"]``."""
  return re.findall(_ARRAY, _LAYOUT.sub("", shape))


def dims(array: str) -> list[int]:
  """The sizes of ``bf16[8,128]``."""
  _, _, written = array.partition("[")
  return [int(n) for n in re.findall(r"\d+", written)]


def array_bytes(array: str) -> int:
  """Bytes of ``bf16[8,128]``; less than a byte an element is packed."""
  bits = re.search(r"\d+", array.partition("[")[0])
  if not bits:
    return math.prod(dims(array))  # of pred
  return math.ceil(math.prod(dims(array)) * int(bits[0]) / 8)


_MOST_TRIPS = 2**16  # that are followed
_COMPARE = {
  "LT": operator.lt,
  "LE": operator.le,
  "GT": operator.gt,
  "GE": operator.ge,
  "NE": operator.ne,
}
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
# Operands end before the first attribute, or with the line: in them and in shapes nothing is named.
_OPERATION = re.compile(
  r"\s+(ROOT\s+)?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(, [\w\-]+=.*|\s*)$"
)
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/|\s")
_ARRAY = r"[a-z]\w*\[[^\]]*\]"
_CALLED = re.compile(
  r"\b(condition|body|calls|called_computations|branch_computations|true_computation"
  r"|false_computation|to_apply)=(\{[^}]*\}|%?[\w.\-]+)"
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
# At the end of an op_name.
_ENDS_CYCLE = re.compile(rf'\b{_scopes.END_OF_CYCLE}\)*/(while|cond)"')
_ONCE_A_CYCLE = re.compile(rf"{_ENDS_CYCLE.pattern}|/{_scopes.WHOLE_CYCLE}/")
_TRIP_COUNT = re.compile(r"\bknown_trip_count\W+n\W+(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
