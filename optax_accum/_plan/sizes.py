"""Sizes of memory: as a user writes them, and as they are printed."""

import re

_UNITS = {
  "B": 1,
  "KB": 1e3,
  "MB": 1e6,
  "GB": 1e9,
  "TB": 1e12,
  "KiB": 2**10,
  "MiB": 2**20,
  "GiB": 2**30,
  "TiB": 2**40,
}
_SIZE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})?\s*")


def parse(memory_limit: int | str) -> int:
  """Bytes, from a number or from a string such as "16GiB"."""
  match = _SIZE.fullmatch(str(memory_limit))
  if match:
    size = int(float(match[1]) * _UNITS.get(match[2], 1))
    if size:
      return size
  raise ValueError(
    f"memory_limit={memory_limit!r} is not a size: give bytes, 1 or more, as an int or as a"
    f' string such as "16GiB" or "80 GB", with one of {", ".join(_UNITS)}.'
  )


def shown(size: int) -> str:
  """``1.5 GiB``, ``12.0 KiB``."""
  for unit in ("TiB", "GiB", "MiB", "KiB"):
    if size >= _UNITS[unit]:
      return f"{size / _UNITS[unit]:.1f} {unit}"
  return f"{size} B"
