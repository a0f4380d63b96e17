"""Draws losses with collectives and loops, and compares steps over devices with one device.

  python tests/mesh_draws.py 500
  python tests/mesh_draws.py 1 --first 123

prints the error of each draw, and what is drawn where that is too large. A draw that hangs ends
the command. `support.collective_losses` has the losses, and the objective that says what is right.
"""

import argparse
import dataclasses
import faulthandler
import sys

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


def main(arguments=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("draws", type=int, help="how many")
  parser.add_argument("--first", type=int, default=0, help="the seed of the first")
  args = parser.parse_args(arguments)
  wrong = 0
  for seed in range(args.first, args.first + args.draws):
    draw = drawn(seed)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    print(f"{seed}:", end=" ", flush=True)
    error = error_of(draw)
    print(f"{error:.1e}" if error < TOLERANCE else f"{error:.1e}, of {draw}", flush=True)
    wrong += bool(error >= TOLERANCE)  # of NumPy: no exit status
  return wrong


if __name__ == "__main__":
  sys.exit(main())
