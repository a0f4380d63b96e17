"""`nnx_train_step`: an nnx model and its optimizer, both stepped in place on the whole batch."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeAlias, Unpack
import weakref

from flax import nnx
import optax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Args, Batch, Tree
from optax_accum._flax import variables
from optax_accum._flax.flax_step import FlaxProgram, FlaxStep, LossFn, Metrics, StepOptions, Use
from optax_accum._flax.pure_loss import ChangedByLossError, PureLoss
from optax_accum._flax.variables import Snapshot, Values
from optax_accum._mesh.placement import place
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.options import OTHER_NAMES
from optax_accum._train_step.program import PreparedCall

Optimizer: TypeAlias = nnx.Optimizer[Any]

# What is added to an error, by words in it: the first that are.
_NOTES = {
  "has been deleted": (
    "A step updates model and optimizer in place. If you put arrays into the model, put in copies,"
    " nnx.update(model, jax.tree.map(jnp.copy, saved)); if the model is a clone, use copy.deepcopy"
    " instead of nnx.clone; or pass donate=False."
  ),
  "opt_state": (
    "The optimizer must be made with the wrt of the step and for the present model. After you added"
    " adapters or replaced a layer, make it again: nnx.Optimizer(model, tx, wrt=...)."
  ),
}


@_validate.hinted(
  "The loss alone goes by position, and options by name. Model and optimizer go into the call:"
  " step(model, optimizer, batch)."
)
def nnx_train_step(
  loss_fn: LossFn,
  *,
  wrt: Any = nnx.Param,
  has_aux: bool = False,
  **options: Unpack[StepOptions],
) -> "NnxTrainStep":
  """Makes a jitted training step of an nnx model that runs its batch in microbatches.

  ``step(model, optimizer, batch) -> metrics`` updates both in place, as under `nnx.jit`.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax
    >>> from optax_accum.flax import nnx_train_step
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    >>> def loss_fn(model, batch):
    ...   return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> step = nnx_train_step(loss_fn, num_microbatches=3)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones((6, 1))}
    >>> losses = [float(step(model, optimizer, batch)["loss"]) for _ in range(3)]
    >>> losses[2] < losses[0], int(optimizer.step[...])
    (True, 3)

  Args:
    loss_fn: ``loss_fn(model, batch)`` returns ``loss``, a scalar, or with `has_aux` ``(loss,
      aux)``. It may change Variables that `wrt` does not select, but not add any: after
      `nnx.Module.sow` call ``nnx.pop(model, nnx.Intermediate)``, and return the result as aux.
    wrt: A filter, as in `nnx.grad`: the Variables to train, such as `nnx.LoRAParam`. Give the
      optimizer the same, and make it after adapters are added.
    has_aux: Whether `loss_fn` returns aux too, which becomes ``metrics["aux"]``.
    **options: Those of `make_train_step`, except the positions of arguments. With ``donate``
      (default) a step deletes the arrays of parameters and optimizer. `nnx.clone` and `nnx.state`
      share these: keep ``jax.tree.map(jnp.copy, nnx.state(model))``.

  Returns:
    An `NnxTrainStep`, with metrics and methods of a `TrainStep`. ``optimizer.step`` counts steps.

  Raises:
    TypeError, ValueError, RuntimeError: As `make_train_step`; also if a call gets no nnx model and
      its optimizer, if `wrt` selects nothing, or not what the optimizer was made with, or if the
      loss adds or removes Variables, or changes what `wrt` selects or what is not a Variable.

  The loss:
    Variables that the loss changes, such as running statistics, counters of random streams and
    caches, are the carry of `make_train_step`. With batch normalization the step is not that of the
    whole batch, as in `linen_train_step`. See the guide "Flax nnx, and LoRA".
  """
  if isinstance(wrt, nnx.Pytree):
    raise TypeError(f"wrt is a {type(wrt).__name__}; it must be a filter, such as nnx.Param.")
  return NnxTrainStep(loss_fn, wrt, has_aux, options)


class NnxTrainStep(FlaxStep):
  """What `nnx_train_step` returns: ``step(model, optimizer, batch) -> metrics``.

  Which Variables the loss changes is found by tracing it. At first none are carried from one
  microbatch to the next; if `ChangedByLossError` names some, the loss is traced again with these.
  """

  name, takes, batch_position = "nnx_train_step", "model, batch", 2
  params_name, updated = "model", (0, 1, 4, 5)
  fixes: ClassVar[dict[str, str]] = {
    "coupled": "Batch normalization: use group or layer norm, or the running statistics"
    " (model.eval()), or accept that each microbatch is normalized by its own rows.",
    "unsplit": "Put what has the batch's rows into the batch.",
    "random": "Draw from a random stream of the model, as nnx.Dropout(0.1, rngs=rngs) does.",
  }
  decided: ClassVar[dict[str, str]] = {
    "tx": "it is the optimizer's",
    **dict.fromkeys(("rng_argnums", "rng_argnames"), "random streams are part of the model"),
    "carry_argnum": "the step carries what the loss changes in the model",
  }

  def __init__(self, loss_fn: LossFn, wrt: Any, has_aux: bool, options: StepOptions):
    super().__init__(loss_fn, has_aux, options, wrt=variables.shown(wrt))
    self._wrt = wrt
    self._views: dict[object, _View] = {}
    self._changed: dict[object, frozenset[str]] = {}  # by graphdef: what the loss changes
    self.loss = self._step_loss(loss_fn, rng_argnums=())

  @_validate.hinted(
    "It takes step(model, optimizer, batch). Fix a setting in the loss, functools.partial(loss_fn,"
    " train=True), and make a step for each value. Put arrays with rows into the batch, and other"
    " arrays into Variables of the model.",
    names=OTHER_NAMES,
  )
  def __call__(self, model: nnx.Module, optimizer: Optimizer, batch: Batch) -> Metrics:
    """Takes one optimizer step on a batch, and updates model and optimizer in place."""
    metrics: Metrics = self._with_call(_View.run, model, optimizer, batch)
    return metrics

  def _with_call(self, use: Use, model: Any, optimizer: Any, batch: Batch) -> Any:
    """What `use` makes of a call with what these objects hold."""
    while True:
      view = self._view(model, optimizer)
      try:
        return use(view, view.program.prepare(view.arguments(batch), {}))
      except ChangedByLossError as found:  # while the loss was traced, before anything ran
        known = self._changed.get(view.graphdef, frozenset())
        self._changed[view.graphdef] = known.union(found.args)
        self._views.clear()
      except (RuntimeError, ValueError) as error:
        notes = [note for words, note in _NOTES.items() if words in str(error)]
        for note in notes[:1]:
          error.add_note(note)
        raise

  def _view(self, model: nnx.Module, optimizer: Optimizer) -> "_View":
    """What these objects hold: as found before, if their structure is as it was."""
    key = id(model), id(optimizer)
    view = self._views.get(key)
    if view is None or not view.snapshot.holds(model, optimizer):
      view = self._look_at(model, optimizer)
      if key not in self._views:
        for root in (model, optimizer):
          weakref.finalize(root, self._views.pop, key, None)
      self._views[key] = view
    return view

  def _look_at(self, model: nnx.Module, optimizer: Optimizer) -> "_View":
    variables.check_objects(model, optimizer)
    parts: Args = nnx.split(model, self._wrt, ...)
    graphdef, params, rest = parts
    variables.wrap_arrays(optimizer)
    variables.check_wrt(self._wrt, params, model, optimizer)
    if (parallel := self.loss.parallel) is not None:
      held = Values(nnx.state(model))
      held.write(place(parallel.mesh, "model", held.read()))
    changed = self._changed.get(graphdef, frozenset())
    carry, fixed = nnx.split_state(rest, variables.among(changed), ...)
    key = graphdef, optimizer.tx, changed
    if key not in self._programs:
      axis = parallel.axes if parallel else self._options.get("axis_name")
      pure = PureLoss(self._loss_fn, self.has_aux, graphdef, changed, axis)
      tx, loss = optax.with_extra_args_support(optimizer.tx), self._step_loss(pure, rng_argnums=())
      self._programs[key] = FlaxProgram(loss, tx, self.updated, 5, self._donate, self)
    updated = Values((params, optimizer.opt_state, carry, optimizer.step))
    snapshot = Snapshot(model, optimizer)
    return _View(snapshot, graphdef, self._programs[key], updated, Values(fixed))

  def names(self, *args: Any) -> dict[str, Tree]:
    """The arguments of a program, by the names that messages have for them."""
    params, opt_state, batch, *states, count = args
    optimizer = {"opt_state": opt_state, "step": count}
    return {"model": nnx.merge_state(params, *states), "optimizer": optimizer, "batch": batch}


class _View(NamedTuple):
  """What a model and its optimizer hold, and the program for it."""

  snapshot: Snapshot
  graphdef: Any
  program: FlaxProgram
  updated: Values  # parameters, optimizer state, what the loss changes, and the count of steps
  fixed: Values  # what the loss does not change

  def arguments(self, batch: Batch) -> Args:
    """The arguments of the program."""
    params, opt_state, carry, count = self.updated.read()
    return params, opt_state, batch, self.fixed.read(), carry, count

  @property
  def local(self) -> LocalLoss:
    """The loss on one device, without an axis of others."""
    pure: Any = self.program.local.fun
    return dataclasses.replace(self.program.local, fun=dataclasses.replace(pure, axis=None))

  def run(self, call: PreparedCall) -> Metrics:
    """One step: puts back what it returned, but for the metrics."""
    *new, metrics = self.program.run(call)
    self.updated.write(tuple(new))
    return metrics
