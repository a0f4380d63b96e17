"""Every example, run as a user runs it: a small one to its end, and input that cannot work."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from support import fast_compile

ROOT = pathlib.Path(__file__).parents[2]

# As small as the memory of activations still shows; the time goes into compiling.
SMALL_LM = (
  *("--steps", "3", "--batch", "4", "--microbatch", "2"),
  *("--length", "32", "--layers", "2", "--width", "32"),
)


def run(script, *arguments, cwd):
  # Not conftest's eight devices: the examples see to their own.
  flags = f"{fast_compile.FLAGS} {fast_compile.EMITTERS}"
  return subprocess.run(
    [sys.executable, *([script] if script == "-c" else [ROOT / script]), *arguments],
    cwd=cwd,
    env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
    capture_output=True,
    text=True,
    timeout=300,
  )


# An example, its arguments, and what it must print.
SUCCEEDS = [
  ("train_lm.py", (*SMALL_LM, "--data", "text.txt", "--bf16", "--remat", "--plot", "figure.png"),
    r"held-out bits per byte: \d+\.\d+ before"),
  ("streaming.py", (), r"skipped microbatches:  1\n"),
  ("as_they_arrive.py", (), r"2 of 4 in its cycle\n(.*\n)+resumed: the same bits"),
  ("flax_linen.py", ("--epochs", "5"), r"1 devices, .*\n(.*\n){5}test accuracy: 0\.9\d+ after 35 steps"),
  ("flax_linen.py", ("--epochs", "5", "--mesh"), r"test accuracy: 0\.9\d+ after 35 steps"),
  ("data_parallel.py", (), r"mesh= saves 1\.53 MiB a step and device\n"),
  ("fsdp.py", (), r"between the replicas\n(.*\n){2}all-reduce( +0){4} +1 +1,\d{3},\d{3}\n\n"),
  ("multi_process.py", (), r"seconds a step: \d+\.\d+, and \d+\.\d+ without mesh="),
  ("same_bits.py", (), r"1 devices: loss 4\..*\n(.*\n){2}8 devices: loss 4\..*\n1 result of \d"),
  ("contrastive.py", ("--steps", "60", "--batch", "64", "--microbatch", "8"),
    r"found by their other view: 0\.\d+ of 450 test images"),
  ("large_vocabulary.py", ("--steps", "5", "--batch", "256", "--microbatch", "8"),
    r"held-out bits per letter: 5\.\d+ before, 4\.\d+ after 5 steps"),
  ("packed_text.py", ("--steps", "20", "--length", "64"),
    r"compilations in steps of 1 to 8 microbatches: 3\n(.*\n)+packed, on 8 devices +\d\.\de-1\d"),
  ("mixture_of_experts.py", ("--steps", "30", "--batch", "16"),
    r"balance loss +3\.9\d+ .*\n(.*\n)+on 8 devices +1\.\d+ +\d\.\de-1\d\n"),
  ("flax_nnx.py", (), r"temp memory: 0\.\d+ MiB a step, 2\.\d+ for all parameters"),
  ("per_row_gradients.py", (), r"64 at a time: 2\.\d+ MiB, relative error"),
  ("loss_scaling.py", (), r"scale 262144, 2 steps skipped, loss 1\.\d+\n"),
  ("grain_checkpoints.py", (), r"resumed: the same bits\n"),
  ("influence.py", ("--epochs", "5", "--planted", "10"), r"planted rows among the 10 of most influence: \d+%"),
  ("plan.py", (), r"within 64.0 MiB on each device\n(.*\n)+best: num_microbatches=8 \(of 8 rows\), remat=False"),
  ("noise_scale.py", ("--target", "4.5", "--batches", "8", "32", "--plot", "figure.png"),
    r"the noise scale at the target is \d+ rows"),
  ("resume.py", ("--cycle", "2"),
    r"(?s)streaming, from call 4 on: done\nstreaming: the same bits.*whole-cycle: the same bits"),
]  # fmt: skip

# An example, its arguments, and the one line that it must answer with.
FAILS = [
  ("flax_linen.py", ("--epochs", "4"), "argument --epochs: must be 5 or more, to reach 0.95, got 4"),
  ("train_lm.py", ("--steps", "ten"), "argument --steps: must be a whole number, 1 or more, got ten"),
  ("train_lm.py", ("--data", "missing.txt"), "--data missing.txt: No such file or directory"),
  ("train_lm.py", ("--data", "short.txt"), "--data holds 649 bytes; .* --length 64 needs 650"),
  ("train_lm.py", ("--batch", "12"), "--batch 12 is not a multiple of --microbatch 8"),
  ("multi_process.py", ("--process-id", "1"), "give all of --coordinator, --num-processes and --process-id, or none"),
  ("contrastive.py", ("--batch", "12"), "--batch 12 is not 2 or more times --microbatch 32"),
  ("large_vocabulary.py", ("--microbatch", "65"),
    "--batch 1024 must be 256 or more, and 16 or more times --microbatch 65, to need .*"),
  ("packed_text.py", ("--microbatch", "12"), "--microbatch 12 is not a multiple of 8, .*"),
  ("mixture_of_experts.py", ("--steps", "29"), "--steps 29 must be 30 or more, to balance .*"),
  ("influence.py", ("--planted", "90"), "--planted 90 is more than half of the 1[34].* to train on"),
  ("plan.py", ("--memory", "much"), "this machine: memory_limit='much' is not a size: .*"),
  ("noise_scale.py", ("--batches", "8"), "--batches takes two sizes or more, multiples of 4 above it"),
  ("resume.py", ("--cycle", "1"), "--cycle 1 must be 2 or more"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
  (tmp_path / "short.txt").write_text("x" * 649)
  return tmp_path


@pytest.mark.parametrize(("example", "arguments", "printed"), SUCCEEDS)
def test_runs_to_its_end(example, arguments, printed, folder):
  done = run(f"examples/{example}", *arguments, cwd=folder)
  assert done.returncode == 0, done.stderr
  assert re.search(printed, done.stdout)
  assert "Traceback" not in done.stderr
  if example == "train_lm.py":
    before, after = map(float, re.search(r"byte: (\S+) before, (\S+) after", done.stdout).groups())
    assert after < before - 0.5
    assert "temp stops falling" not in done.stdout
  if "--plot" in arguments:
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


# Runs scripts, each with its arguments, in one process, which imports JAX once.
DRIVER = """
import contextlib, io, json, runpy, sys, traceback
results = []
for script, arguments in json.loads(sys.argv[1]):
  sys.path[0] = script.rpartition("/")[0]
  sys.argv, status = [script, *arguments], 0
  with contextlib.redirect_stdout(io.StringIO()) as out:
    with contextlib.redirect_stderr(io.StringIO()) as err:
      try:
        runpy.run_path(script, run_name="__main__")
      except SystemExit as stopped:
        status = stopped.code
      except BaseException:
        traceback.print_exc()
  results.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def answers(calls, cwd):
  """The status, the output and the errors of each script with its arguments."""
  calls = [(str(ROOT / script), arguments) for script, arguments in calls]
  done = run("-c", DRIVER, json.dumps(calls), cwd=cwd)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_bad_input_is_one_line(folder):
  calls = [(f"examples/{name}", arguments) for name, arguments, _ in FAILS]
  for (name, arguments, message), (status, out, err) in zip(
    FAILS, answers(calls, folder), strict=True
  ):
    assert status == 2, (name, arguments, err)
    assert "Traceback" not in err
    assert re.fullmatch(f"{name}: error: {message}", err.splitlines()[-1])
    assert out == ""


BENCHMARKS = (
  *("whole_cycle.py", "streaming.py", "collectives.py", "sharding.py"),
  *("host_time.py", "noise_scale.py", "batches.py"),
)


def test_benchmarks_find_what_they_import(tmp_path):
  calls = [(f"benchmarks/{name}", ["--help"]) for name in BENCHMARKS]
  for name, (status, out, err) in zip(BENCHMARKS, answers(calls, tmp_path), strict=True):
    assert status == 0, (name, err)
    assert f"usage: {name}" in out
