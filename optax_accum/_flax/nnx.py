"""`nnx_train_step`: an nnx model and its optimizer, both stepped in place on the whole batch."""

from collections.abc import Callable
import dataclasses
from typing import Any
import weakref

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from optax_accum import _call_hints
from optax_accum._flax import graph, objects, step_options
from optax_accum._flax.pure_loss import ChangedByLossError, PureLoss
from optax_accum._flax.state_program import has_stepped
from optax_accum._mesh.data_parallel import DataParallel
from optax_accum._train_step.step import Step
from optax_accum._train_step.train_step import make_train_step, TrainStep

_DELETED = (
  "{root}.{name} has been deleted: a step updates model and optimizer in place, and deletes the"
  " arrays that they held. If these were put in from elsewhere, put in copies,"
  " nnx.update({root}, jax.tree.map(jnp.copy, saved)); if the model is a clone, copy.deepcopy it;"
  " or pass donate=False."
)
_OTHER_MODEL = (
  "If the model changed after nnx.Optimizer was made (adapters were added, a layer was replaced),"
  " make the optimizer again: nnx.Optimizer(model, tx, wrt=...)."
)

# Options of `make_train_step` that are not the user's here, and why.
_DECIDED = {
  "tx": "it is the optimizer's",
  "rng_argnums": "random streams are part of the model",
  "rng_argnames": "random streams are part of the model",
  "carry_argnum": "what the loss changes in the model is threaded",
}


@_call_hints.hinted(
  "The loss alone goes by position, and options by name. Model and optimizer go into the call:"
  " step(model, optimizer, batch)."
)
def nnx_train_step(
  loss_fn: Callable[..., Any],
  *,
  wrt: Any = nnx.Param,
  has_aux: bool = False,
  **options: Any,
) -> "NnxTrainStep":
  """A jitted training step of an nnx model, on a batch that is run in microbatches.

  ``step(model, optimizer, batch) -> metrics`` updates both in place, as a function under `nnx.jit`
  would: one step of ``optimizer.tx`` by the gradient of the whole batch, as of `make_train_step`.

  What the loss changes in the model is threaded through the microbatches: running statistics of
  `nnx.BatchNorm`, counters of random streams, caches, Variables of your own. So each microbatch
  draws noise of its own, and the model ends as after a loop over the microbatches. Over a mesh each
  device threads its own. Keys are folded with the device's index. In the end floats are averaged,
  with what each device counted, and of integers the largest is taken (`carry_reduction`).

  Batch statistics are those of microbatches, each of which updates the running ones: the gradients
  of a model with batch normalisation are not the whole batch's (`linen_train_step` says by how
  much). With group or layer norm they are. A microbatch of weight zero leaves the model alone, and
  padded rows in others enter the statistics: give `nnx.BatchNorm` a ``mask=``.

  For LoRA give `nnx.LoRAParam` as `wrt`, here and to the optimizer. Only adapters have accumulators
  and moments; the other parameters are neither copied nor donated.

  Args:
    loss_fn: ``loss_fn(model, batch)`` returns the loss, a scalar, or ``(loss, aux)`` with
      `has_aux`. It may change values of Variables, but for those that `wrt` selects. It may add
      none: of `nnx.Module.sow` take ``nnx.pop(model, nnx.Intermediate)``, and return it as aux.
    wrt: A filter: the Variables that are differentiated and stepped, as in `nnx.grad`. The
      optimizer was made with the same, from the model as it is: adapters are added before.
    has_aux: Whether `loss_fn` returns aux too. It comes as ``metrics["aux"]``.
    **options: Those of `make_train_step`, but for the roles of arguments. With ``donate`` (default)
      arrays that parameters and optimizer held are deleted by a step. An `nnx.clone` shares them,
      and an `nnx.state` follows the model. To keep the best model, and put it back as often as you
      like: ``best = jax.tree.map(jnp.copy, nnx.state(model))``, and
      ``nnx.update(model, jax.tree.map(jnp.copy, best))``. Or pass ``donate=False``.

  Returns:
    An `NnxTrainStep`. Its metrics are those of `make_train_step`. ``optimizer.step`` counts
    optimizer steps: it stays where nothing in the batch counted, and in the mini steps of an
    `accumulate`.

  Raises:
    TypeError: An option is unknown, or decided here; `loss_fn` takes other arguments; those of a
      call are no nnx model and optimizer.
      Otherwise as `make_train_step`.
    ValueError: `wrt` selects nothing, or not what the optimizer was made with; the loss added or
      removed Variables, changed one that `wrt` selects, or an attribute that is none.
    RuntimeError: The model or the optimizer holds an array that an earlier step deleted.

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
  """
  step_options.check("nnx_train_step", options, _DECIDED)
  _call_hints.check_takes("nnx_train_step", loss_fn, "model, batch")
  if isinstance(wrt, nnx.Pytree):
    raise TypeError(f"wrt is a {type(wrt).__name__}; it must be a filter, such as nnx.Param.")
  return NnxTrainStep(loss_fn, wrt, has_aux, options)


