"""What a compiled program does: its memory, its copies, and how often one is made."""

import contextlib
import logging
import math
import re

import jax


def temp_bytes(jitted, *args, **kwargs):
  """Bytes of temporary buffers of a jitted function, as the compiler counts them."""
  return (
    jitted.lower(*args, **kwargs).compile().memory_analysis().temp_size_in_bytes
  )


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
