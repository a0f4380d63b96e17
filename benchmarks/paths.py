"""Lets the benchmarks import what they share with the tests (`support`) and the examples.

Import it before those: a benchmark is run as a file, from a checkout that installs neither.
"""

import pathlib
import sys

sys.path += [
  str(pathlib.Path(__file__).parents[1] / folder)
  for folder in ("tests", "examples")
]
