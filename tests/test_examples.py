"""Every example, run as a user runs it: a small one to its end, and input that cannot work."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# As small as the memory of activations still shows; the time goes into compiling.
SMALL_LM = (
  *("--steps", "3", "--batch", "4", "--microbatch", "2"),
  *("--length", "32", "--layers", "2", "--width", "32"),
)


def run(script, *arguments, cwd):
  # Not conftest's eight devices: the examples see to their own. But machine code as there, of
  # programs that are optimised as ever: train_lm.py then takes less than half as long.
  flags = "--xla_backend_optimization_level=0"
  return subprocess.run(
    [sys.executable, ROOT / script, *arguments],
    cwd=cwd,
    env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    capture_output=True,
    text=True,
    timeout=300,
  )


# An example, its arguments, and what it must print.
SUCCEEDS = [
  ("train_lm.py", SMALL_LM, r"held-out bits per byte: \d+\.\d+ before"),
  (
    "train_lm.py",
    (*SMALL_LM, "--data", "text.txt", "--bf16", "--remat", "--plot", "figure.png"),
    r"held-out bits per byte: \d+\.\d+ before",
  ),
  ("streaming.py", (), r"skipped microbatches:  1\n"),
  ("data_parallel.py", (), r"per_cycle saves 1\.53 MiB a step and device\n"),
  ("multi_process.py", (), r"seconds a step: \d+\.\d+ per_cycle, \d+\.\d+ per_microbatch"),
]

# An example, its arguments, and the one line that it must answer with.
FAILS = [
  ("train_lm.py", ("--data", "missing.txt"), "--data missing.txt: No such file or directory"),
  ("train_lm.py", ("--data", "empty.txt"), "--data holds 0 bytes; .* --length 64 needs 650"),
  ("train_lm.py", ("--data", "short.txt"), "--data holds 649 bytes; .* --length 64 needs 650"),
  ("train_lm.py", ("--batch", "12"), "--batch 12 is not a multiple of --microbatch 8"),
  ("train_lm.py", ("--microbatch", "0"), "argument --microbatch: must be 1 or more, got 0"),
  ("train_lm.py", ("--steps", "-1"), "argument --steps: must be 1 or more, got -1"),
  ("train_lm.py", ("--width", "30"), "--width 30 is not a multiple of 4, the number of heads"),
  ("train_lm.py", ("--plot", "no/figure.png"), "--plot no/figure.png: .*No such file.*"),
  (
    "multi_process.py",
    ("--process-id", "1"),
    "give all of --coordinator, --num-processes and --process-id, or none",
  ),
  (
    "multi_process.py",
    ("--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", "2"),
    "--process-id 2 must be one of 0 to --num-processes - 1",
  ),
]


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
  (tmp_path / "empty.txt").touch()
  (tmp_path / "short.txt").write_text("x" * 649)
  return tmp_path


@pytest.mark.parametrize(("example", "arguments", "printed"), SUCCEEDS)
def test_runs_to_its_end(example, arguments, printed, folder):
  done = run(f"examples/{example}", *arguments, cwd=folder)
  assert done.returncode == 0, done.stderr
  assert re.search(printed, done.stdout)
  assert "Traceback" not in done.stderr
  if "--plot" in arguments:
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("example", "arguments", "message"), FAILS)
def test_bad_input_is_one_line(example, arguments, message, folder):
  done = run(f"examples/{example}", *arguments, cwd=folder)
  assert done.returncode == 2
  assert "Traceback" not in done.stderr
  assert re.fullmatch(f"{example}: error: {message}", done.stderr.splitlines()[-1])
  assert done.stdout == ""


@pytest.mark.parametrize("benchmark", ["whole_cycle.py", "streaming.py", "collectives.py"])
def test_benchmarks_find_what_they_import(benchmark, tmp_path):
  done = run(f"benchmarks/{benchmark}", "--help", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert f"usage: {benchmark}" in done.stdout
