"""`microbatch` told to run on its whole batch at once: what `check_split` compares with."""

from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses

from jax.experimental.xla_metadata import set_xla_metadata

from optax_accum._microbatches.options import Split

_is_whole = contextvars.ContextVar("is_whole", default=False)


@contextlib.contextmanager
def whole_batches() -> Iterator[None]:
  """Traces what calls `microbatch` as if it did not split."""
  token = _is_whole.set(True)
  try:
    # Part of the key of JAX's caches: a jitted function that calls `microbatch` is traced anew.
    with set_xla_metadata(microbatch="whole"):
      yield
  finally:
    _is_whole.reset(token)


def if_asked(split: Split) -> Split:
  """The split that a call of `microbatch` is to run with."""
  if not _is_whole.get():
    return split
  return dataclasses.replace(split, num_microbatches=1, microbatch_size=None)
