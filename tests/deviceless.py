"""Programs for TPUs, compiled without one: what the compiler makes of a step on many chips."""

import math
import os

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

_TOPOLOGIES = {8: "v5e:2x4", 64: "v5e:8x8"}


def tpu_mesh(shape, axis_names, axis_types=None):
  """A mesh of 8 or 64 TPU v5e chips that nobody has; `jax.jit(...).lower(...).compile()` works."""
  # Read when the compiler is loaded, which the first call does. It would ask the network which
  # TPU this is, and no two processes at once may load it (pytest-xdist has several).
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )
  topology = topologies.get_topology_desc(_TOPOLOGIES[math.prod(shape)], platform="tpu")
  mesh = topologies.make_mesh(topology, shape, axis_names)
  return Mesh(mesh.devices, axis_names, axis_types=axis_types)


def abstract(tree, mesh, spec):
  """Arrays to lower with: the shapes and dtypes of `tree`, sharded as `spec` over `mesh`."""
  sharding = NamedSharding(mesh, spec)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
