"""Sizes of memory: what a user gives, what a device has, and how they are printed."""

import math
import operator
import re
from typing import Any

import jax

from optax_accum._train_step.step import Step

# The part of what a device may allocate that is left free, because free memory is in pieces.
MARGIN = 0.05

_UNITS = {"B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(rf"\s*(\d{{1,15}}(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")


def parse(name: str, value: Any) -> int:
  """Bytes, from an int or from a string such as "16GiB"."""
  wanted = 'bytes as an int, or a string such as "16GiB" or "80 GB"'
  if isinstance(value, str):
    match = _SIZE.fullmatch(value)
    if not match:
      units = ", ".join(_UNITS)
      raise ValueError(f"{name}={value!r} is no size: give {wanted}, with one of {units}.")
    number = int(float(match[1]) * _UNITS[match[2]])
  else:
    try:
      if isinstance(value, bool):
        raise TypeError
      number = operator.index(value)
    except TypeError:
      raise TypeError(f"{name}={value!r} is no size: give {wanted}.") from None
  if number < 1:
    raise ValueError(f"{name}={value!r} must be at least 1 byte: give {wanted}.")
  return number


def of_device(args: Any, step: Any) -> int:
  """What arrays may take on the device that a step runs on, less a margin."""
  shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
  of_args = [d for s in shardings for d in getattr(s, "device_set", ())]
  of_mesh = step.devices if isinstance(step, Step) else []
  device = min(of_mesh or of_args or jax.devices(), key=lambda d: d.id)
  try:
    stats = device.memory_stats() or {}
  except (jax.errors.JaxRuntimeError, NotImplementedError):  # a device to compile for
    stats = {}
  if "bytes_limit" not in stats:
    raise ValueError(
      f"memory_limit=None asks the device how much memory it has, and {device} does not say: give"
      ' memory_limit, such as "16GiB".'
    )
  return int(stats["bytes_limit"] * (1 - MARGIN))


def shard_bytes(x: Any) -> int:
  """What an array, or a shape, takes on one device."""
  if not hasattr(x, "dtype"):
    return 0
  shape = tuple(x.shape)
  if (sharding := getattr(x, "sharding", None)) is not None:
    shape = sharding.shard_shape(shape)
  return math.prod(shape) * x.dtype.itemsize


def of_rows(args: Any, rows: int) -> float:
  """What one row of a batch of `rows` takes in the arrays that have so many."""
  batch = [x for x in jax.tree.leaves(args) if rows in getattr(x, "shape", ())]
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in batch) / rows


def shown(size: float) -> str:
  """``1.5 GiB``, ``12 KiB``."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if abs(size) < 1024:
      return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
    size /= 1024
  return f"{size:.1f} TiB"
