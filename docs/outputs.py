"""Runs the code of pages, and writes what each block prints below it.

    python docs/outputs.py [--check] [PAGE ...]

A block of Python runs after those before it, on 8 CPU devices. A block of text below it has what
it prints, or the first lines of it and "...". With --check nothing is written: a page fails if its code
raises, or prints other words. Numbers may differ. By default all pages that run, each in a process of its own.
"""

import argparse
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent

# Their blocks do not follow one another: tests/ecosystem runs them in its own way.
ELSEWHERE = {"losses.md", "migrating.md"}
BLOCK = re.compile(
  r"^```python\n(.*?)^```\n(?:(?:\n</details>\n)?\n```text\n(.*?)^```\n)?",
  re.M | re.S,
)


def pages():
  """The pages that have code to run."""
  found = sorted(DOCS.rglob("*.md"))
  return [
    p for p in found if BLOCK.search(p.read_text()) and p.name not in ELSEWHERE
  ]


def words(text):
  """What is printed, without its numbers and the space between."""
  return re.sub(r"[-+]?[\d.,]+(e[-+]?\d+)?", "0", text).split()


def run(page, check):
  names = {"__name__": "page"}
  text = page.read_text()
  written, end = "", 0
  for block in BLOCK.finditer(text):
    line = text.count("\n", 0, block.start(1))
    code = compile("\n" * line + block[1], str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      exec(code, names)
    if block[2] is None:
      continue
    lines = [x.rstrip() for x in printed.getvalue().strip("\n").splitlines()]
    if block[2].endswith("\n...\n"):
      lines[block[2].count("\n") - 1 :] = ["..."]
    found = "\n".join(lines)
    if check and words(found) != words(block[2]):
      sys.exit(
        f"{page}:{line}: the page has\n{block[2]}\nbut it prints\n{found}"
      )
    written += text[end : block.start(2)] + found + "\n"
    end = block.end(2)
  if not check:
    page.write_text(written + text[end:])


def environment():
  """That of a process that runs a page."""
  # Code for the CPU is not optimized, and compiles in half the time. The programs are.
  flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  return {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{flags} --xla_cpu_parallel_codegen_split_count=1",
    "PYTHONPATH": str(ROOT),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("pages", nargs="*", type=pathlib.Path, metavar="PAGE")
  parser.add_argument("--check", action="store_true")
  args = parser.parse_args()
  if (
    len(args.pages) == 1
    and os.environ.get("XLA_FLAGS") == environment()["XLA_FLAGS"]
  ):
    run(args.pages[0].resolve(), args.check)
    return
  option = ["--check"] * args.check
  for page in args.pages or pages():
    print(page.resolve().relative_to(ROOT), flush=True)
    command = [sys.executable, __file__, *option, page]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True)


if __name__ == "__main__":
  main()
