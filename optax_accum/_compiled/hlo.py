"""The text of an optimized HLO module: its operations, and how often each runs."""

from collections.abc import Callable, Iterator
import functools
import math
import operator
import re
from typing import Any, NamedTuple

from optax_accum import _scopes


class Operation(NamedTuple):
  """``name = shape opcode(operands), attributes``."""

  name: str
  shape: str
  opcode: str
  operands: tuple[
    str, ...
  ]  # names; of a constant its value, of a parameter its number
  attributes: str
  called: tuple[
    tuple[str, str], ...
  ]  # roles and names of the computations that it runs


class Computation:
  """A block of operations; the program's, a loop's body, a fusion's, ..."""

  def __init__(self, name: str):
    self.name, self.root = name, ""
    self.operations: dict[str, Operation] = {}


class Run(NamedTuple):
  """An operation as the program reaches it in one place."""

  operation: Operation
  computation: Computation
  executions: int = (
    1  # per call of the program: the product of the loops' trip counts
  )
  loop: str | None = None  # the innermost loop around it
  at_cycle_end: bool = False  # whether what is around it runs once a cycle
  op_name: str = (
    ""  # of its metadata, or of what calls it; "" where neither has one
  )
  unknown_trip_counts: tuple[
    str, ...
  ] = ()  # loops around it that count once, outermost first


class _Scope(NamedTuple):
  """A computation as called from one place. That of the program, or of a loop, has no caller."""

  computation: Computation
  arguments: tuple[str, ...] = ()
  caller: "_Scope | None" = None


class Module:
  """The computations of an HLO module, from its text."""

  def __init__(self, text: str):
    self.computations: dict[str, Computation] = {}
    computation = self.entry = Computation("")
    for line in text.splitlines():
      if header := _HEADER.match(line):
        computation = self.computations[header[2]] = Computation(header[2])
        self.entry = computation if header[1] else self.entry
      elif written := _OPERATION.match(line):
        computation.operations[written[2]] = _operation(written)
        if written[1]:
          computation.root = written[2]

  def runs(self, wanted: Callable[[Operation], bool]) -> Iterator[Run]:
    """The operations that are `wanted`, from wherever they are reached.

    All branches of a conditional count, and a loop of unknown trip count counts once.
    """

    def walk(scope: _Scope, around: Run | None) -> Iterator[Run]:
      for op in scope.computation.operations.values():
        run = (around or Run(op, self.entry))._replace(
          operation=op, computation=scope.computation
        )
        if named := _OP_NAME.search(op.attributes):
          run = run._replace(op_name=named[1])
        if wanted(op):
          yield run
        times: dict[str, int] = {}
        if op.opcode in ("while", "conditional") and _ONCE_A_CYCLE.search(
          op.attributes
        ):
          run = run._replace(at_cycle_end=True)
        if op.opcode == "while" and not ends_cycle(op):
          run = run._replace(loop=op.name)
          if (trips := self._trip_count(op, scope)) is not None:
            times = {"body": trips, "condition": trips + 1}
          else:
            shown = f"{op.name} ({run.op_name})" if run.op_name else op.name
            run = run._replace(
              unknown_trip_counts=(*run.unknown_trip_counts, shown)
            )
        for role, name in op.called:
          inner = run._replace(executions=run.executions * times.get(role, 1))
          yield from walk(self._callee(op, name, scope), inner)

    return walk(_Scope(self.entry), None)

  def _callee(self, op: Operation, name: str, scope: _Scope) -> _Scope:
    computation = self.computations[name]
    # A conditional passes one operand to each branch instead.
    passes = op.opcode in ("fusion", "call")
    return (
      _Scope(computation, op.operands, scope) if passes else _Scope(computation)
    )

  def _trip_count(self, loop: Operation, scope: _Scope) -> int | None:
    """How often the body of a loop runs; None where the program does not fix it."""
    if known := _TRIP_COUNT.search(loop.attributes):
      return int(known[1])
    # XLA for TPU prints no trip counts, so the integers that the condition compares are followed.
    called = {
      role: _Scope(self.computations[name]) for role, name in loop.called
    }
    condition, body = called["condition"], called["body"]
    condition, test, _ = self._source(
      condition, condition.computation.root, None
    )

    @functools.cache
    def carried(trip: int, index: int) -> int:
      if trip == 0:
        return self._integer(scope, loop.operands[0], index, {}.__getitem__)
      before = functools.partial(carried, trip - 1)
      return self._integer(body, body.computation.root, index, before)

    try:
      holds = _OPERATORS[re.findall(r"\bdirection=(\w+)|$", test.attributes)[0]]
      for trip in range(_MOST_TRIPS):
        now = functools.partial(carried, trip)
        if not holds(
          *(self._integer(condition, name, None, now) for name in test.operands)
        ):
          return trip
    except (KeyError, ValueError):
      pass
    return None

  def _integer(
    self, scope: _Scope, name: str, index: Any, carried: Callable[[Any], int]
  ) -> int:
    """A number that is constant but for what a loop carries; else a KeyError or a ValueError."""
    scope, op, index = self._source(scope, name, index)
    if op.opcode == "constant":
      return int(op.operands[0])
    if op.opcode == "parameter":
      return carried(index)
    return _OPERATORS[op.opcode](
      *(self._integer(scope, x, None, carried) for x in op.operands)
    )

  def _source(
    self, scope: _Scope, name: str, index: int | None
  ) -> tuple[_Scope, Operation, int | None]:
    """The operation whose value (or whose element `index`) this is, behind copies and calls."""
    while True:
      op = scope.computation.operations[name]
      if op.opcode == "get-tuple-element" and index is None:
        name, index = (
          op.operands[0],
          int(re.findall(r"\bindex=(\d+)", op.attributes)[0]),
        )
      elif op.opcode == "tuple" and index is not None:
        name, index = op.operands[index], None
      elif op.opcode in ("fusion", "call"):
        scope = self._callee(op, op.called[0][1], scope)
        name = scope.computation.root
      elif op.opcode == "parameter" and scope.caller is not None:
        name, scope = scope.arguments[int(op.operands[0])], scope.caller
      elif op.opcode in (
        "copy",
        "copy-start",
        "copy-done",
        "bitcast",
        "convert",
        "reshape",
      ):
        name = op.operands[0]
      else:
        return scope, op, index


