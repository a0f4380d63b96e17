"""`AccumulateTransformation`, the type of what `accumulate` returns: an optax transformation."""

from typing import Any, Protocol, TYPE_CHECKING, TypeVar

import jax
from jax.typing import ArrayLike
import optax

from optax_accum._streaming.mini_step import MiniSteps
from optax_accum._streaming.state import AccumulateState

Params = TypeVar("Params", bound=Any)


class ApplyFn(Protocol):
  """The type of `AccumulateTransformation.apply`."""

  def __call__(
    self,
    updates: Any,
    state: AccumulateState,
    params: Params,
    *,
    weight: ArrayLike = 1.0,
    flush: bool | jax.Array = False,
    **extra_args: Any,
  ) -> tuple[Params, AccumulateState]:
    """Adds gradients up, and steps the parameters when the cycle ends; see `accumulate`."""


_ABSENT = {
  "apply": "the `update` of this transformation was replaced, so use optax.apply_updates",
  "has_updated": "write optax_accum.has_updated(opt_state), a function of the state",
  "gradient_transformation": "pass it as it is",
}


class AccumulateTransformation(optax.GradientTransformationExtraArgs):
  """An `optax.GradientTransformationExtraArgs`, the pair ``(init, update)``, with `apply`.

  Attributes:
    init: ``init(params) -> AccumulateState``.
    update: ``update(updates, state, params, *, weight=1.0, flush=False, **extra_args)``, which
      returns ``(updates, state)``: zeros, until a cycle ends.
  """

  @property
  def apply(self) -> ApplyFn:
    """``apply(updates, state, params, **kwargs) -> (params, state)``, see `accumulate`."""
    # It belongs to `update`, and is looked up there. So a copy of this transformation has it too,
    # and one whose `update` was replaced does not offer an `apply` that ignores that.
    owner = getattr(self.update, "__self__", None)
    apply: ApplyFn | None = getattr(owner, "apply", None)
    if not isinstance(owner, MiniSteps) or apply is None:
      raise AttributeError  # Python then asks __getattr__
    return apply

  if not TYPE_CHECKING:  # to which every name would be one that there is

    def __getattr__(self, name: str) -> Any:
      """Says what to write for a name of `optax.MultiSteps`, or of before `update` changed."""
      reason = _ABSENT.get(name)
      kind = type(self).__name__
      raise AttributeError(f"This {kind} has no {name!r}{': ' * bool(reason)}{reason or ''}.")
