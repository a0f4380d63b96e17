"""How many collectives a compiled program runs per call."""

from collections.abc import Iterable
import dataclasses
import re
from typing import NamedTuple

import jax

from optax_accum._compiled import hlo, scopes

_KINDS = [
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
]


class Collective(NamedTuple):
  """One collective operation, as reached from one place: `CollectiveReport` has the words."""

  kind: str
  shape: str  # the arrays that `bytes` counts: "f32[8,128]", "(f32[], f32[128])" where combined
  bytes: int
  executions: int
  loop: str | None
  op_name: str
  unknown_trip_counts: tuple[str, ...]  # outermost first
  at_cycle_end: bool
  attributes: str  # as XLA writes them: replica_groups and more


class CollectiveTotal(NamedTuple):
  """What the collectives of one kind add up to, per call of the program and per device."""

  operations: int = 0
  bytes: int = 0


@dataclasses.dataclass(frozen=True)
class CollectiveReport:
  """What `count_collectives` found; it prints as a table.

  Attributes:
    operations: Every collective, once for each place that reaches it, with ``kind``; of one
      execution on one device ``shape`` and ``bytes``; ``executions`` in a call; ``loop``, the
      innermost or None; ``op_name``, its origin in JAX; ``unknown_trip_counts``, the loops that
      count once; ``at_cycle_end``, whether the conditional that ends a cycle, or a loop of the
      optimizer's step, runs it; and ``attributes``, XLA's own text of the devices that exchange.
    streaming: Whether a call takes one microbatch of `accumulate`.
  """

  operations: tuple[Collective, ...]
  streaming: bool = False

  @property
  def inside(self) -> dict[str, CollectiveTotal]:
    """Totals by kind of the collectives inside other loops, times the trip counts."""
    return _totals(c for c in self.operations if c.loop and not c.at_cycle_end)

  @property
  def at_cycle_end(self) -> dict[str, CollectiveTotal]:
    """Totals by kind of the collectives that run once a cycle, where it ends."""
    return _totals(c for c in self.operations if c.at_cycle_end)

  @property
  def outside(self) -> dict[str, CollectiveTotal]:
    """Totals by kind of the collectives that every call runs, outside every loop."""
    return _totals(
      c for c in self.operations if not c.loop and not c.at_cycle_end
    )

  @property
  def unknown_trip_counts(self) -> tuple[str, ...]:
    """The loops whose trips XLA does not print, whose collectives count once."""
    return tuple(
      dict.fromkeys(n for c in self.operations for n in c.unknown_trip_counts)
    )

  def at_least(self, nbytes: int) -> "CollectiveReport":
    """Only the collectives of `nbytes` or more, e.g. gradients without the metrics."""
    large = tuple(c for c in self.operations if c.bytes >= nbytes)
    return dataclasses.replace(self, operations=large)

  def assert_once_per_cycle(self, nbytes: int = 1024) -> None:
    """For a test: checks that nothing of a gradient's size is sent in every microbatch.

    Inside a loop is in every microbatch; and so is outside, where a call takes one microbatch of
    `accumulate` (one of `optax.MultiSteps` looks like a whole step, and passes). What a model sends
    itself counts too, such as parameters that it gathers by layer. Compile one step for
    several devices: one device sends nothing, and passes.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> step = optax_accum.make_train_step(
      ...   lambda params, x: jnp.mean((x @ params) ** 2),
      ...   optax.sgd(0.1),
      ...   num_microbatches=4,
      ...   mesh=jax.sharding.Mesh(jax.devices(), ("data",)),
      ... )
      >>> compiled = step.lower(jnp.ones((16, 16)), optax.sgd(0.1).init(0), jnp.ones((64, 16)))
      >>> optax_accum.count_collectives(compiled.compile()).assert_once_per_cycle()

    Args:
      nbytes: From which size on it is a gradient's. The default is 256 numbers in float32: a loss,
        a norm and counts are a few numbers, and a layer has more. Lower it for a small model.

    Raises:
      AssertionError: Such a collective runs in every microbatch. The message lists them.
    """
    found = [
      f"\n  {c.executions:,} a call: {c.kind} {c.shape}, {c.bytes:,} bytes, from {c.op_name}"
      for c in self.at_least(nbytes).operations
      if not c.at_cycle_end and (c.loop or self.streaming)
    ]
    if found:
      raise AssertionError(
        f"In every microbatch devices wait for one another, and send {nbytes:,} bytes or more:"
        f"{''.join(found)}\n"
        "Reduce gradients once a cycle: pass mesh= to make_train_step. Or, in a shard_map, pass"
        " axis_name= to microbatch_value_and_grad; or take gradients with respect to"
        ' jax.lax.pcast(params, axis, to="varying"), without lax.psum or lax.pmean in a microbatch,'
        " and pass axis_name= to accumulate."
        " If these are metrics, raise nbytes."
      )

  def __str__(self) -> str:
    places = {
      "inside loops": self.inside,
      "at a cycle's end": self.at_cycle_end,
      "outside": self.outside,
    }
    heads = "".join(f"{head:>22}" for head in places)
    lines = [
      f"{'per device and call':<22}{heads}",
      f"{'':<22}" + f"{'ops':>7}{'bytes':>15}" * 3,
    ]
    found = {c.kind for c in self.operations}
    for kind in filter(found.__contains__, _KINDS):
      totals = [place.get(kind, CollectiveTotal()) for place in places.values()]
      numbers = "".join(f"{t.operations:>7,}{t.bytes:>15,}" for t in totals)
      lines.append(f"{kind:<22}{numbers}")
    if not found:
      lines = ["no collectives"]
    for loop in self.unknown_trip_counts:
      lines.append(
        f"counted once, a loop whose trips XLA does not print: {loop}"
      )
    if self.streaming:
      lines.append(
        "a call is one microbatch of accumulate, so what is outside runs in every one"
      )
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
    A `CollectiveReport`. ``inside``, ``at_cycle_end`` and ``outside`` map kinds to
    ``(operations, bytes)``. An operation counts as often as it runs. Bytes are those of one
    device's arrays, without padding: what a collective returns, or a reduce-scatter takes. XLA
    combines, splits, moves and replaces collectives; ``op_name`` says where one came from.

  Raises:
    ValueError: `compiled` is lowered but not compiled, or has no text of an HLO module.

  Edge cases:
    =====================================  =====================================================
    several arrays; a start and its done   one operation, the bytes of all
    a loop whose trips XLA does not print  counts once, in ``unknown_trip_counts``: one without a
                                           fixed number, and every loop of a TPU
    the condition of a loop                inside the loop; once more than the body
    `accumulate`                           ``at_cycle_end``, as if the call ended a cycle; in a
                                           loop, as if each trip did: an upper bound
    a step of the optimizer                ``at_cycle_end`` where it may be skipped, and in its
                                           loops; else outside
    branches of `lax.cond`, `lax.switch`   each counts, as if all ran: an upper bound
    sends, receives and custom calls       not counted
    =====================================  =====================================================
  """
  text = compiled
  if not isinstance(text, str):
    text = text.as_text() or ""
  if not re.search(r"^ENTRY\b", text, re.MULTILINE):
    raise ValueError(
      f"compiled={compiled!r:.80} is no optimized HLO module: pass"
      " jax.jit(f).lower(*args).compile(), or what as_text() of that returns."
    )
  module = hlo.Module(text)
  runs = module.runs(_is_collective)
  found = tuple(_collective(run) for run in runs if not _continues(run))
  # A whole cycle's step may end one of `accumulate` too, but its microbatches are in a loop.
  streaming = any(
    end.place.loop is None and scopes.WHOLE_CYCLE not in end.place.op_name
    for end in module.runs(hlo.ends_cycle)
  )
  return CollectiveReport(found, streaming)


def _is_collective(op: hlo.Operation) -> bool:
  return op.opcode.removesuffix("-start") in _KINDS


def _continues(run: hlo.Run) -> bool:
  """Whether this is a further part of an asynchronous collective that has been counted."""
  # XLA for TPU spreads one over several fusions, with a copy of the operation in each.
  if "async_collective_fusion_config" not in run.operation.attributes:
    return False
  parts = run.computation.operations.values()
  return not any('"AsyncCollectiveStart"' in op.attributes for op in parts)


def _collective(run: hlo.Run) -> Collective:
  kind = run.operation.opcode.removesuffix("-start")
  # That is how XLA for TPU writes a reduce-scatter: a fusion of an all-reduce and a slice.
  if run.computation.name.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"
  arrays = _counted_arrays(run)
  shape = ", ".join(arrays)
  if len(arrays) != 1:
    shape = f"({shape})"
  return Collective(
    kind=kind,
    shape=shape,
    bytes=sum(map(hlo.array_bytes, arrays)),
    attributes=run.operation.attributes,
    **run.place._asdict(),
  )


def _counted_arrays(run: hlo.Run) -> list[str]:
  """The arrays whose bytes count, such as ``["f32[8,128]"]``."""
  op = run.operation
  shape = run.operation.shape
  if op.opcode.startswith("reduce-scatter"):
    operations = run.computation.operations
    shape = " ".join(operations[name].shape for name in op.operands)
  # A start returns its operands, its results and more; but one of an all-reduce may only results.
  elif op.opcode.endswith("-start") and (
    op.opcode != "all-reduce-start" or shape.startswith("((")
  ):
    shape = hlo.parts(shape)[1]
  return hlo.arrays(shape)


def _totals(collectives: Iterable[Collective]) -> dict[str, CollectiveTotal]:
  totals: dict[str, CollectiveTotal] = {}
  for c in collectives:
    ops, size = totals.get(c.kind, CollectiveTotal())
    totals[c.kind] = CollectiveTotal(
      ops + c.executions, size + c.executions * c.bytes
    )
  return totals
