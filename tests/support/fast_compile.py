"""XLA flags by which programs for the CPU compile in a third of the time, and run slower."""

from importlib import metadata

# The code is not optimised; the programs are. And a program is compiled in one piece: two processes
# at a time have work for two cores.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Newer versions have one way to emit loops, and no such flag.
EMITTERS = ""
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
  EMITTERS = "--xla_cpu_use_fusion_emitters=false"
