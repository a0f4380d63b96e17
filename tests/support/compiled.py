"""What a compiled program does: its memory, its copies, its work, and how often one is made."""

import contextlib
import logging
import math
import re

import jax

# The one private module that is used outside the package: to count the operations inside loops
# as often as they run takes the parser of HLO that count_collectives has, which is not public.
from optax_accum import _hlo


def temp_bytes(jitted, *args, **kwargs):
  """Bytes of temporary buffers of a jitted function, as the compiler counts them."""
  return jitted.lower(*args, **kwargs).compile().memory_analysis().temp_size_in_bytes


def copies_of(program, elements):
  """How many ``copy`` operations on at least `elements` elements the text of a program has.

  Transfers to or from a TPU's on-chip memory (space ``S(1)``) are not among them: there a
  result is computed on the chip and the transfer is what writes it to memory.
  """
  copies = re.findall(r"= (\(?\w+\[([\d,]*)\].*) copy(?:-start)?\(", program)
  return sum(
    math.prod(int(n) for n in dims.split(",") if n) >= elements
    for types, dims in copies
    if "S(1)" not in types
  )


def dot_flops(program):
  """Floating-point operations of the matrix products of a program's text, on one device.

  Two for each multiplication and addition, times the trip counts of the loops around them.
  """
  total = 0
  for run in _hlo.Module(program).runs(lambda op: op.opcode == "dot"):
    lhs = run.computation.operations[run.operation.operands[0]]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", run.operation.attributes)
    dims = [int(d) for d in contracted[1].split(",")] if contracted else []
    sizes = [_dims(lhs.shape)[d] for d in dims]
    total += 2 * math.prod(_dims(run.operation.shape)) * math.prod(sizes) * run.executions
  return total


def _dims(shape):
  return [int(n) for n in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if n]


@contextlib.contextmanager
def compilations():
  """A list that gets a line for every program that JAX compiles meanwhile."""
  messages = []
  handler = logging.Handler()
  handler.emit = lambda record: messages.append(record.getMessage())
  handler.addFilter(lambda record: record.getMessage().startswith("Compiling "))
  logger = logging.getLogger("jax")
  logger.addHandler(handler)
  try:
    with jax.log_compiles():
      yield messages
  finally:
    logger.removeHandler(handler)
