"""The text of an optimized HLO module: its operations, and how often each runs."""

from collections.abc import Callable, Iterator
import math
import re
from typing import NamedTuple


class Operation(NamedTuple):
  """``name = shape opcode(operands), attributes``."""

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]  # names; of a constant its value, of a parameter its number
  attributes: str
  called: tuple[tuple[str, str], ...]  # roles and names of the computations that it runs


class Computation:
  """A block of operations; the program's, a loop's body, a fusion's, ..."""

  def __init__(self, name: str):
    self.name, self.root = name, ""
    self.operations: dict[str, Operation] = {}


class Run(NamedTuple):
  """An operation as the program reaches it in one place."""

  operation: Operation
  computation: Computation
  executions: int = 1  # per call of the program: the product of the loops' trip counts
  loop: str | None = None  # the innermost loop around it
  op_name: str = ""  # of its metadata, or of what calls it; "" where neither has one
  unknown_trip_counts: tuple[str, ...] = ()  # loops around it that count once, outermost first


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
      elif (assigned := _ASSIGNMENT.match(line)) and (op := _operation(line, assigned)):
        computation.operations[op.name] = op
        if assigned[1]:
          computation.root = op.name
    operations = (op for each in self.computations.values() for op in each.operations.values())
    called = {name for op in operations for _, name in op.called}
    if lacking := sorted(called - self.computations.keys()):
      raise ValueError(f"The HLO text lacks computations, such as {lacking[0]}: pass all of it.")

  def runs(self, wanted: Callable[[Operation], bool]) -> Iterator[Run]:
    """The operations that are `wanted`, from wherever they are reached.

    All branches of a conditional count, and the body of a loop whose trip count the program
    does not fix counts once. The condition of a loop runs once more than its body.
    """
    # Most computations are elementwise fusions, and there may be thousands.
    holding: dict[str, bool] = {}

    def holds(name: str) -> bool:
      if name not in holding:
        operations = self.computations[name].operations.values()
        holding[name] = any(wanted(o) or any(holds(c) for _, c in o.called) for o in operations)
      return holding[name]

    def walk(scope: _Scope, around: Run | None) -> Iterator[Run]:
      for op in scope.computation.operations.values():
        run = (around or Run(op, self.entry))._replace(operation=op, computation=scope.computation)
        if named := _OP_NAME.search(op.attributes):
          run = run._replace(op_name=named[1])
        if wanted(op):
          yield run
        called = [(role, name) for role, name in op.called if holds(name)]
        times: dict[str, int] = {}
        if called and op.opcode == "while":
          run = run._replace(loop=op.name)
          if (trips := self._trip_count(op, scope)) is not None:
            times = {"body": trips, "condition": trips + 1}
          else:
            shown = f"{op.name} ({run.op_name})" if run.op_name else op.name
            run = run._replace(unknown_trip_counts=(*run.unknown_trip_counts, shown))
        for role, name in called:
          inner = run._replace(executions=run.executions * times.get(role, 1))
          yield from walk(self._callee(op, name, scope), inner)

    return walk(_Scope(self.entry), None)

  def _callee(self, op: Operation, name: str, scope: _Scope) -> _Scope:
    computation = self.computations[name]
    # A conditional passes one operand to each branch instead.
    passes_operands = op.opcode in ("fusion", "call")
    return _Scope(computation, op.operands, scope) if passes_operands else _Scope(computation)

  def _trip_count(self, loop: Operation, scope: _Scope) -> int | None:
    """How often the body of a loop runs; None where the program does not fix it."""
    if known := _TRIP_COUNT.search(loop.attributes):
      return int(known[1])
    # XLA for TPU prints no trip counts. What it makes of a scan is a counter in the carry that
    # starts at a constant, moves by a constant, and is compared with a constant.
    called = {role: _Scope(self.computations[name]) for role, name in loop.called}
    condition = called["condition"]
    condition, test, _ = self._source(condition, condition.computation.root, None)
    if test.opcode != "compare":
      return None
    counter, limit = (self._affine(condition, name) for name in test.operands)
    direction = re.findall(r"\bdirection=(\w+)", test.attributes)[0]
    if counter and counter[0] is None:
      counter, limit = limit, counter
      direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    if not counter or counter[0] is None or not limit or limit[0] is not None:
      return None
    start = self._affine(scope, loop.operands[0], counter[0])
    moved = self._affine(called["body"], called["body"].computation.root, counter[0])
    if not start or start[0] is not None or not moved or moved[0] != counter[0]:
      return None
    return _trips(limit[1] - start[1] - counter[1], moved[1], direction)

  def _affine(
    self, scope: _Scope, name: str, index: int | None = None
  ) -> tuple[int | None, int] | None:
    """An integer as ``(i, c)``, element i of the loop's carry plus c; a constant is (None, c)."""
    scope, op, index = self._source(scope, name, index)
    if op.opcode == "constant" and re.fullmatch(r"-?\d+", op.operands[0]):
      return None, int(op.operands[0])
    if op.opcode == "parameter" and index is not None:
      return index, 0
    if op.opcode in ("add", "subtract"):
      left, right = (self._affine(scope, operand) for operand in op.operands)
      if left and right and right[0] is None:
        return left[0], left[1] + (right[1] if op.opcode == "add" else -right[1])
      if left and right and left[0] is None and op.opcode == "add":
        return right[0], left[1] + right[1]
    return None

  def _source(
    self, scope: _Scope, name: str, index: int | None
  ) -> tuple[_Scope, Operation, int | None]:
    """The operation whose value (or whose element `index`) this is, behind copies and calls."""
    while True:
      op = scope.computation.operations[name]
      if op.opcode == "get-tuple-element" and index is None:
        name, index = op.operands[0], int(re.findall(r"\bindex=(\d+)", op.attributes)[0])
      elif op.opcode == "tuple" and index is not None:
        name, index = op.operands[index], None
      elif op.opcode in ("fusion", "call"):
        scope = self._callee(op, op.called[0][1], scope)
        name = scope.computation.root
      elif op.opcode == "parameter" and scope.caller is not None:
        name, scope = scope.arguments[int(op.operands[0])], scope.caller
      elif op.opcode in ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"):
        name = op.operands[0]
      else:
        return scope, op, index


