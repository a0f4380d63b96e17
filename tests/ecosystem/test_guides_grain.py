"""examples/grain_checkpoints.py: a run that is killed resumes with the very next batch."""

import functools
import itertools
import multiprocessing
import os
import pathlib
import runpy
import signal
import zlib

import grain
import jax
import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "grain_checkpoints.py"
# microbatches of a step and of the run, seconds of a process
CYCLE, CALLS, LIMIT = (4, 12, 120)

# an example's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


@functools.cache
def names_of_example():
  return runpy.run_path(str(EXAMPLE))


def train(folder, calls, dataset=None, killed_in=None):
  """Trains as the example does. Writes down which batch each call had, even if it is killed."""
  names = dict(names_of_example())
  mini_step = names["mini_step"]

  def recorded(params, opt_state, x, y, key):
    call = int(opt_state.gradient_step) * CYCLE + int(opt_state.mini_step)
    with open(folder.with_suffix(".seen"), "a") as file:
      print(call, zlib.crc32(np.asarray(x).tobytes() + np.asarray(y).tobytes()), file=file)
    if call == killed_in:  # the checkpoint of the call before is being written
      os.kill(os.getpid(), signal.SIGKILL)
    return mini_step(params, opt_state, x, y, key)

  held = names["train_on_grain"]
  names |= {"mini_step": recorded, "dataset": dataset or names["dataset"]}
  # The function reads the names of its file, and these replace them for it alone.
  run = type(held)(held.__code__, names)
  return jax.device_get(jax.tree.leaves(run(folder, calls)))


def seen(folder):
  """The number of each call, and a checksum of its batch."""
  lines = folder.with_suffix(".seen").read_text().splitlines()
  return [tuple(map(int, line.split())) for line in lines]


def train_in_a_process(folder, killed_in):
  jax.config.update("jax_platforms", "cpu")
  np.savez(folder.with_suffix(".npz"), *train(folder, CALLS, killed_in=killed_in))


def test_a_killed_run_resumes_with_the_very_next_batch(tmp_path):
  server = multiprocessing.get_context("forkserver")
  server.set_forkserver_preload([__name__, "flax.nnx", "orbax.checkpoint", "sklearn.datasets"])
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  # Killed in the middle of the second and of the third cycle.
  for folder, killed_in in [(whole, None), (parts, 6), (parts, 9), (parts, None)]:
    process = server.Process(target=train_in_a_process, args=(folder, killed_in), daemon=True)
    process.start()
    process.join(LIMIT)
    assert process.exitcode == (0 if killed_in is None else -signal.SIGKILL), process.exitcode

  expected = dict(seen(whole))
  assert list(expected) == list(range(CALLS))
  assert len(set(expected.values())) == CALLS
  assert all(expected[call] == batch for call, batch in seen(parts))
  calls = [call for call, _ in seen(parts)]
  resumed_at = [b for a, b in itertools.pairwise(calls) if b <= a]
  assert len(resumed_at) == 2
  # the last checkpoint may not have been complete
  assert resumed_at[0] in (5, 6)
  assert resumed_at[1] in (8, 9)
  assert calls[-1] == CALLS - 1
  ends = [np.load(folder.with_suffix(".npz")) for folder in (whole, parts)]
  assert ends[0].files == ends[1].files
  for name in ends[0].files:
    np.testing.assert_array_equal(ends[1][name], ends[0][name], strict=True)


@pytest.mark.parametrize("on_device", [False, True])
def test_the_position_is_that_of_the_last_batch_trained_on(tmp_path, on_device):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  dataset = names_of_example()["dataset"]
  if on_device:  # which reads ahead
    dataset = grain.experimental.device_put(dataset, jax.devices()[0])
  expected = train(whole, CALLS)
  train(parts, 6, dataset)
  actual = train(parts, CALLS, dataset)
  assert seen(parts) == seen(whole)
  assert all(map(np.array_equal, actual, expected))
