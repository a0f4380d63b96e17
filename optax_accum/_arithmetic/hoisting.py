"""All-reduces that XLA must leave in a loop, because it moves them out and leaves a part behind.

Where rows are sharded over automatic axes, each device adds its part of an embedding's gradient to
``where(device == 0, accumulator, 0)``, and the parts are summed over the devices. XLA for TPU and
GPU, as of JAX 0.10.1 to 0.11, moves that sum behind the loop and leaves the `where` in it: in each
microbatch every device but the first forgets its sum (XLA issue 49143). That move stops at a
barrier, so an accumulator that a loop may scatter to goes through one.
"""

import functools
import math
from typing import TypeAlias

import jax
from jax import lax
from jax.interpreters import ad, batching, mlir

from optax_accum import _versions
from optax_accum._arithmetic import dtypes

Shapes: TypeAlias = set[tuple[int, ...]]


def shapes_in(jaxpr) -> Shapes:
  """The shapes that a function gathers from or scatters to; none where XLA is right."""
  shapes: Shapes = set()
  if not _versions.HOISTS_ALL_REDUCES:
    return shapes
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == "gather" or name.startswith("scatter"):
      # The first operand is the array that is gathered from or scattered to.
      shapes.add(_squeezed(eqn.invars[0].aval.shape))
    if name.startswith("custom_vjp_call"):  # whose backward pass may scatter
      shapes.update(_squeezed(x.aval.shape) for x in eqn.invars)
    for inner in _versions.inner_jaxprs(eqn):
      shapes |= shapes_in(inner)
  return shapes


def unhoisted(tree, shapes: Shapes):
  """`tree`, with arrays of these shapes behind a barrier, as their cotangents are."""

  def behind(x):
    # A key, which a carry may have, is no sum of gradients.
    if dtypes.is_key(x) or _squeezed(x.shape) not in shapes:
      return x
    return _barrier().bind(x)

  return jax.tree.map(behind, tree)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
  """A shape without its axes of length 1, by which a sum may differ from what is gathered from."""
  return tuple(n for n in shape if n != 1)


def _lower(ctx, x):
  """A barrier, where the partitioner has several devices to choose for."""
  context = ctx.module_context.axis_context
  # Outside of shard_map a context has the number of devices, and inside it has the mesh.
  devices = getattr(context, "num_devices", None)
  mesh = getattr(context, "mesh", None)
  if mesh is not None:  # shard_map, over some axes or all
    # The axes that are not manual are left to the partitioner.
    left = set(mesh.shape) - set(context.manual_axes)
    devices = math.prod(mesh.shape[name] for name in left)
  # Nothing is split over one device, so that there is no sum to move.
  if devices == 1:
    return [x]
  barrier = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
  return barrier(ctx, x)


@functools.cache
def _barrier():
  """A primitive, because platform and devices are known at its lowering, and not before."""
  from jax.extend.core import Primitive  # longer to import than this package

  barrier = Primitive("unhoisted")
  barrier.def_impl(lambda x: x)
  barrier.def_abstract_eval(lambda x: x)
  # On other platforms, such as CPU, it lowers to nothing.
  mlir.register_lowering(barrier, lambda ctx, x: [x])
  for platform in ("tpu", "cuda", "rocm"):
    mlir.register_lowering(barrier, _lower, platform=platform)
  # It is linear, and a cotangent goes through a barrier of its own.
  ad.deflinear2(barrier, lambda ct, x: [barrier.bind(ct)])
  # Under `jax.vmap` the batch axis stays where it is.
  batching.defvectorized(barrier)
  return barrier
