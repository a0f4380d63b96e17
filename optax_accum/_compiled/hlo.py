"""The text of an optimized HLO module: its operations, and how often each runs."""

from collections.abc import Callable, Iterator
import dataclasses
import math
import re
from typing import NamedTuple

from optax_accum._compiled import scopes


class Operation(NamedTuple):
  """``name = shape opcode(operands), attributes``."""

  name: str
  shape: str
  opcode: str
  operands: list[str]  # names
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


class Run(NamedTuple):
  """An operation as the program reaches it in one place."""

  operation: Operation
  computation: Computation
  place: Place


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
        name, shape, opcode, inner, attributes = written.groups()
        operands = re.findall(r"%([\w.\-]+)", inner)
        operands = operands or re.findall(r"[\w.\-]+", inner)
        computation.operations[name] = Operation(
          name, shape, opcode, operands, attributes
        )

  def runs(self, wanted: Callable[[Operation], bool]) -> Iterator[Run]:
    """The operations that are `wanted`, from wherever they are reached.

    All branches of a conditional count, and a loop of unknown trip count counts once.
    """

    def walk(computation, place):
      for op in computation.operations.values():
        here = place
        named = _OP_NAME.search(op.attributes)
        if named:
          here = here._replace(op_name=named[1])
        if wanted(op):
          yield Run(op, computation, here)
        # From here on: the place of what the operation runs, and how often it runs that.
        if _is_named(op, _ONCE_A_CYCLE):
          here = here._replace(at_cycle_end=True)
        times = {}
        if op.opcode == "while" and not ends_cycle(op):
          here = here._replace(loop=op.name)
          printed = _TRIP_COUNT.search(op.attributes)
          if printed:
            trips = int(printed[1])
            times = {"body": trips, "condition": trips + 1}
          else:
            loops = *here.unknown_trip_counts, f"{op.name} ({here.op_name})"
            here = here._replace(unknown_trip_counts=loops)
        for role, name in op.called():
          executions = here.executions * times.get(role, 1)
          inner = here._replace(executions=executions)
          yield from walk(self.computations[name], inner)

    return walk(self.entry, Place())


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


def array_bytes(array: str) -> int:
  """Bytes of ``bf16[8,128]``; less than a byte an element is packed."""
  dtype, _, written = array.partition("[")
  elements = math.prod(map(int, re.findall(r"\d+", written)))
  bits = re.search(r"\d+", dtype)
  if not bits:
    return elements  # of pred
  return math.ceil(elements * int(bits[0]) / 8)


_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
# Operands end before the first attribute, or with the line: in them and in shapes nothing is named.
_OPERATION = re.compile(
  r"\s+(?:ROOT\s+)?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(, [\w\-]+=.*|\s*)$"
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
_ENDS_CYCLE = re.compile(rf'\b{scopes.END_OF_CYCLE}\)*/(while|cond)"')
_ONCE_A_CYCLE = re.compile(rf"{_ENDS_CYCLE.pattern}|/{scopes.WHOLE_CYCLE}/")
_TRIP_COUNT = re.compile(r"\bknown_trip_count\W+n\W+(\d+)")
