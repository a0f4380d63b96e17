"""Whether functions in microbatches run whole: what `check_split` compares with."""

from collections.abc import Iterator
import contextlib
import contextvars

from jax.experimental.xla_metadata import set_xla_metadata

_is_whole = contextvars.ContextVar("is_whole", default=False)


def is_whole() -> bool:
  """Whether what calls `microbatch` is traced as if that did not split."""
  return _is_whole.get()


@contextlib.contextmanager
def whole_batches() -> Iterator[None]:
  """Traces what calls `microbatch` as if it did not split."""
  token = _is_whole.set(True)
  try:
    # Part of the key of JAX's caches: a jitted function that calls `microbatch` is traced again.
    with set_xla_metadata(microbatch="whole"):
      yield
  finally:
    _is_whole.reset(token)
