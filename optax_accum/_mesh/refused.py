"""What JAX refuses in a function over a mesh, and what to write instead."""

from collections.abc import Iterator, Mapping
import contextlib
import re

from optax_accum._mesh.data_parallel import DataParallel

_SHARDING = (
  "The function constrains an array over data_axis={}, but it runs on one device's own rows, which"
  " nothing can shard: leave the constraint out. Name further axes alone, in a bare PartitionSpec,"
  " as jax.lax.with_sharding_constraint(x, P(None, 'model')) or, over explicit axes,"
  " jax.reshard(x, P(None, 'model'))."
)
# By what JAX says, in some version: while the loss is traced, and later.
TRACED = {
  "ontext mesh .*Manual.* should match|Closing over inputs": "The function closes over an array or"
  " a sharding that is on the mesh, and runs apart on each part of data_axis={}: pass an array as a"
  " further argument, step(params, opt_state, batch, table),"
  " and write a sharding as a bare PartitionSpec.",
  "Auto axes of the mesh|Auto or Manual": _SHARDING,
  r"unbound axis name:? (\w*)": "The function calls a collective over {1!r}, which is not in"
  " data_axis={0}: name that for the devices that share the rows. Over a further axis of the mesh"
  " leave it out, because there arrays are whole, and jnp.sum adds up all.",
}
LOWERED = {
  r"Manual: \(|callbacks are only": "A callback in the function, as jax.pure_callback (or, beside"
  " explicit axes, jax.debug.print), needs all axes of the mesh in data_axis={}: name them there,"
  " or return what it is to see as aux.",
  "contains a manual axes": _SHARDING,
}


@contextlib.contextmanager
def explained(
  fixes: Mapping[str, str], parallel: DataParallel | None
) -> Iterator[None]:
  """Says what to write instead, where JAX refuses something because the loss is over a mesh."""
  try:
    yield
  except (NameError, NotImplementedError, ValueError) as error:
    for said, fix in fixes.items():
      found = re.search(said, str(error))
      if parallel is not None and found:
        raise ValueError(fix.format(parallel.axes, *found.groups())) from error
    raise
