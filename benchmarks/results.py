"""Tables that a benchmark prints row by row, and the file that it leaves with --save.

`benchmarks/results/NAME.json` holds the command that wrote it, the date, the machine, the versions,
and the tables: each a title, columns with their units, and rows of plain values. A null is what was
not measured. Absolute times are the machine's own: compare within a table, which is of one run.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import sys

import jax

import optax_accum

FOLDER = pathlib.Path(__file__).with_name("results")


class Table:
  """What was measured. It prints its head when made, and each row when it is added."""

  def __init__(self, title, columns, text=(24,)):
    """`text` has the widths of the first columns, as printed. The other columns are numbers."""
    self.title, self.columns, self.rows = title, columns, []
    self._text, self._numbers = (
      text,
      [max(8, len(name)) + 2 for name in columns[len(text) :]],
    )
    print(f"\n{title}")
    self._print(columns)

  def add(self, *row):
    """Adds a row, numbers to 3 digits and at most 3 decimals."""
    row = [
      round(float(f"{x:.3g}"), 3) if isinstance(x, float) else x for x in row
    ]
    self.rows.append(row)
    self._print(row)

  def _print(self, row):
    cells = [_shown(cell) for cell in row]
    left = [
      cell.ljust(width) for cell, width in zip(cells, self._text, strict=False)
    ]
    right = [
      x.rjust(n) for x, n in zip(cells[len(left) :], self._numbers, strict=True)
    ]
    print("".join(left + right), flush=True)


def _shown(cell):
  if isinstance(cell, float):
    return f"{cell:.2f}" if cell < 100 else f"{cell:.0f}"
  return "" if cell is None else str(cell)


def add_option(parser):
  """Adds --save [NAME] to the options of a benchmark."""
  text = "write benchmarks/results/NAME.json"
  parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=text)


def save(name, default, tables, device=None):
  """Writes the tables if --save was given: `name` is what came with it, "" for `default`.

  `device` is what was compiled for, where that is not this machine's own.
  """
  if name is None:
    return
  packages = [
    "jax",
    "jaxlib",
    "optax",
    "flax",
    *["libtpu"] * ("TPU" in (device or "")),
  ]
  found = {
    "command": _command(),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "machine": {
      "cpu": _cpu(),
      "cores": os.cpu_count(),
      "device": device or jax.devices()[0].device_kind,
    },
    "versions": {
      "python": platform.python_version(),
      **{package: importlib.metadata.version(package) for package in packages},
      "optax_accum": optax_accum.__version__,
    },
    "tables": [
      {"title": t.title, "columns": t.columns, "rows": t.rows} for t in tables
    ],
  }
  FOLDER.mkdir(exist_ok=True)
  path = FOLDER / f"{name or default}.json"
  # Indented, but a list of plain values is on one line.
  text = re.sub(r"\[\s[^][{}]+\]", _on_one_line, json.dumps(found, indent=2))
  path.write_text(text + "\n")
  print(f"\nwrote benchmarks/results/{path.name}")


def _on_one_line(found):
  return (
    re.sub(r"\s*\n\s*", " ", found[0]).replace("[ ", "[").replace(" ]", "]")
  )


def _command():
  """The command line as one would type it. Where someone's files are is left out."""
  options = ["FILE" if "/" in option else option for option in sys.argv[1:]]
  return shlex.join(
    ["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *options]
  )


def _cpu():
  """The processor's name."""
  info = pathlib.Path("/proc/cpuinfo")
  names = (
    re.findall(r"model name\s*: (.+)", info.read_text())
    if info.exists()
    else []
  )
  return names[0] if names else platform.processor() or platform.machine()
