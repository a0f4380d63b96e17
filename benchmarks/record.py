"""Runs every benchmark and writes benchmarks/results/*.json, on CPU unless JAX_PLATFORMS is set.

    python benchmarks/record.py [--target-config FILE]

An hour on 2 cores that do nothing else. Programs for a TPU are compiled if libtpu is installed, and
for an H100 with --target-config (see memory.py). What is timed comes last. Then `python docs/tables.py` writes
the tables of the pages.
"""

import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys


def runs(target_config):
  """The command lines, as lists."""
  compiled = ["collectives.py --save"]
  if importlib.util.find_spec("libtpu"):
    compiled += [
      "collectives.py --tpu 8 --save",
      "memory.py --platform tpu --save",
      "streaming.py --tpu --save",
      "sharding.py --save",
    ]
  for_gpu = ["--platform", "gpu", "--target-config", target_config, "--save"]
  for_gpus = "memory.py", "sharding.py"
  gpu = [[script, *for_gpu] for script in for_gpus]
  trained = ["noise_scale.py --save", "batches.py --save"]
  timed = [
    "memory.py --time --save",
    "streaming.py --save",
    "whole_cycle.py --save",
    "sharding.py --processes --save",
    "host_time.py --arrays 50 500 --save",  # 2000 on 8 devices compile for minutes
  ]
  return [
    *map(str.split, compiled),
    *(gpu if target_config else []),
    *map(str.split, trained),
    *map(str.split, timed),
  ]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--target-config", metavar="FILE", help="of a GPU, as XLA writes it"
  )
  args = parser.parse_args()
  # without it, JAX with libtpu looks for a TPU
  env = {
    "JAX_PLATFORMS": "cpu",
    **os.environ,
  }
  for script, *options in runs(args.target_config):
    print("\n==", script, *options, flush=True)
    path = pathlib.Path(__file__).with_name(script)
    subprocess.run([sys.executable, path, *options], env=env, check=True)


if __name__ == "__main__":
  main()
