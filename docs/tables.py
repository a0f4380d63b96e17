"""Writes the tables and figures of the pages from benchmarks/results.

    python docs/tables.py [--check]

In a page, what is between `<!-- NAME: from benchmarks/results -->` and `<!-- end -->` is what the function
NAME below returns. With --check nothing is written, and a page that is not current is an error.
"""

import argparse
import itertools
import json
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
MARKED = re.compile(
  r"(<!-- (\w+): from benchmarks/results -->\n).*?(<!-- end -->)", re.S
)


def of(name):
  """A results file, as its benchmark wrote it."""
  return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name, table=0):
  """The rows of one of its tables, each a dict by column."""
  found = of(name)["tables"][table]
  return [
    dict(zip(found["columns"], row, strict=True)) for row in found["rows"]
  ]


def cell(name, first, column, table=0):
  [row] = [row for row in rows(name, table) if first in row.values()]
  return row[column]


def table(head, lines, left=1):
  """Markdown, the first columns as text and the others as numbers."""
  columns = head.count("|") + 1
  rule = "|".join(["---"] * left + ["---:"] * (columns - left))
  joined = ["|".join(map(str, line)) for line in lines]
  return "\n".join(f"|{line}|" for line in [head, rule, *joined])


def source(*names):
  """Which files have it, and the versions that were measured."""
  # In the order of the files, each once.
  versions = dict.fromkeys(
    f"optax_accum {of(n)['versions']['optax_accum']}, JAX {of(n)['versions']['jax']}"
    for n in names
  )
  files = ", ".join(f"`{name}.json`" for name in names)
  return f"\n\n*{files}: {'; '.join(versions)}.*"


def short(x):
  return "" if x is None else f"{x:.3g}"


def summary():
  """The first lines of the page on performance."""
  ours = cell("whole_cycle", "optax_accum, N=8", "temp, P")
  whole = cell("whole_cycle", "whole batch at once", "temp, P")
  time = cell("whole_cycle", "optax_accum, N=8", "time / scan")
  tpu = [cell("memory_tpu", x, "temp, P") for x in ("plain", "in_place")]
  gpu = [cell("memory_gpu", x, "temp, P") for x in ("plain", "in_place")]
  faster = cell("streaming", "apply", "MultiSteps / this", 1)
  theirs = cell("streaming", "MultiSteps", "temp, P", 1)
  sent = cell("collectives", "optax_accum", "MiB outside")
  others = cell("collectives", "optax.MultiSteps, scanned", "MiB in loops")
  return f"""\
- **Memory.** A Transformer's step in 8 microbatches needs {ours:g} P of temporary memory on a CPU. The
  whole batch needs {whole:g} P.
- **Time.** That step takes {time:.2f} of the time of a `jax.lax.scan` written by hand.
- **`in_place=True`** lowers the memory from {tpu[0]:g} P to {tpu[1]:g} P on a TPU v5e, and from {gpu[0]:g} P to
  {gpu[1]:.2f} P on an H100, for scanned layers under `jax.checkpoint`.
- **Microbatches one at a time.** With AdamW on a CPU, `optax.MultiSteps` takes {faster:.0f} times as long as
  `accumulate(...).apply`, and {theirs:g} P of temporary memory instead of 0 P.
- **Several devices.** A step in 8 microbatches sends {sent:.1f} MiB per device, once. `optax.MultiSteps` in
  a scan sends {others:.1f} MiB."""


def one_step():
  """A step of 8 microbatches, on a CPU and on an H100."""
  names = {
    "optax_accum, N=8": "optax_accum",
    "hand-written scan, N=8": "a scan by hand",
    "optax.microbatching, N=8": "`optax.microbatching`",
    "whole batch at once": "the whole batch",
  }
  files = "whole_cycle", "whole_cycle_gpu"
  lines = []
  for name, title in names.items():
    line = [title]
    for file in files:
      line.append(short(cell(file, name, "time / scan")))
      line.append(short(cell(file, name, "temp, P")))
    lines.append(line)
  head = "step|CPU: time|memory, P|H100: time|memory, P"
  return table(head, lines) + source(*files)


def options():
  """What options add to the memory of a step."""
  files = "memory_cpu", "memory_tpu", "memory_gpu"
  lines = []
  for row in rows(files[0]):
    option = row["option"]
    cells = [short(cell(file, option, "temp, P")) for file in files]
    lines.append([f"`{option}`" if option != "plain" else "none", *cells])
  return table("option|CPU, P|TPU v5e, P|H100, P", lines) + source(*files)