def parts(shape: str) -> list[str]:
  """The elements of a tuple's shape, each an array or a tuple of arrays; else nothing."""
  shape = _LAYOUT.sub("", shape)
  return re.findall(rf"\([^()]*\)|{_ARRAY}", shape[1:-1]) if shape.startswith("(") else []


def arrays(shape: str) -> list[str]:
  """The arrays of a shape, without their layouts: ``["f32[8,128]", "s32[]"]``."""
  return re.findall(_ARRAY, _LAYOUT.sub("", shape))


def array_bytes(array: str) -> int:
  """Bytes of ``bf16[8,128]``; less than a byte an element is packed, and a token has none."""
  dtype, dims = array.rstrip("]").split("[")
  bits = re.search(r"\d+", dtype)
  elements = math.prod(map(int, re.findall(r"\d+", dims)))
  return -(-elements * (8 if dtype == "pred" else int(bits[0]) if bits else 0) // 8)


def _trips(distance: int, step: int, direction: str) -> int | None:
  """For how many of 0, step, 2 step, ... ``<direction> distance`` holds before it does not."""
  if step < 0:
    distance, step = -distance, -step
    direction = {"GT": "LT", "GE": "LE", "NE": "NE"}.get(direction, "")
  if direction == "NE" and step and distance >= 0 and distance % step == 0:
    return distance // step
  if direction in ("LT", "LE") and step:
    return max(0, -(-(distance + (direction == "LE")) // step))
  return None


_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_ASSIGNMENT = re.compile(r"\s+(ROOT\s+)?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_PARENTHESIS = re.compile(r"[()]")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/|\s")
_ARRAY = r"[a-z]\w*\[[^\]]*\]"
_CALLED = re.compile(
  r"\b(condition|body|calls|called_computations|branch_computations|true_computation"
  r"|false_computation|to_apply)=(\{[^}]*\}|%?[\w.\-]+)"
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r"\bknown_trip_count\W+n\W+(\d+)")


def _operation(line: str, assigned: re.Match[str]) -> Operation | None:
  start = assigned.end()
  end = _closing(line, start) if line.startswith("(", start) else line.find(" ", start)
  if not (opcode := _OPCODE.match(line, end)):
    return None
  close = _closing(line, opcode.end() - 1)
  inner, attributes = line[opcode.end() : close - 1], line[close:]
  if opcode[1] in ("constant", "parameter"):
    operands = [inner.strip()]
  else:
    operands = re.findall(r"%([\w.\-]+)", inner) or re.findall(r"[\w.\-]+", inner)
  called = _called(opcode[1], attributes)
  return Operation(assigned[2], line[start:end], opcode[1], tuple(operands), attributes, called)


def _closing(text: str, opening: int) -> int:
  """Behind the parenthesis that closes the one at `opening`."""
  depth = 0
  for parenthesis in _PARENTHESIS.finditer(text, opening):
    depth += 1 if parenthesis[0] == "(" else -1
    if depth == 0:
      return parenthesis.end()
  return len(text)


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
