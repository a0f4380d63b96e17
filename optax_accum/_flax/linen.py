"""`linen_train_step`: a flax `TrainState` in, a `TrainState` and metrics out."""

from collections.abc import Callable, Mapping, Sequence
import inspect
from typing import Any, TypeVar

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate
from optax_accum._accumulate_state import has_updated, states_in
from optax_accum._train_step import make_train_step, TrainStep

State = TypeVar("State", bound=train_state.TrainState)
Rngs = Mapping[str, jax.Array]

# What `linen_train_step` passes to the loss, and so decides itself.
_DECIDED = {
  "batch_argnums": "the batch is the second argument",
  "batch_argnames": "the batch is the second argument",
  "rng_argnums": "pass keys as rngs",
  "rng_argnames": "pass keys as rngs",
  "carry_argnum": "name collections in mutable",
}


def linen_train_step(
  loss_fn: Callable[..., Any],
  *,
  mutable: Sequence[str] = (),
  has_aux: bool = False,
  **options: Any,
) -> "LinenTrainStep":
  """A jitted training step of a flax `TrainState`, on a batch that is run in microbatches.

  ``step(state, batch, rngs=None) -> (state, metrics)`` is one step of ``state.tx`` by the gradient
  of the whole batch, as of `make_train_step`, in one call::

    class TrainState(flax.training.train_state.TrainState):
      batch_stats: Any

    def loss_fn(variables, batch, rngs):
      logits, updates = model.apply(variables, batch["x"], mutable=["batch_stats"], rngs=rngs)
      return cross_entropy(logits, batch["y"]).mean(), updates

    step = linen_train_step(loss_fn, mutable=("batch_stats",), num_microbatches=8)
    state, metrics = step(state, batch, rngs={"dropout": jax.random.fold_in(key, i)})

  Batch statistics are those of microbatches, each of which updates the running ones: the gradients
  of a model with batch normalisation are not the whole batch's. With group or layer norm they are.

  Args:
    loss_fn: ``loss_fn(variables, batch, rngs)``, which returns ``loss``, or ``(loss, aux)`` with
      `has_aux`. With `mutable` it returns ``(loss, updates)``, or ``(loss, (updates, aux))``, where
      ``updates`` is what ``model.apply(..., mutable=...)`` gives. ``variables`` has ``"params"``
      and the `mutable` collections; ``rngs`` is None where the call has none.
    mutable: The collections that microbatches update, one after the other: fields of the state.
    has_aux: Whether `loss_fn` returns aux too. It comes as ``metrics["aux"]``.
    **options: Those of `make_train_step`, but for the roles of arguments.

  Returns:
    A `LinenTrainStep`. Its state is donated unless ``donate=False``. ``state.step`` counts
    optimizer steps: it stays where nothing in the batch counted, and in the mini steps of an
    `accumulate`.

  Raises:
    TypeError: An option is unknown, or decided here; a state is no flax `TrainState`.
    ValueError: The state lacks a collection; the loss returned others than `mutable` names.
  """
  names = inspect.signature(make_train_step).parameters
  for name in options:
    if name in _DECIDED:
      raise TypeError(f"linen_train_step takes no {name}: {_DECIDED[name]}.")
    if name not in names:
      raise TypeError(f"linen_train_step has no option {name!r}: see those of make_train_step.")
  if isinstance(mutable, str):
    mutable = (mutable,)
  return LinenTrainStep(loss_fn, tuple(mutable), has_aux, options)


