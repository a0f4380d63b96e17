"""What a compiled program does: its memory, its copies, and how often one is made."""

import contextlib
import logging
import math
import re

import jax
import numpy as np


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


# The devices that exchange, as XLA writes them: a list; a range, transposed; or axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})\}")
_RANGE = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_RANGED = re.compile(rf"replica_groups=\[([\d,]+)\]<={_RANGE}")
_MESH = re.compile(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_RANGE}\))? \{{([^:]*?)\}}")


def groups_of(collective):
  """The devices that exchange, each by its place in the mesh; () if all do, or nobody knows."""
  text = collective.attributes
  listed = _LISTED.search(text)
  ranged = _RANGED.search(text)
  of_mesh = _MESH.search(text)
  if listed:
    return tuple(map(_numbers, re.findall(r"\d[\d,]*", listed[1])))
  if ranged:
    devices = _devices(*map(_numbers, ranged.groups()))
  elif of_mesh:
    axes = dict(re.findall(r"'(.*?)'=(\d+)", of_mesh[1]))
    shape = tuple(map(int, axes.values()))
    devices = _devices(shape, *map(_numbers, of_mesh.group(2, 3)))
    among = [i for i, name in enumerate(axes) if f"'{name}'" in of_mesh[4]]
    devices = np.moveaxis(devices, among, range(-len(among), 0))
    devices = devices.reshape(-1, math.prod(shape[i] for i in among))
  else:
    return ()
  return tuple(map(tuple, devices.tolist()))


def executions(place, *trips):
  """How often a collective or another place of a program runs in a call of it.

  For loops whose trips XLA does not print, as that for TPUs prints none, `trips` are those of
  nested loops, outermost first: 1 where there are more.
  """
  return place.executions * math.prod(trips[: len(place.unknown_trip_counts)])


def _devices(shape, sizes, order):
  """All devices in an array of a shape; or as they come in one of `sizes`, with axes in `order`."""
  devices = np.arange(math.prod(shape))
  if order:
    devices = devices.reshape(sizes).transpose(order)
  return devices.reshape(shape)


def _numbers(text):
  return tuple(map(int, re.findall(r"\d+", text or "")))
