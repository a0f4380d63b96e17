"""What the benchmarks recorded, as this site's tables and plots need it."""

import functools
import json
import pathlib

from IPython.display import Markdown
import numpy as np

_FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


@functools.cache
def of(name):
  """A results file, as its benchmark wrote it."""
  return json.loads((_FOLDER / f"{name}.json").read_text())


def rows(name, table=0):
  """The rows of one of its tables, each a dict by column."""
  found = of(name)["tables"][table]
  return [
    dict(zip(found["columns"], row, strict=True)) for row in found["rows"]
  ]


def ways_to_shard():
  """The table of four ways to shard, from the files of `benchmarks/sharding.py`."""
  names = {
    "**replicated**": "replicated",
    "**ZeRO-1**: the state in shards": "state sharded (ZeRO-1)",
    "**gathered once a cycle**: parameters and state in shards": "gathered once a step",
    "**layer by layer**, with replicas": "layer by layer",
  }
  tpu, two = (
    {row["way"]: row for row in rows(f"sharding_{x}")}
    for x in ("tpu", "processes")
  )
  # In columns of at most 6 letters the table is as wide as a window of 480 pixels.
  lines = ["way|held|temp|sent|across|time", "|".join(["---", *["---:"] * 5])]
  for title, way in names.items():
    cells = [
      f"{tpu[way][name]:.2f}"
      for name in ("held, P", "temp, P", "sent, P", "after, P")
    ]
    lines.append("|".join([title, *cells, f"{two[way]['s a step']:.2f} s"]))
  return Markdown("\n".join(f"|{line}|" for line in lines))


def programs():
  """The memory of what a cycle runs, from the files of `benchmarks/sharding.py --programs`."""
  held = {
    "step": ("parameters, moments", "sum, gradients"),
    "step, in_place": ("parameters, moments", "sum"),
    "add": ("parameters, sum", "gradients"),
    "finish": ("parameters, moments, sum", "sum over the devices"),
  }
  tpu, gpu = (rows(f"programs_{x}") for x in ("tpu", "gpu"))
  head = "program|arguments|P|temporary|P on a v5e|in all|P on an H100|in all"
  lines = [head, "---|---|---:|---|---:|---:|---:|---:"]
  for on_tpu, on_gpu in zip(tpu, gpu, strict=True):
    name = on_tpu["program"]
    arguments, temporary = held[name]
    if on_tpu["way"] != "replicated":
      name = f"{name}, shards"
    cells = [name, arguments, f"{on_tpu['arguments, P']:.2f}", temporary]
    for row in (on_tpu, on_gpu):
      cells += [f"{row['temp, P']:.2f}", f"{row['in all, P']:.2f}"]
    lines.append("|".join(cells))
  return Markdown("\n".join(f"|{line}|" for line in lines))


def five_batches():
  """The table of loss per token and per second, from the file of `benchmarks/batches.py`."""
  final, curves, timed = (rows("batches", i) for i in range(3))
  tokens = [row["tokens"] for row in curves]
  target = max(float(row["x 1"]) for row in final)
  times = {row["rows"]: row for row in timed}
  until = f"until {target:.2f}"
  head = (
    f"rows|beta2|learning rate|final loss|tokens {until}|ms a step|s {until}"
  )
  lines = [head, "|".join(["---:"] * 7)]
  for row in final:
    cells = [
      row["rows"],
      row["beta2"],
      row["learning rate"],
      row["x 1"],
      "",
      "",
      "",
    ]
    if time := times.pop(row["rows"], None):  # the last row repeats a batch
      losses = [look[f"{row['rows']} rows"] for look in curves]
      seen = np.interp(-target, -np.array(losses), tokens)  # which rise
      seconds = seen / tokens[-1] * time["s for all tokens"]
      cells[4:] = f"{seen:,.0f}", f"{time['ms']:g}", f"{seconds:.1f}"
    lines.append("|".join(map(str, cells)))
  return Markdown("\n".join(f"|{line}|" for line in lines))


def show(name, *tables, fold):
  """Tables of a results file, all by default, and what wrote them, folded under a title."""
  found = of(name)
  numbers = tables or range(len(found["tables"]))
  parts = [_table(found["tables"][i]) for i in numbers]
  columns = {
    column for i in numbers for column in found["tables"][i]["columns"]
  }
  if columns & {"time, ms", "ms a cycle"}:
    parts.append(
      "A time is the best of all rounds. A ratio is the median of those within a round."
    )
  versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
  machine = found["machine"]
  where = f"{machine['cpu']}, {machine['cores']} cores"
  if machine["device"] != "cpu":
    where += f"; for {machine['device']}"
  parts.append(
    f"*`{found['command']}`, {found['date'][:10]}: {where}; {versions}.*"
  )
  return Markdown("\n\n".join([f":::{{dropdown}} {fold}", *parts, ":::"]))


def _table(table):
  """A table, without the columns that are the same in all rows: a line below has these."""
  values = {
    c: {row[i] for row in table["rows"]} - {None}
    for i, c in enumerate(table["columns"])
  }
  same = {
    c: found
    for c, found in values.items()
    if len(found) == 1 < len(table["rows"])
  }
  kept = [i for i, column in enumerate(table["columns"]) if column not in same]
  columns = [table["columns"][i] for i in kept]
  lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
  lines += [
    ["" if row[i] is None else _cell(row[i]) for i in kept]
    for row in table["rows"]
  ]
  text = f"{table['title']}:\n\n" + "\n".join(
    f"| {' | '.join(line)} |" for line in lines
  )
  if same:
    text += (
      "\n\nIn all rows: "
      + ", ".join(f"{c} {_cell(*values)}" for c, values in same.items())
      + "."
    )
  return text


def _cell(x):
  return f"{x:g}" if isinstance(x, float) else str(x)
