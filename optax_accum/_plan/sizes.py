"""Sizes of memory: of a limit, of a device, of arrays, and how they are printed."""

import re

import jax

from optax_accum._arithmetic.trees import Tree
from optax_accum._train_step.program import Step

# The part of a device's memory that is left free, because free memory is fragmented.
MARGIN = 0.05

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")


def parse(memory_limit: int | str) -> int:
  """Bytes, from a number or from a string such as "16GiB"."""
  match = _SIZE.fullmatch(str(memory_limit))
  size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
  if size < 1:
    raise ValueError(
      f"memory_limit={memory_limit!r} is not a size: give bytes, 1 or more, as an int or as a"
      f' string such as "16GiB" or "80 GB", with one of {", ".join(_UNITS).lstrip(", ")}.'
    )
  return size


def of_device(args: Tree, step: object) -> int:
  """The memory for arrays on the device that a step runs on, less a margin."""
  shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
  of_args = [d for s in shardings for d in getattr(s, "device_set", ())]
  of_mesh = step.devices if isinstance(step, Step) else []
  device = min(of_mesh or of_args or jax.devices(), key=lambda d: d.id)
  try:
    return int(device.memory_stats()["bytes_limit"] * (1 - MARGIN))
  except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, KeyError):
    raise ValueError(
      f"memory_limit=None uses the memory that the device reports, and {device} reports none: give"
      ' memory_limit, such as "16GiB".'
    ) from None


def shown(size: float) -> str:
  """``1.5 GiB``, ``12 KiB``."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if abs(size) < 1024:
      return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
    size /= 1024
  return f"{size:.1f} TiB"
