"""Draws losses with collectives and loops, and compares steps over devices with one device.

  python tests/mesh_draws.py 500
  python tests/mesh_draws.py 1 --first 123

prints each draw that is wrong, raised or hung, and how many there are. `support.collective_losses`
has the losses, and the objective that says what is right. Draws run in a process
that is replaced behind one that hangs.
"""

import argparse
import collections
import dataclasses
import queue
import subprocess
import sys
import threading

import conftest  # noqa: F401 (eight devices, strict promotion)
import jax
import numpy as np
from support import collective_losses as losses

from optax_accum import _versions

TOLERANCE = 1e-11
PATIENCE = 120.0  # seconds for a draw
LOOPS = ("none", "scan", "fori_loop", "while_loop", "cond")


@dataclasses.dataclass(frozen=True)
class Draw:
  """One configuration."""

  loss: str
  loop: str
  entry: str
  devices: int
  valid: tuple[int, ...]  # rows on each device
  weighs: bool
  split: tuple[str, int]
  nan: bool
  in_place: bool


def drawn(seed):
  rng = np.random.default_rng(seed)
  pick = lambda options: options[rng.integers(len(options))]  # noqa: E731
  loss, loop = pick([*losses.TABLE]), pick(LOOPS)
  entry = pick(("mesh", *losses.ENTRIES))
  if entry == "shard_map, typed":
    loop = "none"
    loss = loss if losses.TABLE[loss].typed else "no collective"
  devices, weighs = pick((1, 2, 4, 4, 8)), pick((True, True, False))
  # The first device has rows in every microbatch, so that some statistics exist.
  valid = [losses.ROWS, *rng.integers(0, losses.ROWS + 1, devices - 1).tolist()]
  if rng.random() < 0.3:
    valid[1:] = [n * (i % 2) for i, n in enumerate(valid[1:])]
  options = [("num_microbatches", n) for n in (1, 2, 4, 8)] + [
    ("microbatch_size", n) for n in (3, 5)
  ]
  split, nan = pick(options), rng.random() < 0.25
  # Where a loss sends something, a NaN may reach the gradients of some devices alone.
  nan = nan and losses.TABLE[loss].alone
  several = split[1] not in (1, losses.ROWS) or split[0] == "microbatch_size"
  in_place = (
    _versions.ADDS_TO_REFERENCES and not weighs and not nan and several and pick((True, False))
  )
  return Draw(loss, loop, entry, devices, tuple(valid), weighs, split, nan and several, in_place)


def loss_of(draw):
  fun = losses.TABLE[draw.loss].fun

  def loss(params, batch):
    return fun(params, {**batch, "x": losses.looped(draw.loop, params, batch["x"])})

  return loss


def error_of(draw):
  """How far the gradient and the loss of the draw are off."""
  with jax.enable_x64(True):
    params, batch = losses.make_params(), losses.make_batch(draw.valid)
    options = {"skip_nonfinite": True} if draw.nan else {}
    options |= {"in_place": True} if draw.in_place else {}
    if draw.nan:
      batch["x"][1] = np.nan  # in the second microbatch of the first device
    loss, split, row = loss_of(draw), dict([draw.split]), losses.TABLE[draw.loss]
    run = losses.gradient_function(loss, draw.entry, draw.devices, draw.weighs, **split, **options)
    alone = row.alone or draw.devices == 1
    wanted = losses.expected(loss, params, batch, draw.devices, draw.weighs, alone=alone, **split)
    return losses.error_of(run(params, batch), wanted)


def verdict(draw):
  try:
    error = error_of(draw)
  except Exception as e:
    return "raised", f"{type(e).__name__}: {e}".replace("\n", " ")[:200]
  return ("right", "") if error < TOLERANCE else ("wrong", f"off by {error:.1e}")


def work(first, last):
  for seed in range(first, last):
    print(seed, *verdict(drawn(seed)), flush=True)


def supervise(first, last):
  """Starts a process that works, and another one behind a draw that does not end."""
  found = collections.Counter()
  while first < last:
    command = [sys.executable, __file__, str(last - first), "--first", str(first), "--work"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = queue.Queue()
    threading.Thread(target=lambda p=process, q=lines: [*map(q.put, p.stdout), q.put("")]).start()
    while first < last:
      try:
        word, *text = lines.get(timeout=PATIENCE).strip().split(maxsplit=2)[1:] or ["hung"]
      except queue.Empty:
        word, text = "hung", []
      found[word] += 1
      if word != "right":
        print(word, first, drawn(first), *text, flush=True)
      first += 1
      if word == "hung":
        break
    process.kill()
    process.wait()
  print(", ".join(f"{word}: {found[word]}" for word in ("right", "wrong", "raised", "hung")))
  return found["wrong"] + found["raised"] + found["hung"]


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("draws", type=int, help="how many")
  parser.add_argument("--first", type=int, default=0, help="the seed of the first")
  parser.add_argument("--work", action="store_true", help="in this process")
  args = parser.parse_args()
  sys.exit((work if args.work else supervise)(args.first, args.first + args.draws))
