"""`linen_train_step`: a flax `TrainState` in, a `TrainState` and metrics out."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, Unpack

from flax.training import train_state
import jax

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.trees import Batch
from optax_accum._flax import boxes, flax_step, state_fields
from optax_accum._flax.flax_step import (
  Arguments,
  LossFn,
  Metrics,
  StepOptions,
)
from optax_accum._flax.state_fields import Collections
from optax_accum._train_step.cycle import Cycle, CycleProgram, method
from optax_accum._train_step.program import PreparedCall, StepProgram

State = TypeVar("State", bound=train_state.TrainState)
Rngs: TypeAlias = Mapping[str, jax.Array] | None

# What the loss returns, by whether there is something mutable, and has_aux.
_RETURNS = {
  (False, False): "loss",
  (True, False): "(loss, updates)",
  (False, True): "(loss, aux)",
  (True, True): "(loss, (updates, aux))",
}


def linen_train_step(
  loss_fn: LossFn,
  *,
  mutable: Sequence[str] = (),
  has_aux: bool = False,
  **options: Unpack[StepOptions],
) -> "LinenTrainStep":
  """Makes a jitted training step of a flax `TrainState` that runs its batch in microbatches.

  Examples:
    >>> import flax.linen as nn, jax.numpy as jnp, optax
    >>> from flax.training.train_state import TrainState
    >>> from optax_accum.flax import linen_train_step
    >>> model = nn.Dense(1, use_bias=False)
    >>> def loss_fn(variables, batch, rngs):
    ...   return jnp.mean((model.apply(variables, batch["x"]) - batch["y"]) ** 2)
    >>> params = {"kernel": jnp.array([[1.0], [-1.0]])}
    >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.01))
    >>> step = linen_train_step(loss_fn, num_microbatches=3)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones((6, 1))}
    >>> state, metrics = step(state, batch)
    >>> int(state.step), float(metrics["loss"])
    (1, 4.0)

  Args:
    loss_fn: ``loss_fn(variables, batch, rngs, ...)`` returns ``loss``; with `mutable` ``(loss,
      updates)``, ``updates`` from ``model.apply(..., mutable=...)``; with `has_aux` ``(loss,
      aux)``; with both ``(loss, (updates, aux))``. ``variables`` has ``"params"`` and every field
      of the state that is a dict or a `FrozenDict`; ``rngs`` is a dict or None. Further arguments
      are those of the call.
    mutable: The collections that each microbatch updates for the next, the carry: fields of the
      state, such as ``["batch_stats"]``. `carry_reduction` is a prefix tree over a dict of these.
    has_aux: Whether `loss_fn` returns aux too, which becomes ``metrics["aux"]``.
    **options: Those of `make_train_step`, such as `num_microbatches`, `weight_fn` and `mesh`, but
      not the positions of arguments: the batch, the keys and what is carried are known. ``donate``
      (default) covers parameters, optimizer state, `mutable` and ``step``. ``batch_argnums=1``
      allows a further argument with as many rows as the batch, by chance.

  Returns:
    A `LinenTrainStep`, ``step(state, batch, rngs=None, ...) -> (state, metrics)``.

    Further arguments of the call, by position or by name, are those of `loss_fn`, and are not
    split: a teacher, the total of the batch's tokens. One with as many rows as the batch, or with a
    typed key, is refused.

    In the new state parameters, optimizer state and `mutable` are updated, and ``state.step`` is
    greater by one if the optimizer took a step. ``metrics`` is the dict of a `TrainStep`: ``loss``,
    ``grad_norm``, ``total_weight``, ``skipped_microbatches``, ``stepped``, and what was asked for
    of ``aux`` and ``noise_scale``. Give new ``rngs`` in each call: each microbatch gets them with
    its index folded in. The step has ``check``, ``lower``, ``trace`` and ``eval_shape`` too, which
    are called as the step is. Microbatches that arrive in several calls: ``step.begin(state)``,
    ``step.add(cycle, state, batch)``, ``step.merge(cycle, other)`` and ``step.finish(state,
    cycle)``.

  Raises:
    TypeError, ValueError, RuntimeError: As `make_train_step`; also if the state is not a flax
      `TrainState`, or its class has an `apply_gradients` of its own, which the step would not call;
      or if collections are missing in the state or in what the loss returns.

  The loss:
    Batch normalization uses the statistics of one microbatch, so the step is not that of the whole
    batch. The guide "Flax linen" measures this, and has dropout and adapters (LoRA).

  Over a mesh:
    Boxes of `nn.with_partitioning` and `nn.with_logical_partitioning`, and their shardings, stay.
    `nn.with_logical_constraint` is for automatic axes. Set `nn.logical_axis_rules` around the step.
  """
  return LinenTrainStep(loss_fn, mutable, has_aux, options)


class LinenTrainStep(flax_step.FlaxStep):
  """What `linen_train_step` returns: ``step(state, batch, rngs=None, ...) -> (state, metrics)``."""

  name = "linen_train_step"
  takes = "variables, batch, rngs"
  batch_position = 1
  names = Arguments(
    params="state.params",
    opt_state="state.opt_state",
    batch="batch",
    constant="state.",
    carried="state.",
    rngs="rngs",
    further="",
    count="state.step",
  )
  fixes: ClassVar[dict[str, str]] = {
    "coupled": "Batch normalization: use group or layer norm, or accept that each microbatch is"
    " normalized by its own rows (its statistics go into mutable). See the guide Flax linen.",
    "unsplit": flax_step.UNSPLIT,
    "random": "Draw from rngs, which the step folds for each microbatch, and call it with keys:"
    ' step(state, batch, rngs={"dropout": key}).',
  }
  decided: ClassVar[dict[str, str]] = {
    "tx": "It is the state's.",
    "optimizer": "It is the state's.",
    "rng_argnums": "Pass keys to the step, as rngs.",
    "rngs": "Pass keys to the step, as rngs.",
    "wrt": "All of state.params is. Freeze some by optax.partition.",
    "argnums": "All of state.params is. Freeze some by optax.partition.",
    "carry_argnum": "Name collections in mutable.",
    "mutable": "It goes into linen_train_step.",
  }

  call = "step(state, batch, rngs)"
  keys = 'rngs, which is {"dropout": key} or None'

  def __init__(
    self,
    loss_fn: LossFn,
    mutable: Sequence[str],
    has_aux: bool,
    options: StepOptions,
  ):
    self._mutable = state_fields.check_mutable(mutable)
    if not self._mutable and options.get("carry_reduction") is not None:
      raise ValueError(
        "carry_reduction combines what mutable names, and that is empty."
      )
    super().__init__(loss_fn, has_aux, options, mutable=self._mutable or None)
    self.loss = self._step_loss(self._loss)
    self._programs: dict[object, StepProgram] = {}

  def __call__(
    self, state: State, batch: Batch, rngs: Rngs = None, *args, **kwargs
  ) -> tuple[State, Metrics]:
    """Takes one optimizer step on a batch: the new state, and the metrics."""
    return _replaced(
      *self._with_call(flax_step.run, state, batch, rngs, *args, **kwargs)
    )

  def begin(self, state: State) -> Cycle:
    """Begins a cycle whose microbatches arrive in several calls, as `TrainStep.begin`."""
    carried, _, _ = self._fields_of(state)
    return self._cycle(state).begin(state.params, (carried,))

  @method
  def add(
    self, cycle: Cycle, state, batch, rngs: Rngs = None, *args, **kwargs
  ) -> PreparedCall:
    """``add(cycle, state, batch, rngs=None, ...)`` adds microbatches, as `TrainStep.add`.

    What ``mutable`` names is in the cycle.
    """
    _, constant, _ = self._fields_of(state)
    call = "step.add(cycle, state, batch, rngs)"
    further = self._further(call, args, kwargs)
    of_loss = batch, constant, rngs, further
    return self._cycle(state).add(cycle, state.params, of_loss, {})

  @method
  def finish(self, state, cycle: Cycle):
    """``finish(state, cycle)`` returns ``(state, metrics)``, as `TrainStep.finish`."""
    _, *kept = self._fields_of(state)

    def finished(results):
      params, opt_state, carried, count, metrics = results
      new = Arguments(
        params, opt_state, constant={}, carried=carried, count=count
      )
      return _replaced(state, (new, metrics))

    count = state_fields.counted(state.step)
    return self._cycle(state).finish(
      state.params, state.opt_state, cycle, count, returned=finished, kept=kept
    )

  def _cycle(self, state) -> CycleProgram:
    return self._cycle_of(self._program_of(state))

  def eval_shape(self, *args, **kwargs) -> tuple[Any, Metrics]:
    """As ``eval_shape`` of a jitted function: shapes and dtypes of what a call returns."""

    def shapes(call):
      return flax_step.after(call, call.eval_shape())

    return _replaced(*self._with_call(shapes, *args, **kwargs))

  def _on_program(self, use, /, state, batch, rngs=None, *args, **kwargs):
    """The state of a call, and what `use` makes of the program for such a state."""
    carried, constant, others = self._fields_of(state)
    count = state_fields.counted(state.step)
    given = Arguments(
      state.params,
      state.opt_state,
      batch,
      constant,
      carried,
      rngs,
      self._further(self.call, args, kwargs),
      count,
    )
    return state, use(self._program_of(state), given, others)

  def _fields_of(self, state):
    """What a state has beside parameters, optimizer state and count: see `state_fields`."""
    if not isinstance(state, train_state.TrainState):
      raise TypeError(
        f"state is a {type(state).__name__}; linen_train_step takes a flax TrainState. For"
        " parameters and an optimizer state use make_train_step."
      )
    flax_step.check_calls(self.name, state, "apply_gradients")
    return state_fields.fields_of(state, self._mutable)

  def _program_of(self, state: train_state.TrainState) -> StepProgram:
    """The program for states of this optimizer."""
    if state.tx not in self._programs:
      _validate.transformation(state.tx, "state.tx")
      state_fields.refuse_fp8(state.params)
      self._programs[state.tx] = self._program(self.loss, state.tx)
    return self._programs[state.tx]

  def _loss(
    self,
    params,
    batch,
    constant,
    carried,
    rngs: Rngs,
    further,
  ):
    """The user's loss, as one that `make_train_step` takes."""
    # Keys are not constant: all microbatches would have the same noise.
    fixed = {
      name: x
      for name, x in constant.items()
      if not any(map(dtypes.is_key, jax.tree.leaves(x)))
    }
    given = {"params": params, **fixed, **carried}
    both = given, further
    with boxes.constraining_automatic_axes(both) as (variables, further):
      out = self._loss_fn(
        variables, batch, rngs, *further.args, **further.kwargs
      )
    asked = bool(self._mutable), bool(self.has_aux)
    updates: Collections = {}
    aux = None
    may_be_pair = self._options.get("has_weight")
    match (*asked, out):
      case True, True, [loss, [updates, aux]]:
        pass
      case True, False, [loss, updates]:
        pass
      case False, True, [loss, aux]:
        pass
      case False, False, loss if may_be_pair or not isinstance(
        loss, (tuple, list)
      ):
        pass
      case _:
        returned = f"a {type(out).__name__}"
        if isinstance(out, jax.Array):
          returned = "an array"
        raise TypeError(
          f"The loss returned {returned}; with mutable={self._mutable!r} and"
          f" has_aux={self.has_aux} it must return {_RETURNS[asked]}. Name updates of collections,"
          " as model.apply(..., mutable=...) gives them, in mutable; and for what else is returned"
          " pass has_aux=True, or has_weight=True if that is (total, weight) in the place of loss."
        )
    return loss, (state_fields.as_held(updates, carried), aux)


def _replaced(
  state: State, made: tuple[Arguments, Metrics]
) -> tuple[State, Metrics]:
  """The state after a step, and the metrics."""
  new, metrics = made
  state = state.replace(
    step=new.count,
    params=new.params,
    opt_state=new.opt_state,
    **new.constant,  # where the step put it
    **new.carried,
  )
  return state, metrics