class NnxTrainStep(Step):
  """What `nnx_train_step` returns: ``step(model, optimizer, batch) -> metrics``."""

  batch_position = 2

  def __init__(self, loss_fn: Any, wrt: Any, has_aux: bool, options: dict[str, Any]):
    self._loss_fn, self._wrt, self._has_aux, self._options = loss_fn, wrt, has_aux, options
    self._views: dict[Any, _View] = {}
    self._steps: dict[Any, TrainStep[Any, ...]] = {}
    self._changed: dict[Any, frozenset[str]] = {}  # by graphdef: the names of what the loss changes
    # Refuses options that cannot work.
    self.loss = self._train_step(loss_fn, optax.identity(), True).loss

  def __repr__(self) -> str:
    given = {"wrt": objects.shown(self._wrt), "has_aux": self._has_aux or None, **self._options}
    return step_options.shown("nnx_train_step", self._loss_fn, given)

  @_call_hints.hinted(
    "It takes step(model, optimizer, batch). Fix a setting in the loss, functools.partial(loss_fn,"
    " train=True), and make a step for each value. Rows go into the batch, and arrays that are no"
    " rows into Variables of the model."
  )
  def __call__(
    self, model: nnx.Module, optimizer: nnx.Optimizer[Any], batch: Any
  ) -> dict[str, Any]:
    """One optimizer step on a batch, which model and optimizer are updated with."""
    view, out = self._run(TrainStep.__call__, model, optimizer, batch)
    return view.write(out)

  def lower(self, model: Any, optimizer: Any, batch: Any) -> jax.stages.Lowered:
    """The program of a call, lowered, for its memory and collectives."""
    return self._run(TrainStep.lower, model, optimizer, batch)[1]

  def _run(self, method: Any, model: Any, optimizer: Any, batch: Any) -> tuple["_View", Any]:
    """A method of the step of such objects, called with what they hold."""
    while True:
      view = self._view(model, optimizer)
      try:
        return view, method(view.step, *view.arguments(batch))
      except RuntimeError as error:
        for root, held in (("model", nnx.state(model)), ("optimizer", nnx.state(optimizer))):
          for name, x in graph.named(held).items():
            if isinstance(array := graph.value(x), jax.Array) and array.is_deleted():
              raise RuntimeError(_DELETED.format(root=root, name=name)) from error
        raise
      except ValueError as error:
        if str(error).startswith("opt_state"):
          error.add_note(_OTHER_MODEL)
        raise
      except ChangedByLossError as found:  # while the loss was traced, before anything ran
        known = self._changed.get(view.graphdef, frozenset())
        self._changed[view.graphdef] = known | found.names
        self._views.clear()

  def _view(self, model: Any, optimizer: Any) -> "_View":
    """What these objects hold: as found before, if their structure is as it was."""
    key = id(model), id(optimizer)
    view = self._views.get(key)
    if view is None or not view.snapshot.holds(model, optimizer):
      view = self._look_at(model, optimizer)
      if key not in self._views:
        for root in (model, optimizer):
          weakref.finalize(root, self._views.pop, key, None).atexit = False
      self._views[key] = view
    return view

  def _look_at(self, model: Any, optimizer: Any) -> "_View":
    objects.check_objects(model, optimizer)
    parts: Any = nnx.split(model, self._wrt, ...)
    graphdef, params, rest = parts
    objects.wrap_arrays(optimizer)
    objects.check_wrt(self._wrt, params, model, optimizer)
    if (mesh := self._options.get("mesh")) is not None:
      parallel = DataParallel(mesh, self._options.get("data_axis", "data"), False)
      held, state = graph.Slots(nnx.state(model)), graph.Slots(nnx.state(optimizer))
      held.write(parallel.place("model", held.read()))
      parameters = graph.Slots(params).read()
      state.write(parallel.place_state("optimizer", parameters, state.read()))
    changed = self._changed.get(graphdef, frozenset())
    carry, fixed = graph.partition(rest, changed)
    key = graphdef, optimizer.tx, changed
    if key not in self._steps:
      self._steps[key] = self._make_step(graphdef, optimizer.tx, changed)
    return _View(
      snapshot=graph.Snapshot(model, optimizer),
      graphdef=graphdef,
      step=self._steps[key],
      has_aux=self._has_aux,
      params=graph.Slots(params),
      held=graph.Slots((optimizer.opt_state, optimizer.step)),
      fixed=graph.Slots(fixed),
      carry=graph.Slots(carry),
    )

  def _make_step(self, graphdef: Any, tx: Any, changed: frozenset[str]) -> TrainStep[Any, ...]:
    axis = self._options.get("axis_name")
    if self._options.get("mesh") is not None:
      axis = self._options.get("data_axis", "data")
    loss = PureLoss(self._loss_fn, self._has_aux, graphdef, changed, axis)
    return self._train_step(loss, tx, bool(changed))

  def _train_step(self, loss: Any, tx: Any, carries: bool) -> TrainStep[Any, ...]:
    options = {k: x for k, x in self._options.items() if carries or k != "carry_reduction"}
    return make_train_step(
      loss,
      _counting(tx),
      has_aux=self._has_aux or carries,
      batch_argnums=1,
      rng_argnums=(),
      carry_argnum=3 if carries else None,
      **options,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _View:
  """What a model and its optimizer hold, and the step for it."""

  snapshot: graph.Snapshot
  graphdef: Any
  step: TrainStep[Any, ...]
  has_aux: bool
  params: graph.Slots
  held: graph.Slots  # the optimizer's state, and its count of steps
  fixed: graph.Slots  # what the loss does not change
  carry: graph.Slots  # what it changes

  def arguments(self, batch: Any) -> tuple[Any, ...]:
    """The arguments of a step."""
    args = self.params.read(), self.held.read(), batch, self.fixed.read()
    return (*args, self.carry.read()) if self.carry.variables else args

  def write(self, out: tuple[Any, ...]) -> dict[str, Any]:
    """Puts back what a step returned, but for the metrics."""
    params, held, *carry, metrics = out
    self.params.write(params)
    self.held.write(held)
    if carry:
      self.carry.write(carry[0])
    if not self.has_aux:
      metrics.pop("aux", None)
    return metrics


def _counting(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`tx`, with how many steps it took in its state."""
  tx = optax.with_extra_args_support(tx)

  def init(params: Any) -> Any:
    return tx.init(params), jnp.zeros((), jnp.uint32)

  def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    updates, new = tx.update(grads, state[0], params, **extra_args)
    return updates, (new, state[1] + has_stepped(state[0], new).astype(state[1].dtype))

  return optax.GradientTransformationExtraArgs(init, update)
