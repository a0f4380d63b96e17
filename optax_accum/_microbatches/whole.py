"""Whether functions in microbatches run whole: what `check_split` compares with."""

from collections.abc import Iterator
import contextlib
import contextvars

from jax.experimental.xla_metadata import set_xla_metadata

_splits_nothing = contextvars.ContextVar("splits_nothing", default=False)


def splits_nothing() -> bool:
  """Whether what calls `microbatch` is traced as if that did not split."""
  return _splits_nothing.get()


@contextlib.contextmanager
def whole_batches() -> Iterator[None]:
  """Traces what calls `microbatch` as if it did not split."""
  token = _splits_nothing.set(True)
  try:
    # Part of the key of JAX's caches: a jitted function that calls `microbatch` is traced again.
    with set_xla_metadata(microbatch="whole"):
      yield
  finally:
    _splits_nothing.reset(token)
