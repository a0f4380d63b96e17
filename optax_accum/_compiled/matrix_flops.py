"""The work of a compiled program in matrix products and convolutions."""

from collections.abc import Sequence
import math
import re

from optax_accum._compiled import hlo

_GEMM = re.compile(
  r'custom_call_target="__(?:cublas|onednn)\$[\w$]*(?:gemm|matmul)'
)
_CONVOLUTION = re.compile(
  r'custom_call_target="__(?:cudnn|onednn)\$conv(Backward[IF])?'
)
# cuDNN's derivatives are written in the words of the convolution that they belong to.
_ORDERS = {
  "BackwardI": (2, 1, 0),
  "BackwardF": (0, 2, 1),
}  # of Input and Filter: lhs, rhs, out


def matrix_flops(text: str) -> int:
  """Floating-point operations of one call of a program, on one device, from its HLO text.

  Two for each multiplication and addition of matrix products and convolutions, times the trip
  counts of the loops around them. A loop of unknown count counts once, and padding as data. What is
  elementwise, and kernels that are no matrix products to XLA, such as Pallas, are left out.
  """
  runs = hlo.Module(text).runs(_is_matrix_work)
  return sum(2 * run.executions * _multiplications(run) for run in runs)


def _is_matrix_work(op: hlo.Operation) -> bool:
  if op.opcode == "custom-call":
    return bool(
      _GEMM.search(op.attributes) or _CONVOLUTION.search(op.attributes)
    )
  return op.opcode in ("dot", "convolution")


def _multiplications(run: hlo.Run) -> int:
  op = run.operation
  operands = [
    _dims(run.computation.operations[name].shape) for name in op.operands[:2]
  ]
  shapes = (
    *operands,
    _dims(hlo.arrays(op.shape)[0]),
  )  # after a result there may be scratch
  if "dim_labels=" in op.attributes:
    return _of_convolution(shapes, op.attributes)
  contracted = re.search(r"lhs_contracting_dim\w*\W+([\d,\" ]*)", op.attributes)
  dims = re.findall(r"\d+", contracted[1]) if contracted else []
  return math.prod([*shapes[2], *(operands[0][int(d)] for d in dims)])


def _of_convolution(shapes: Sequence[Sequence[int]], attributes: str) -> int:
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
  assert labels is not None
  kind = _CONVOLUTION.search(attributes)
  order = _ORDERS.get(kind[1] if kind else "", (0, 1, 2))
  sizes = [
    dict(zip(labels[i + 1], shapes[order[i]], strict=True)) for i in range(3)
  ]
  groups = re.search(r"batch_group_count=(\d+)", attributes)
  count = (
    sizes[0]["b"]
    * sizes[1]["i"]
    * sizes[1]["o"]
    // int(groups[1] if groups else 1)
  )
  written = attributes.partition("window={")[2].partition("}")[0]
  window = dict(re.findall(r"(\w+)=([\dx_\-]+)", written))
  dilated = [int(n) for n in window.get("lhs_dilate", "1").split("x")]
  for i in range(len(shapes[0]) - 2):
    count *= sizes[1][str(i)] * sizes[2][str(i)]
  return count // math.prod(
    dilated
  )  # of an input spread out, most products are with zeros


def _dims(shape: str) -> list[int]:
  return [
    int(n)
    for n in re.findall(r"\d+", shape[shape.index("[") : shape.index("]")])
  ]
