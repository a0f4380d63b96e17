"""What the benchmarks recorded, as this site's tables and plots need it."""

import functools
import json
import pathlib

from IPython.display import Markdown

_FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


@functools.cache
def of(name):
  """A results file, as its benchmark wrote it."""
  return json.loads((_FOLDER / f"{name}.json").read_text())


def rows(name, table=0):
  """The rows of one of its tables, each a dict by column."""
  found = of(name)["tables"][table]
  return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def show(name, *tables):
  """Tables of a results file, all by default, and what wrote them: on which machine, when."""
  found = of(name)
  numbers = tables or range(len(found["tables"]))
  parts = [_table(found["tables"][i]) for i in numbers]
  columns = {column for i in numbers for column in found["tables"][i]["columns"]}
  if any(" / " in column for column in columns - {"temp / plain"}):
    parts.append(
      "Times are medians; a ratio is the median of those within a round. Trust the ratio."
    )
  versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
  machine = found["machine"]
  where = f"{machine['cpu']}, {machine['cores']} cores"
  if machine["device"] != "cpu":
    where += f"; for {machine['device']}"
  parts.append(f"*`{found['command']}`, {found['date'][:10]}: {where}; {versions}.*")
  return Markdown("\n\n".join(parts))


def _table(table):
  lines = [table["columns"], ["---", *["---:"] * (len(table["columns"]) - 1)]]
  lines += [["" if x is None else _cell(x) for x in row] for row in table["rows"]]
  return f"{table['title']}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(x):
  return f"{x:g}" if isinstance(x, float) else str(x)
