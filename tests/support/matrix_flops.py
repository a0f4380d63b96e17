"""The work of a compiled program in matrix products, which XLA for TPU writes as convolutions."""

import math
import re

from optax_accum._compiled import hlo
from support.compiled import executions

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CONVOLVED = re.compile(r"dim_labels=\w+_(\w+)->")
_DILATED = re.compile(r"\blhs_dilate=([\dx]+)")


def matrix_flops(text, *trips):
  """Floating-point operations of one call of a program, on one device, from its HLO text.

  Two for each multiplication and addition of matrix products and convolutions, as often as
  `executions` says that they run, by `trips` of nested loops. Padding counts as data. What is
  elementwise, and kernels that are no matrix products to XLA, are left out.
  """
  total = 0
  for run in hlo.Module(text).runs(_is_matrix_work):
    total += 2 * executions(run.place, *trips) * _multiplications(run)
  return total


def _is_matrix_work(op):
  return op.opcode in ("dot", "convolution")


def _multiplications(run):
  op = run.operation
  operations = run.computation.operations
  lhs, kernel = (_dims(operations[name].shape) for name in op.operands)
  out = _dims(op.shape)
  convolved = _CONVOLVED.search(op.attributes)
  if not convolved:
    contracted = _CONTRACTED.search(op.attributes)
    out += [lhs[int(i)] for i in re.findall(r"\d+", contracted[1])]
    return math.prod(out)
  count = math.prod(out + kernel) // kernel[convolved[1].index("o")]
  dilated = _DILATED.search(op.attributes)
  if dilated:  # of an input that is spread out most products are with zeros
    count //= math.prod(map(int, dilated[1].split("x")))
  return count


def _dims(shape):
  """The sizes of ``bf16[8,128]{1,0}``."""
  return [int(n) for n in re.findall(r"\d+", hlo.arrays(shape)[0].split("[")[1])]
