"""Draws configurations and compares each with the whole batch; the command for more than CI draws.

  python tests/whole_batch.py --draws 1000 --seed 1

prints every draw that fails as one line, with the plainest draw that fails too, and how to run it
alone:

  python tests/whole_batch.py --draw "entry=update devices=4 weights=floats"

`tests/package/test_whole_batch.py` has the draws of CI, and what a draw is made of is `support.draws`.
"""

import argparse
import functools
import sys
import time
import traceback

import conftest  # noqa: F401 (eight devices, strict promotion, warnings)
import jax
import numpy as np
from support import cycles, placements, plain
from support.draws import Draw, drawn, parsed, shrunk

# Rounding of three steps, by dtype; planted wrong answers are off by 1e-2 and more. Complex tanh
# has poles, near which rounding is magnified.
TOLERANCE = {"float32": 3e-5, "complex64": 5e-4, "float64": 1e-11, "bfloat16": 4e-2}


@functools.lru_cache(maxsize=1)
def run(draw: Draw):
  """What is held after each call of a draw; kept to be compared with several gradients."""
  return placements.run(draw, cycles.cycles_of(draw))


def problems(draw: Draw, gradient=plain.gradient) -> list[str]:
  """What is wrong in the run of a draw, a line each; what is raised counts too."""
  expected = plain.whole_batch_steps(draw, cycles.cycles_of(draw), gradient)
  try:
    actual = run(draw)
  except Exception as e:
    where = traceback.extract_tb(e.__traceback__)[-1]
    return [f"{type(e).__name__} at {where.filename}:{where.lineno}: {e}".replace("\n", " ")]
  return [
    f"call {number}: {name}: {problem}"
    for number, (a, b) in enumerate(zip(actual, expected, strict=True))
    for name in a.keys() & b.keys()
    for problem in difference(a[name], b[name], tolerance(draw, name))
  ]


def tolerance(draw: Draw, name: str) -> float:
  """How far rounding may be off, in units of the largest value or of 1."""
  if name == "total_weight":  # is float32
    return 1e-6
  if draw.optimizer == "lbfgs" and draw.dtype == "float64":
    return 1e-8  # of steps so long that they magnify rounding a thousandfold
  single = draw.dtype == "float64" and draw.accumulator_dtype == "float32"
  return TOLERANCE["float32" if single else draw.dtype]


def difference(actual, expected, tolerance) -> list[str]:
  """Where two trees differ by more than rounding. Only their leaves are compared."""
  a, b = jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)
  if len(a) != len(b):
    return [f"{len(a)} leaves for {len(b)}"]
  found = []
  for (path, x), y in zip(a, b, strict=True):
    wide = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
    x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
    if x.shape != y.shape:
      found.append(f"{jax.tree_util.keystr(path)} has shape {x.shape} for {y.shape}")
      continue
    scale = max(1.0, np.max(np.abs(y), initial=0.0, where=np.isfinite(y)))
    if not np.allclose(x, y, rtol=0, atol=tolerance * scale, equal_nan=True):
      off = np.max(np.abs(x - y))
      found.append(f"{jax.tree_util.keystr(path)} is off by {off:.1e}, at {scale * tolerance:.0e}")
  return found


def main(arguments=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--draws", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--start", type=int, default=0, help="the number of the first draw")
  parser.add_argument("--draw", type=parsed, help="run this one alone")
  args = parser.parse_args(arguments)
  if args.draw is not None:
    found = problems(args.draw)
    print("\n".join(found) or "right")
    return bool(found)
  start, wrong = time.perf_counter(), 0
  for index in range(args.start, args.start + args.draws):
    if index > args.start and index % 50 == 0:
      jax.clear_caches()  # a process has room for some thousands of compiled programs
    draw = drawn(args.seed, index)
    if found := problems(draw):
      wrong += 1
      print(f'{index}: --draw "{draw}"\n  {found[0]}')
      plainer = shrunk(draw, problems)
      print(f'  plainest: --draw "{plainer}"\n  {problems(plainer)[0]}', flush=True)
  print(f"{args.draws} draws, {wrong} wrong, {time.perf_counter() - start:.0f} s")
  return bool(wrong)


if __name__ == "__main__":
  sys.exit(main())
