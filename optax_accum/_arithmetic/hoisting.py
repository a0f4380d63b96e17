"""All-reduces that XLA must leave in a loop (XLA issue 49143).

Where rows are sharded over automatic axes, each device adds its part of an embedding's gradient to
``where(device == 0, accumulator, 0)``. XLA for TPU and GPU, as of JAX 0.10.1 to 0.11, moves the sum
over devices behind the loop and leaves the `where` in it: in each microbatch every device but the
first forgets its sum. Accumulators that a loop may scatter to go through a barrier, which stops it.
"""

import math
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_accum import _versions
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.trees import Tree

Shapes: TypeAlias = set[tuple[int, ...]]


def shapes_in(jaxpr: Any) -> Shapes:
  """The shapes that a function gathers from or scatters to; none where XLA is right."""
  if not _versions.HOISTS_ALL_REDUCES:
    return set()
  shapes: Shapes = set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "gather" or eqn.primitive.name.startswith("scatter"):
      shapes.add(_squeezed(eqn.invars[0].aval.shape))
    if eqn.primitive.name.startswith("custom_vjp_call"):  # whose backward pass may scatter
      shapes.update(_squeezed(x.aval.shape) for x in eqn.invars)
    shapes = shapes.union(*map(shapes_in, _versions.inner_jaxprs(eqn)))
  return shapes


def unhoisted(tree: Tree, shapes: Shapes) -> Tree:
  """`tree`, with arrays of these shapes behind a barrier, as their cotangents are."""
  meant = lambda x: not dtypes.is_key(x) and _squeezed(x.shape) in shapes  # noqa: E731
  return jax.tree.map(lambda x: _barrier.bind(x) if meant(x) else x, tree)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(n for n in shape if n != 1)


def _lower(ctx: Any, x: Any) -> Any:
  """A barrier, where the partitioner has several devices to choose for."""
  context = ctx.module_context.axis_context
  if mesh := getattr(context, "mesh", None):  # shard_map, over some axes or all
    devices = math.prod(n for name, n in mesh.shape.items() if name not in context.manual_axes)
  else:
    devices = getattr(context, "num_devices", None)
  return [x] if devices == 1 else mlir.lower_fun(lax.optimization_barrier, False)(ctx, x)


# A primitive of our own: at its lowering, and not before, it is known for what is compiled.
_barrier = Primitive("unhoisted")
_barrier.def_impl(lambda x: x)
_barrier.def_abstract_eval(lambda x: x)
mlir.register_lowering(_barrier, lambda ctx, x: [x])
for _platform in ("tpu", "cuda", "rocm"):
  mlir.register_lowering(_barrier, _lower, platform=_platform)
ad.deflinear2(_barrier, lambda ct, x: [_barrier.bind(ct)])
batching.primitive_batchers[_barrier] = lambda args, dims: (_barrier.bind(*args), dims[0])
