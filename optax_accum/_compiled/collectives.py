"""How many collectives a compiled program runs per call."""

from collections.abc import Iterable
import dataclasses
import math
import re
from typing import NamedTuple

import jax
import numpy as np

from optax_accum._compiled import hlo

_KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"]
_KINDS += ["collective-permute", "collective-broadcast"]
_GROUPS = re.compile(
  r"replica_groups=(?:\[([\d,]+)\]<=|mesh\[(?P<mesh>.*?)\](?:, device_ids=\()?)"
  r"(?:\[([\d,]+)\](?:T\(([\d,]+)\))?)?\)?(?(mesh) \{(?P<axes>.*?)\})"
)


class Collective(NamedTuple):
  """One collective operation, as reached from one place: `CollectiveReport` has the words."""

  kind: str
  groups: tuple[tuple[int, ...], ...]  # the devices that exchange, each by its place in the mesh
  shape: str  # the arrays that `bytes` counts: "f32[8,128]", "(f32[], f32[128])" where combined
  bytes: int
  executions: int
  loop: str | None
  op_name: str
  unknown_trip_counts: tuple[str, ...]  # outermost first

  @property
  def sent(self) -> int:
    """The bytes that a device sends in one execution around a ring of those that exchange."""
    part = 1 - 1 / max(map(len, self.groups), default=math.inf)
    return round(self.bytes * part * (2 if self.kind == "all-reduce" else 1))


class CollectiveTotal(NamedTuple):
  """What the collectives of one kind add up to, per call of the program and per device."""

  operations: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class CollectiveReport:
  """What `count_collectives` found; it prints as a table.

  Attributes:
    operations: Every collective, once for each place that reaches it, with ``kind``; ``groups``,
      the devices that exchange, by place in ``mesh.devices.flat`` (``()``: all, or unknown); of one
      execution on one device ``shape``, ``bytes`` and, around a ring, bytes ``sent``;
      ``executions`` in a call; ``loop``, the innermost or None; ``op_name``, its origin in JAX; and
      ``unknown_trip_counts``, the loops that count once.
  """

  operations: tuple[Collective, ...]

  @property
  def inside(self) -> dict[str, CollectiveTotal]:
    """Totals by kind of the collectives inside loops, times the trip counts."""
    return _totals(c for c in self.operations if c.loop is not None)

  @property
  def outside(self) -> dict[str, CollectiveTotal]:
    """Totals by kind of the collectives outside every loop."""
    return _totals(c for c in self.operations if c.loop is None)

  @property
  def unknown_trip_counts(self) -> tuple[str, ...]:
    """The loops without a fixed trip count, whose collectives count once."""
    return tuple(dict.fromkeys(n for c in self.operations for n in c.unknown_trip_counts))

  def at_least(self, nbytes: int) -> "CollectiveReport":
    """Only the collectives of `nbytes` or more, e.g. gradients without the metrics."""
    return CollectiveReport(tuple(c for c in self.operations if c.bytes >= nbytes))

  def __str__(self) -> str:
    inside, outside = self.inside, self.outside
    lines = [f"{'per device and call':<22}{'inside loops':>26}{'outside':>26}"]
    lines.append(" " * 22 + f"{'ops':>8}{'bytes':>18}" * 2)
    for kind in (k for k in _KINDS if k in inside or k in outside):
      totals = (inside.get(kind, (0, 0)), outside.get(kind, (0, 0)))
      lines.append(f"{kind:<22}" + "".join(f"{ops:>8,}{size:>18,}" for ops, size in totals))
    if not self.operations:
      lines = ["no collectives"]
    names = self.unknown_trip_counts  # accumulate's conditional is compiled to a loop
    lines += [f"counted once, a loop of unknown count or accumulate's step: {x}" for x in names]
    return "\n".join(lines)


