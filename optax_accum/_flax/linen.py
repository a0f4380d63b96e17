"""`linen_train_step`: a flax `TrainState` in, a `TrainState` and metrics out."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, TypeAlias, TypeVar, Unpack

from flax.core import FrozenDict, unfreeze
from flax.training import dynamic_scale, train_state
import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import dtypes
from optax_accum._arithmetic.trees import Batch
from optax_accum._flax import boxes, flax_step
from optax_accum._flax.flax_step import (
  Arguments,
  Further,
  Held,
  LossFn,
  Metrics,
  StepOptions,
)
from optax_accum._train_step.cycle import Cycle, method
from optax_accum._train_step.program import PreparedCall

State = TypeVar("State", bound=train_state.TrainState)
Rngs: TypeAlias = Mapping[str, jax.Array] | None

# The fields of flax's own.
_OWN = {field.name for field in dataclasses.fields(train_state.TrainState)}


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
      state, such as ``["batch_stats"]``.
    has_aux: Whether `loss_fn` returns aux too, which becomes ``metrics["aux"]``.
    **options: Those of `make_train_step`, such as `num_microbatches`, `weight_fn` and `mesh`, but
      not the positions of arguments: the batch, the keys and what is carried are known. ``donate``
      (default) covers parameters, optimizer state, `mutable` and ``step``. `carry_reduction`: see
      below.

  Returns:
    A `LinenTrainStep`, ``step(state, batch, rngs=None, ...) -> (state, metrics)``.

    Further arguments of the call, by position or by name, are those of `loss_fn`, and are not
    split: a teacher, the total of the batch's tokens. One with a random key is refused.

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
      `TrainState`, holds a `DynamicScale`, or has a class with an `apply_gradients` of its own,
      which the step would not call; or if collections are missing in what the loss returns.

  The loss:
    Batch normalization uses the statistics of one microbatch, so the step is not that of the whole
    batch. The guide "Flax linen" measures this, and has dropout and adapters (LoRA).

  Over a mesh:
    Floats in `mutable` are averaged by weight, there and where cycles are merged. A count needs a
    word: `carry_reduction` is a tree of words by collection; those that are not named keep the
    default, as does None. (A bare word is for every leaf, the statistics of batch norm too.) ::

      linen_train_step(
        loss_fn, mutable=["batch_stats", "counts"], num_microbatches=8, mesh=mesh,
        carry_reduction={"counts": "sum"},
      )

    or ``{"counts": {"right": "sum", "mean_length": None}}`` for single variables.

    Boxes of `nn.with_partitioning` and `nn.with_logical_partitioning`, and their shardings, stay.
    `nn.with_logical_constraint` is for automatic axes. Set `nn.logical_axis_rules` around the step.
  """
  return LinenTrainStep(loss_fn, mutable, has_aux, options)


class LinenTrainStep(flax_step.FlaxStep):
  """What `linen_train_step` returns: ``step(state, batch, rngs=None, ...) -> (state, metrics)``."""

  name = "linen_train_step"
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
    "unsplit": flax_step.UNSPLIT,
    "random": "Draw from rngs, which the step folds for each microbatch, and call it with keys:"
    ' step(state, batch, rngs={"dropout": key}).',
  }

  def __init__(
    self,
    loss_fn: LossFn,
    mutable: Sequence[str],
    has_aux: bool,
    options: StepOptions,
  ):
    if isinstance(mutable, str):
      mutable = (mutable,)
    self._mutable = tuple(mutable)
    super().__init__(loss_fn, has_aux, options, mutable=self._mutable or None)

  def __call__(
    self, state: State, batch: Batch, rngs: Rngs = None, *args, **kwargs
  ) -> tuple[State, Metrics]:
    """Takes one optimizer step on a batch: the new state, and the metrics."""
    return self._prepare(state, batch, rngs, *args, **kwargs).run()

  def _parts(self, state, batch, rngs: Rngs = None, *args, **kwargs):
    return self._hold(state), batch, rngs, Further(args, kwargs)

  def begin(self, state: State) -> Cycle:
    """Begins a cycle whose microbatches arrive in several calls, as `TrainStep.begin`."""
    return self._begin(self._hold(state))

  @method
  def add(
    self, cycle: Cycle, state, batch, rngs: Rngs = None, *args, **kwargs
  ) -> PreparedCall:
    """``add(cycle, state, batch, rngs=None, ...)`` adds microbatches, as `TrainStep.add`.

    What ``mutable`` names is in the cycle.
    """
    further = Further(args, kwargs)
    return self._add(cycle, self._hold(state), batch, rngs, further)

  @method
  def finish(self, state, cycle: Cycle) -> PreparedCall:
    """``finish(state, cycle)`` returns ``(state, metrics)``, as `TrainStep.finish`."""
    return self._finish(self._hold(state), cycle)

  def _hold(self, state) -> Held:
    if not isinstance(state, train_state.TrainState):
      raise TypeError(
        f"state is a {type(state).__name__}; linen_train_step takes a flax TrainState. For"
        " parameters and an optimizer state use make_train_step."
      )
    flax_step.check_calls(self.name, state, "apply_gradients")
    _validate.transformation(state.tx, "state.tx")
    fields = {name: getattr(state, name) for name in self._mutable}
    # The loss takes and returns what changes without boxes, in dicts; the state keeps its own.
    carried = unfreeze(boxes.without_boxes(fields))
    structure: Any = jax.tree.structure(fields)
    constant = {}
    kept = []
    for field in dataclasses.fields(state):
      is_own = field.name in _OWN or field.name in self._mutable
      if is_own or not field.metadata.get("pytree_node", True):
        continue
      x = getattr(state, field.name)
      if isinstance(x, dynamic_scale.DynamicScale):
        raise ValueError(
          f"state.{field.name} is a DynamicScale, which linen_train_step does not use: take the"
          " step by hand, with scale.value_and_grad(optax_accum.microbatch(loss_fn, ...)), as the"
          " guide Half precision does."
        )
      # Keys are not constant: all microbatches would have the same noise.
      has_keys = any(map(dtypes.is_key, jax.tree.leaves(x)))
      if isinstance(x, (dict, FrozenDict)) and not has_keys:
        constant[field.name] = x
      else:
        kept.append(x)

    def put(new: Arguments, metrics: Metrics):
      changed = structure.unflatten(jax.tree.leaves(new.carried))
      fields = {**new.constant, **changed}
      replaced = state.replace(
        step=new.count, params=new.params, opt_state=new.opt_state, **fields
      )
      return replaced, metrics

    arguments = Arguments(
      params=state.params,
      opt_state=state.opt_state,
      constant=constant,
      carried=carried,
      count=_strong(state.step),
    )
    program = self._program(structure, state.tx, tuple(carried))
    return Held(program, arguments, kept, put)

  def _loss(self, structure, params, batch, constant, carried, rngs, further):
    """The user's loss, as one that `make_train_step` takes."""
    changing = structure.unflatten(jax.tree.leaves(carried))
    given = {"params": params, **constant, **changing}, further
    with boxes.constraining_automatic_axes(given) as (variables, further):
      out = self._loss_fn(
        variables, batch, rngs, *further.args, **further.kwargs
      )
    loss, updates, aux = self._taken_apart(out, bool(self._mutable))
    return loss, (unfreeze(boxes.without_boxes(updates)), aux)


def _strong(step):
  """The step count as an array that is not weakly typed. An int would compile the program twice."""
  if isinstance(step, jax.ShapeDtypeStruct):
    return step
  return jnp.asarray(step, getattr(step, "dtype", jnp.int32))
