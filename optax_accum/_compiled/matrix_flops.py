"""The work of a compiled program in matrix products and convolutions."""

import math
import re

from optax_accum._compiled import hlo

_KERNEL = re.compile(
  r'custom_call_target="__(?:(?:cublas|onednn)\$[\w$]*(?:gemm|matmul)|(?:cudnn|onednn)\$conv)'
)
_CONTRACTED = re.compile(r"lhs_contracting_dim\w*\W+([\d,\" ]*)")
_CONVOLVED = re.compile(r"dim_labels=\w+_(\w+)->")
_DILATED = re.compile(r"\blhs_dilate=([\dx]+)")


def matrix_flops(text: str) -> int:
  """Floating-point operations of one call of a program, on one device, from its HLO text.

  Two for each multiplication and addition of matrix products and convolutions, times the trip
  counts of the loops around them. A loop of unknown count counts once, and padding as data. What is
  elementwise, and kernels that are no matrix products to XLA, such as Pallas, are left out.
  """
  runs = hlo.Module(text).runs(_is_matrix_work)
  return sum(2 * run.place.executions * _multiplications(run) for run in runs)


def _is_matrix_work(op: hlo.Operation) -> bool:
  if op.opcode == "custom-call":
    return _KERNEL.search(op.attributes) is not None
  return op.opcode in ("dot", "convolution")


def _multiplications(run: hlo.Run) -> int:
  op = run.operation
  operations = run.computation.operations
  shapes = [operations[name].shape for name in op.operands[:2]]
  # After a result there may be scratch.
  lhs, rhs, out = (
    hlo.dims(hlo.arrays(shape)[0]) for shape in (*shapes, op.shape)
  )
  convolved = _CONVOLVED.search(op.attributes)
  if not convolved:
    contracted = _CONTRACTED.search(op.attributes)
    if contracted:
      out += [lhs[int(i)] for i in re.findall(r"\d+", contracted[1])]
    return math.prod(out)
  # cuDNN's derivatives are written in the words of the convolution that they belong to.
  kernel = rhs
  if "$convBackwardInput" in op.attributes:
    out = lhs
  if "$convBackwardFilter" in op.attributes:
    kernel, out = out, rhs
  count = math.prod(out + kernel) // kernel[convolved[1].index("o")]
  dilated = _DILATED.search(op.attributes)
  if dilated:  # of an input that is spread out most products are with zeros
    count //= math.prod(map(int, dilated[1].split("x")))
  return count