def count_collectives(compiled: jax.stages.Compiled | str) -> CollectiveReport:
  """Counts the collectives that a compiled program runs per call, by kind, in loops and outside.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_accum
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    >>> @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    ... def step(x):
    ...   return jax.lax.fori_loop(0, 4, lambda i, x: jax.lax.psum(x + 1.0, "data"), x)
    >>> optax_accum.count_collectives(jax.jit(step).lower(jnp.ones(256)).compile()).inside
    {'all-reduce': CollectiveTotal(operations=4, bytes=4096)}

  Args:
    compiled: What ``jax.jit(f).lower(...).compile()`` returns, for any backend, or its text.

  Returns:
    A `CollectiveReport`. ``inside`` and ``outside`` map each kind to ``(operations, bytes)``. An
    operation counts as often as it runs. Bytes are those of one device's arrays, without padding:
    what a collective returns, or a reduce-scatter takes. XLA combines, splits, moves and replaces
    collectives; ``op_name`` says where one came from.

  Raises:
    TypeError: `compiled` is a function, or lowered but not compiled.
    ValueError: `compiled` has no text, or a text that is not an HLO module.

  Edge cases:
    =====================================  =====================================================
    several arrays; a start and its done   one operation, the bytes of all
    a loop without a fixed trip count      counts once, in ``unknown_trip_counts``; and so does
                                           `accumulate`'s conditional, or over 65,536 on a TPU
    the condition of a loop                inside the loop; once more than the body
    branches of `lax.cond`, `lax.switch`   each counts, as if all ran: an upper bound
    sends, receives and custom calls       not counted
    =====================================  =====================================================
  """
  runs = hlo.Module(_text_of(compiled)).runs(lambda op: op.opcode.removesuffix("-start") in _KINDS)
  return CollectiveReport(tuple(_collective(run) for run in runs if not _continues(run)))


def _continues(run: hlo.Run) -> bool:
  """Whether this is a further part of an asynchronous collective that has been counted."""
  # XLA for TPU spreads one over several fusions, with a copy of the operation in each.
  return "async_collective_fusion_config" in run.operation.attributes and not any(
    '"AsyncCollectiveStart"' in op.attributes for op in run.computation.operations.values()
  )


def _collective(run: hlo.Run) -> Collective:
  kind, arrays = run.operation.opcode.removesuffix("-start"), _counted_arrays(run)
  # That is how XLA for TPU writes a reduce-scatter: a fusion of an all-reduce and a slice.
  if run.computation.name.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"
  shape = arrays[0] if len(arrays) == 1 else f"({', '.join(arrays)})"
  reached = run.executions, run.loop, run.op_name, run.unknown_trip_counts
  size = sum(map(hlo.array_bytes, arrays))
  return Collective(kind, _groups(run.operation.attributes), shape, size, *reached)


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
  """The replica groups: XLA lists them, or writes a transposed range, or the axes of a mesh."""
  if listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
    return tuple(tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed[1]))
  written = _GROUPS.search(attributes)
  if not written or (written["mesh"] and ":" in written["axes"]):  # a part of an axis
    return ()
  shape, dims, order = ([int(n) for n in (written[i] or "").split(",") if n] for i in (1, 3, 4))
  sizes = dict(re.findall(r"'(.*?)'=(\d+)", written["mesh"] or ""))
  shape = shape or [*map(int, sizes.values())]
  numbers = np.arange(math.prod(shape)).reshape(dims or -1)
  numbers = numbers.transpose(order or None).reshape(shape)
  if axes := [i for i, name in enumerate(sizes) if f"'{name}'" in written["axes"]]:
    numbers = np.moveaxis(numbers, axes, range(-len(axes), 0))
    numbers = numbers.reshape(-1, math.prod(numbers.shape[-len(axes) :]))
  return tuple(map(tuple, numbers.tolist()))


def _counted_arrays(run: hlo.Run) -> list[str]:
  """The arrays whose bytes count, such as ``["f32[8,128]"]``."""
  op, parts = run.operation, hlo.parts(run.operation.shape)
  if op.opcode.startswith("reduce-scatter"):
    return [a for name in op.operands for a in hlo.arrays(run.computation.operations[name].shape)]
  # A start returns its operands, its results and more; but that of an all-reduce only its results.
  starts = op.opcode.endswith("-start") and len(parts) > 1
  results = starts and (op.opcode != "all-reduce-start" or parts[0].startswith("("))
  return hlo.arrays(parts[1] if results else op.shape)


def _text_of(compiled: jax.stages.Compiled | str) -> str:
  """The text of an optimized HLO module, or an error that says how to get one."""
  fix = "pass jax.jit(f).lower(*args).compile(), or what as_text() of that returns."
  if isinstance(compiled, str):
    text = compiled
  elif not hasattr(compiled, "as_text") or hasattr(compiled, "compile"):  # or lowered only
    raise TypeError(f"compiled={compiled!r:.80} must be a compiled program: {fix}")
  else:
    text = compiled.as_text() or ""
  if not re.search(r"^ENTRY\b", text, re.MULTILINE):
    raise ValueError(
      f"compiled={compiled!r:.80} has no ENTRY computation, so it is no optimized HLO module: {fix}"
    )
  return text


def _totals(collectives: Iterable[Collective]) -> dict[str, CollectiveTotal]:
  totals: dict[str, CollectiveTotal] = {}
  for c in collectives:
    ops, size = totals.get(c.kind, (0, 0))
    totals[c.kind] = CollectiveTotal(ops + c.executions, size + c.executions * c.bytes)
  return totals
