"""Draws models and options, and compares the bits of steps on 1, 2, 4 and 8 devices.

  python tests/same_bits_draws.py 200
  python tests/same_bits_draws.py 1 --first 123

prints each draw whose parameters, state or metrics differ, and with --plain of how many draws those
of the plain step on 2 and on 8 devices do, which adds up in another order. `support.same_bits` draws.
"""

import argparse
import os

# As users compile, and not as conftest.py does, by which code is not optimised.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from support.same_bits import different, drawn, trained


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("count", type=int)
  parser.add_argument("--first", type=int, default=0)
  parser.add_argument("--plain", action="store_true")
  args = parser.parse_args()
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  jax.config.update("jax_numpy_rank_promotion", "allow")
  wrong = plain = 0
  for seed in range(args.first, args.first + args.count):
    draw = drawn(seed)
    try:
      first = trained(draw, seed % 2)  # without a mesh, or on one of one device
      found = {n: different(first, trained(draw, n)) for n in (2, 4, 8)}
      if any(found.values()):
        wrong += 1
        print(seed, draw, {n: x[:5] for n, x in found.items() if x}, flush=True)
      if args.plain and not draw.explicit:  # where Adafactor is an error of JAX
        few, many = (trained(draw, n, None) for n in (2, 8))
        plain += bool(different(few, many))
    except Exception as error:
      wrong += 1
      print(seed, draw, type(error).__name__, str(error)[:500], flush=True)
    if seed % 10 == 9:
      print(seed + 1 - args.first, "done,", wrong, "wrong", flush=True)
  print(
    f"{args.count} draws: {wrong} differ or fail; of the plain step {plain}"
  )


if __name__ == "__main__":
  main()