def one_at_a_time():
  """`accumulate` beside `MultiSteps`, by optimizer."""
  files = "streaming", "streaming_gpu"
  lines = []
  for i, found in enumerate(of("streaming_gpu")["tables"]):
    name = found["title"].split(":")[0]
    titles = [t["title"].split(":")[0] for t in of("streaming")["tables"]]
    at = titles.index(name)
    line = [name.replace("+", " and ")]
    for file, number in zip(files, (at, i), strict=True):
      line.append(short(cell(file, "apply", "MultiSteps / this", number)))
    for way in ("MultiSteps", "apply"):
      line.append(short(cell("streaming", way, "temp, P", at)))
    lines.append(line)
  head = "optimizer|ratio, CPU|ratio, H100|`MultiSteps`, P|`apply`, P"
  return table(head, lines) + source(*files)


def several_devices():
  """What each of 8 devices sends."""
  lines = []
  for row in rows("collectives"):
    line = [row["approach"]]
    for column in ("MiB in loops", "MiB outside", "work / even share"):
      line.append(short(row[column]))
    lines.append(line)
  head = "way|MiB, within loops|MiB, once|work"
  return table(head, lines) + source("collectives")


def ways_to_shard():
  """Four ways, from the files of `benchmarks/sharding.py`."""
  names = {
    "**replicated**": "replicated",
    "**ZeRO-1**: the state in shards": "state sharded (ZeRO-1)",
    "**gathered once a cycle**: parameters and state in shards": "gathered once a step",
    "**layer by layer**, with replicas": "layer by layer",
  }
  lines = []
  for title, way in names.items():
    line = [title]
    for name in ("held, P", "temp, P", "sent, P", "after, P"):
      line.append(f"{cell('sharding_tpu', way, name):.2f}")
    line.append(f"{cell('sharding_processes', way, 's a step'):.2f}")
    lines.append(line)
  # In columns of at most 6 letters the table is as wide as a window of 480 pixels.
  head = "way|held|temp|sent|across|s"
  return table(head, lines) + source("sharding_tpu", "sharding_processes")


def programs():
  """The memory of what a cycle runs, from the files of `benchmarks/sharding.py --programs`."""
  lines = []
  pairs = zip(rows("programs_tpu"), rows("programs_gpu"), strict=True)
  for on_tpu, on_gpu in pairs:
    if "in_place" in on_tpu["program"]:
      continue
    name = f"`{on_tpu['program']}`"
    if on_tpu["way"] != "replicated":
      name = f"{name}, shards"
    line = [name, f"{on_tpu['arguments, P']:.2f}"]
    for row in (on_tpu, on_gpu):
      line.append(f"{row['temp, P']:.2f}")
    lines.append(line)
  head = "program|arguments|temporary, v5e|temporary, H100"
  return table(head, lines) + source("programs_tpu", "programs_gpu")


def five_batches():
  """Loss per token and per second, from the file of `benchmarks/batches.py`."""
  final, curves, timed = (rows("batches", i) for i in range(3))
  tokens = [row["tokens"] for row in curves]
  target = max(float(row["x 1"]) for row in final)
  times = {row["rows"]: row for row in timed}
  lines = []
  for row in final:
    line = [row["rows"], row["beta2"], row["learning rate"], row["x 1"]]
    time = times.pop(row["rows"], None)
    if time is None:  # the last row repeats a batch
      lines.append([*line, "", "", ""])
      continue
    losses = [look[f"{row['rows']} rows"] for look in curves]
    seen = first_below(target, tokens, losses)
    seconds = seen / tokens[-1] * time["s for all tokens"]
    lines.append([*line, f"{seen:,.0f}", f"{time['ms']:g}", f"{seconds:.1f}"])
  until = f"until {target:.2f}"
  head = (
    f"rows|beta2|learning rate|final loss|tokens {until}|ms a step|s {until}"
  )
  return table(head, lines, left=0) + source("batches")


def first_below(target, tokens, losses):
  """The tokens at which a falling loss is the target, on lines between what was measured."""
  points = list(zip(tokens, losses, strict=True))
  for (a, high), (b, low) in itertools.pairwise(points):
    if low <= target:
      return a + (b - a) * (high - min(target, high)) / (high - low)
  return tokens[-1]


def current(page):
  """The text of a page, with its tables as they are now."""

  def written(match):
    return match[1] + globals()[match[2]]() + "\n" + match[3]

  return MARKED.sub(written, page.read_text())


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true")
  args = parser.parse_args()
  for page in sorted(DOCS.rglob("*.md")):
    text = current(page)
    if args.check and text != page.read_text():
      sys.exit(f"{page} is not current: run python docs/tables.py")
    if not args.check:
      page.write_text(text)


if __name__ == "__main__":
  main()
