"""`nnx_train_step`: an nnx model and its optimizer, both stepped in place on the whole batch."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, Unpack

from flax import nnx
import jax
import optax

from optax_accum._arithmetic.trees import Batch
from optax_accum._flax import flax_step, nnx_objects, variables
from optax_accum._flax.flax_step import (
  Arguments,
  LossFn,
  Metrics,
  StepOptions,
)
from optax_accum._flax.pure_loss import ChangedByLossError, PureLoss
from optax_accum._train_step.cycle import Cycle, method
from optax_accum._train_step.program import PreparedCall, StepProgram

Optimizer: TypeAlias = nnx.Optimizer[Any]

_DELETED = (
  "A step updates model and optimizer in place. If you put arrays into the model, put in copies,"
  " nnx.update(model, jax.tree.map(jnp.copy, saved)); if the model is a clone, use copy.deepcopy"
  " instead of nnx.clone; or pass donate=False."
)


def nnx_train_step(
  loss_fn: LossFn,
  *,
  wrt: Any = nnx.Param,
  has_aux: bool = False,
  **options: Unpack[StepOptions],
) -> "NnxTrainStep":
  """Makes a jitted training step of an nnx model that runs its batch in microbatches.

  ``step(model, optimizer, batch, ...) -> metrics`` updates both in place, as under `nnx.jit`.

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
    loss_fn: ``loss_fn(model, batch, ...)`` returns ``loss``, a scalar, or with `has_aux` ``(loss,
      aux)``. It may change Variables that `wrt` does not select, but not add any: return what
      `nnx.Module.sow` added as aux, ``nnx.pop(model, nnx.Intermediate)``. Further arguments are
      those of the call.
    wrt: A filter, as in `nnx.grad`: the Variables to train, such as `nnx.LoRAParam`. Give the
      optimizer the same, and make it after adapters are added.
    has_aux: Whether `loss_fn` returns aux too, which becomes ``metrics["aux"]``.
    **options: Those of `make_train_step`, such as `num_microbatches`, `weight_fn` and `mesh`, but
      not the positions of arguments: the batch is known, and keys and what is carried are in the
      model. With ``donate`` (default) a step deletes the arrays of parameters and optimizer.
      `nnx.clone` and `nnx.state` share these: keep ``jax.tree.map(jnp.copy, nnx.state(model))``.
      ``batch_argnums=1`` allows a further argument with as many rows as the batch, by chance.

  Returns:
    An `NnxTrainStep`, ``step(model, optimizer, batch, ...) -> metrics``.

    Further arguments of the call, by position or by name, are those of `loss_fn`, and are not
    split: totals of the batch, or another model, such as a teacher, which the loss must not change
    (call its ``eval()``). One with as many rows as the batch is refused, and one with a random
    stream: of such a model pass the parameters that `nnx.split` returns.

    ``metrics`` is the dict of a `TrainStep`: ``loss``, ``grad_norm``, ``total_weight``,
    ``skipped_microbatches``, ``stepped``, and what was asked for of ``aux`` and ``noise_scale``.
    ``optimizer.step`` counts the steps that the optimizer took. The step has ``check``, ``lower``
    and ``trace`` too, which are called as the step is. Microbatches that arrive in several calls:
    ``step.begin(model)``, ``step.add(cycle, model, batch)``, ``step.merge(cycle, other)`` and
    ``step.finish(model, optimizer, cycle)``.

  Raises:
    TypeError, ValueError, RuntimeError: As `make_train_step`; also if a call gets no nnx model and
      its optimizer, if the optimizer's class has an `update` of its own, which the step would not
      call, if `wrt` selects nothing, or not what the optimizer was made with, or if the loss adds
      or removes Variables, or changes what `wrt` selects or what is not a Variable.

  The loss:
    Variables that the loss changes, such as running statistics, counters of random streams and
    caches, are the carry of `make_train_step`. With batch normalization the step is not that of the
    whole batch, as in `linen_train_step`. See the guide "Flax nnx, and LoRA".
  """
  if isinstance(wrt, nnx.Pytree):
    raise TypeError(
      f"wrt is a {type(wrt).__name__}; it must be a filter, such as nnx.Param."
    )
  return NnxTrainStep(loss_fn, wrt, has_aux, options)


class NnxTrainStep(flax_step.FlaxStep):
  """What `nnx_train_step` returns: ``step(model, optimizer, batch, ...) -> metrics``.

  Which Variables the loss changes is found by tracing it. At first none are carried from one
  microbatch to the next; if `ChangedByLossError` names some, the loss is traced again with these.
  """

  name = "nnx_train_step"
  takes = "model, batch"
  names = Arguments(
    params="model",
    opt_state="optimizer['opt_state']",
    batch="batch",
    constant="model.",
    carried="model.",
    rngs="rngs",
    further="",
    count="optimizer['step']",
  )
  fixes: ClassVar[dict[str, str]] = {
    "coupled": "Batch normalization: use group or layer norm, or the running statistics"
    " (model.eval()), or accept that each microbatch is normalized by its own rows.",
    "unsplit": flax_step.UNSPLIT,
    "random": "Draw from a random stream of the model, as nnx.Dropout(0.1, rngs=rngs) does. Of"
    " another model pass what draws nothing, graphdef, params, rest = nnx.split(teacher, nnx.Param,"
    " ...), and have the loss nnx.merge(graphdef, params, rest).",
  }
  decided: ClassVar[dict[str, str]] = {
    "tx": "It goes into the call: step(model, optimizer, batch).",
    "optimizer": "It goes into the call: step(model, optimizer, batch).",
    "rng_argnums": "Random streams are in the model.",
    "rngs": "Random streams are in the model.",
    "carry_argnum": "What the loss changes in the model is carried.",
    "mutable": "What the loss changes in the model is carried.",
    "argnums": "wrt selects what is differentiated.",
  }

  call = "step(model, optimizer, batch)"
  keys = "the nnx.Rngs of the model"

  def __init__(
    self, loss_fn: LossFn, wrt: Any, has_aux: bool, options: StepOptions
  ):
    shown = nnx_objects.shown(wrt)
    super().__init__(loss_fn, has_aux, options, wrt=shown)
    self._wrt = wrt
    self.loss = self._step_loss(loss_fn)
    # What the loss changes, of models of each structure, and optimizers; and programs for these.
    self._changed: dict[object, frozenset[str]] = {}
    self._programs: dict[object, StepProgram] = {}

  def __call__(
    self, model: nnx.Module, optimizer: Optimizer, batch: Batch, *args, **kwargs
  ) -> Metrics:
    """Takes one optimizer step on a batch, and updates model and optimizer in place."""
    places, (new, metrics) = self._with_call(
      flax_step.run, model, optimizer, batch, *args, **kwargs
    )
    variables.write(places, new._replace(batch=None, further=places.further))
    return metrics

  def begin(self, model: nnx.Module) -> Cycle:
    """Begins a cycle whose microbatches arrive in several calls, as `TrainStep.begin`."""
    nnx_objects.check_module("step.begin(model)", model)
    return Cycle()

  @method
  def add(self, cycle: Cycle, model, batch, *args, **kwargs) -> "_Add":
    """``add(cycle, model, batch, ...)`` adds microbatches, as `TrainStep.add`.

    What the loss changes in the model, the same Variables in all calls, is in the cycle from the
    first call on, and in the model when it has finished.
    """
    call = "step.add(cycle, model, batch)"
    nnx_objects.check_module(call, model)
    further = self._further(call, args, kwargs)

    def with_call(use):
      def add(program, given):
        own = cycle
        if cycle.state is None:
          own = Cycle((given.carried,))
        of_loss = batch, given.constant, given.rngs, further
        cycles = self._cycle_of(program)
        return use(cycles.add(own, given.params, of_loss, {}))

      return self._with_program(add, model, None, _carried(cycle))[1]

    return _Add(with_call)

  @method
  def finish(self, model, optimizer: Optimizer, cycle: Cycle):
    """``finish(model, optimizer, cycle)`` steps in place, as `TrainStep.finish`: the metrics."""
    call = "step.finish(model, optimizer, cycle)"
    self._check_objects(call, model, optimizer)

    def finish(program, given):
      return self._cycle_of(program).finish(
        given.params,
        given.opt_state,
        cycle,
        given.count,
        returned=finished,
        kept=given.constant,
      )

    def finished(results):
      params, opt_state, *carried, count, metrics = results
      new = Arguments(params, opt_state, count=count)
      written = places._replace(constant=None, carried=None, further=None)
      if carried:
        written = written._replace(carried=places.carried)
        new = new._replace(carried=carried[0])
      variables.write(written, new._replace(further=None))
      return metrics

    known = _carried(cycle)
    places, prepared = self._with_program(finish, model, optimizer, known)
    return prepared

  def _on_program(self, use, /, model, optimizer, batch, *args, **kwargs):
    """The Variables of a call with what these objects hold, and what `use` makes of the program."""
    self._check_objects(self.call, model, optimizer)
    further = self._further(self.call, args, kwargs)

    def call(program, given):
      given = given._replace(batch=batch, further=further)
      return use(program, given, ())

    return self._with_program(call, model, optimizer)

  def _check_objects(self, call: str, model, optimizer) -> None:
    nnx_objects.check_objects(call, model, optimizer)
    flax_step.check_calls(self.name, optimizer, "update")
    variables.wrap_arrays(optimizer)

  def _with_program(
    self,
    use: Callable[[StepProgram, Arguments], Any],
    model,
    optimizer: Optimizer | None,
    known: frozenset[str] | None = None,
  ):
    """The Variables of these objects, and what `use` makes of a program and of their values.

    `known` has the names of all that the loss may change, where that is decided.
    """
    parts: Any = nnx.split(model, self._wrt, ...)
    graphdef, params, rest = parts
    places = Arguments(params)
    tx = optax.identity()  # which no program runs
    if optimizer is not None:
      tx = optimizer.tx
      places = Arguments(params, optimizer.opt_state, count=optimizer.step)
    key = graphdef, None if optimizer is None else tx
    if key not in self._changed:
      nnx_objects.check_model(self._wrt, params, model, optimizer)
      self._changed[key] = frozenset()
    while True:
      changed = self._changed[key] if known is None else known
      program = self._program_of(key, tx, changed)
      carried, constant = nnx.split_state(rest, variables.among(changed), ...)
      places = places._replace(constant=constant, carried=carried)
      try:
        return places, use(program, variables.values(places))
      except ChangedByLossError as error:
        # While the loss was traced, before anything ran.
        if known is not None:
          names = ", ".join(f"model.{name}" for name in sorted(error.args))
          raise ValueError(
            f"loss_fn changed {names}, and in no call of this cycle before, so the cycle does not"
            " carry it: let the loss change the same Variables in all calls (model.train() or"
            " model.eval() in all), or finish this cycle first."
          ) from None
        self._changed[key] = changed.union(error.args)
      except RuntimeError as error:
        if "has been deleted" in str(error):
          error.add_note(_DELETED)
        raise

  def _program_of(self, key, tx, changed: frozenset[str]) -> StepProgram:
    """The program for models of a structure, and for what of them the loss changes."""
    if (key, changed) in self._programs:
      return self._programs[key, changed]
    graphdef, _ = key
    pure = PureLoss(self._loss_fn, self.has_aux, graphdef, changed)
    program = self._program(self._step_loss(pure), tx)
    self._programs[key, changed] = program
    return program


class _Add(NamedTuple):
  """A call of `add`. Only when its program is traced is it known what the loss changes."""

  with_call: Callable[[Callable[[PreparedCall], Any]], Any]

  def run(self) -> Cycle:
    """As `PreparedCall.run`."""
    return self.with_call(PreparedCall.run)

  def trace(self) -> jax.stages.Traced:
    """As `PreparedCall.trace`."""
    return self.with_call(PreparedCall.trace)

  def eval_shape(self) -> Cycle:
    """As `PreparedCall.eval_shape`."""
    return self.with_call(PreparedCall.eval_shape)


def _carried(cycle: Cycle) -> frozenset[str] | None:
  """The names of what a cycle has of the model; None where no call has told yet."""
  if cycle.state is None:
    return None
  return frozenset(name for x in cycle.start for name in variables.named(x))
