"""A `TrainState` for a loop that has one microbatch at a time."""

from typing import Any, Self

from flax.training import train_state
import jax
import optax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Grads, Params
from optax_accum._streaming.accumulation import AccumulateTransformation
from optax_accum._streaming.state import states_in


class TrainState(train_state.TrainState):
  """Flax's `TrainState` for a loop that has one microbatch at a time.

  ``tx`` is an `accumulate`, or holds one. If it is one, a donated state is updated in place::

    state = TrainState.create(apply_fn=model.apply, params=params, tx=accumulate(tx, 8))

    @functools.partial(jax.jit, donate_argnums=0)
    def mini_step(state, batch):
      grads = jax.grad(loss_fn)(state.params, batch)
      return state.apply_gradients(grads=grads, weight=batch["mask"].sum())

  ``state.step`` counts calls, as in flax, and ``state.gradient_step`` optimizer steps. To keep no
  gradients of frozen parameters: ``optax.partition({"train": accumulate(tx, 8), ...}, labels)``.
  """

  @classmethod
  def create(
    cls, *, apply_fn: Any, params: Params, tx: object, **kwargs: Any
  ) -> Self:
    """As flax's: a state with the optimizer state that ``tx.init`` makes. Checks ``tx``."""
    _validate.refuse_fp8("params", params)
    _validate.transformation(tx, "tx")
    return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)

  @property
  def gradient_step(self) -> jax.Array:
    """The optimizer steps so far, of the first `accumulate` in the state; an int32 scalar."""
    return states_in(self.opt_state)[0].gradient_step

  def apply_gradients(
    self, *, grads: Grads, weight: Any = 1.0, flush: Any = False, **kwargs: Any
  ) -> Self:
    """Adds gradients up, steps at the end of a cycle, and returns the state with ``step + 1``.

    Args:
      grads: Those of one microbatch, a tree like `params`.
      weight, flush: As in `accumulate`. They raise a ValueError if ``tx`` holds no `accumulate`.
      **kwargs: Further fields to replace.
    """
    plain = isinstance(weight, (int, float)) and weight == 1 and flush is False
    accumulates = isinstance(self.tx, AccumulateTransformation)
    if not plain and not accumulates and not states_in(self.opt_state):
      raise ValueError(
        f"tx is not an accumulate and holds none, so it would ignore weight={weight!r} and"
        f" flush={flush!r}: wrap it, accumulate(tx, every_k), or leave them out."
      )
    params = self.params
    given = {"weight": weight, "flush": flush}
    if accumulates:
      params, state = self.tx.apply(grads, self.opt_state, params, **given)
    else:
      tx = optax.with_extra_args_support(self.tx)
      updates, state = tx.update(grads, self.opt_state, params, **given)
      params = optax.apply_updates(params, updates)
    return self.replace(
      step=self.step + 1, params=params, opt_state=state, **kwargs
    )