def ends_cycle(op: Operation) -> bool:
  """Whether this is the conditional that ends a cycle: `update_if` has a loop for one."""
  # Its own name is all that XLA for GPU leaves: a collective that it combines has none.
  return op.opcode in ("while", "conditional") and bool(
    _ENDS_CYCLE.search(op.attributes)
  )


def parts(shape: str) -> list[str]:
  """The elements of a tuple's shape, each an array or a tuple of arrays; else nothing."""
  shape = _LAYOUT.sub("", shape)
  return (
    re.findall(rf"\([^()]*\)|{_ARRAY}", shape[1:-1])
    if shape.startswith("(")
    else []
  )


def arrays(shape: str) -> list[str]:
  """The arrays of a shape, without their layouts: ``["f32[8,128]", "s32[]"]``."""
  return re.findall(_ARRAY, _LAYOUT.sub("", shape))


def array_bytes(array: str) -> int:
  """Bytes of ``bf16[8,128]``; less than a byte an element is packed, and a token has none."""
  dtype, dims = array.rstrip("]").split("[")
  bits = re.search(r"\d+", dtype)
  elements = math.prod(map(int, re.findall(r"\d+", dims)))
  return -(
    -elements * (8 if dtype == "pred" else int(bits[0]) if bits else 0) // 8
  )


_MOST_TRIPS = 2**16  # that are followed
_OPERATORS: dict[str, Any] = {"add": operator.add, "subtract": operator.sub}
_OPERATORS |= {
  name.upper(): getattr(operator, name)
  for name in ("lt", "le", "gt", "ge", "ne")
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
_ENDS_CYCLE = re.compile(
  rf'\b{_scopes.END_OF_CYCLE}\)*/(while|cond)"'
)  # ends an op_name
_ONCE_A_CYCLE = re.compile(rf"{_ENDS_CYCLE.pattern}|/{_scopes.WHOLE_CYCLE}/")
_TRIP_COUNT = re.compile(r"\bknown_trip_count\W+n\W+(\d+)")


def _operation(written: re.Match[str]) -> Operation:
  name, shape, opcode, inner, attributes = written.groups()[1:]
  operands = re.findall(r"%([\w.\-]+)", inner) or re.findall(r"[\w.\-]+", inner)
  return Operation(
    name,
    shape,
    opcode,
    tuple(operands),
    attributes,
    _called(opcode, attributes),
  )


def _called(opcode: str, attributes: str) -> tuple[tuple[str, str], ...]:
  if opcode.endswith(("-done", "-update")) or not _CALLED.search(attributes):
    return ()
  # What a reduction applies (and an all-reduce is one) is arithmetic on scalars.
  applies = opcode in ("call", "call-start")
  return tuple(
    (role, name)
    for role, names in _CALLED.findall(_QUOTED.sub("", attributes))
    if role != "to_apply" or applies
    for name in re.findall(r"[\w.\-]+", names)
  )