class LinenTrainStep:
  """What `linen_train_step` returns: ``step(state, batch, rngs=None) -> (state, metrics)``."""

  def __init__(self, loss_fn: Any, mutable: tuple[str, ...], has_aux: bool, options: Any):
    self._loss_fn, self._mutable, self._has_aux = loss_fn, mutable, has_aux
    self._options = options
    self._steps: dict[Any, TrainStep[Any, ...]] = {}

  def __repr__(self) -> str:
    loss = getattr(self._loss_fn, "__name__", repr(self._loss_fn))
    named = [f"{name}={value!r}" for name, value in self._options.items()]
    return f"linen_train_step({', '.join([loss, *named])})"

  def __call__(
    self, state: State, batch: Any, rngs: Rngs | None = None
  ) -> tuple[State, dict[str, Any]]:
    """One optimizer step on a batch."""
    step, args = self._placed(state, batch, rngs)
    params, (opt_state, count), *carry, metrics = step(*args)
    if not self._has_aux:
      metrics.pop("aux", None)
    collections = carry[0] if carry else {}
    return state.replace(step=count, params=params, opt_state=opt_state, **collections), metrics

  def lower(self, state: State, batch: Any, rngs: Rngs | None = None) -> jax.stages.Lowered:
    """The program of a call, lowered, for its memory and collectives."""
    step, args = self._placed(state, batch, rngs)
    return step.lower(*args)

  def _placed(self, state: State, batch: Any, rngs: Rngs | None) -> tuple[Any, tuple[Any, ...]]:
    """The step for such a call, and its arguments."""
    if not isinstance(state, train_state.TrainState):
      raise TypeError(
        f"state is a {type(state).__name__}; linen_train_step takes a flax TrainState. For"
        " parameters and an optimizer state use make_train_step."
      )
    collections = {name: _collection(state, name) for name in self._mutable}
    key = state.tx, rngs is not None
    if key not in self._steps:
      self._steps[key] = self._make(state.tx, rngs is not None)
    # A Python int would have the step traced twice.
    count = jnp.asarray(state.step, jnp.int32) if isinstance(state.step, int) else state.step
    further = [collections] * bool(self._mutable) + [rngs] * (rngs is not None)
    return self._steps[key], (state.params, (state.opt_state, count), batch, *further)

  def _make(self, tx: optax.GradientTransformation, has_rngs: bool) -> TrainStep[Any, ...]:
    names = self._mutable

    def loss_fn(params: Any, batch: Any, *further: Any) -> Any:
      rest = list(further)
      collections = rest.pop(0) if names else {}
      variables = {**variables_of(params), **collections}
      out = self._loss_fn(variables, batch, rest[0] if rest else None)
      if not names:
        return out
      loss, rest = out
      updates, aux = rest if self._has_aux else (rest, None)
      return loss, (_checked(updates, names), aux)

    roles: dict[str, Any] = {"carry_argnum": 2} if names else {}
    if has_rngs:
      roles["rng_argnums"] = 2 + bool(names)
    return make_train_step(
      loss_fn, _counting(tx), has_aux=self._has_aux or bool(names), **roles, **self._options
    )


def variables_of(params: Any) -> dict[str, Any]:
  """What a model is applied to: flax keeps what is overwritten beside the parameters."""
  is_split = isinstance(params, Mapping) and OVERWRITTEN in params
  return dict(params) if is_split else {"params": params}


def _collection(state: train_state.TrainState, name: str) -> Any:
  if not hasattr(state, name):
    raise ValueError(
      f"mutable names {name!r}, and {type(state).__name__} has no such field: declare it,"
      f" `class TrainState(train_state.TrainState): {name}: Any`, and pass {name}= to create."
    )
  return getattr(state, name)


def _checked(updates: Any, names: tuple[str, ...]) -> dict[str, Any]:
  """The collections that the loss returned, which are those that were asked for."""
  if not isinstance(updates, Mapping) or set(updates) != set(names):
    got = sorted(updates) if isinstance(updates, Mapping) else type(updates).__name__
    raise ValueError(
      f"The loss returned the collections {got}, and mutable={names!r}: return what"
      f" model.apply(..., mutable={list(names)!r}) gives."
    )
  return {name: updates[name] for name in names}


def _counting(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`tx`, with the number of its steps in its state."""
  _validate.transformation(tx, "state.tx")
  tx = optax.with_extra_args_support(tx)

  def init(params: Any) -> Any:
    return tx.init(variables_of(params)["params"]), jnp.zeros((), jnp.int32)

  def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    held, steps = state
    stepped = variables_of(params)["params"]
    updates, held = tx.update(variables_of(grads)["params"], held, stepped, **extra_args)
    emitted = has_updated(held) if states_in(held) else True
    state = held, steps + jnp.asarray(emitted, steps.dtype)
    if stepped is params:
      return updates, state
    overwritten = jax.tree.map(jnp.subtract, grads[OVERWRITTEN], params[OVERWRITTEN])
    return {"params": updates, OVERWRITTEN: overwritten}, state

  return optax.GradientTransformationExtraArgs(init, update)
