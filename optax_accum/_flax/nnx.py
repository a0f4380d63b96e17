"""`nnx_train_step`: an nnx model and its optimizer, both stepped in place on the whole batch."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, Unpack

from flax import nnx
import jax

from optax_accum import _validate
from optax_accum._arithmetic.trees import Batch, Tree
from optax_accum._flax import flax_step
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

Optimizer: TypeAlias = nnx.Optimizer[Any]

# What no loss changes, beside what is trained.
_CONSTANT = nnx.Any(nnx.Param, nnx.RngKey)
# Among what is carried, the counts of random streams. No attribute of a model has this name.
_STREAMS = "random streams"


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
      aux)``. It may change what `wrt` does not select and is no `nnx.Param`, but not add anything:
      return what `nnx.Module.sow` added as aux, ``nnx.pop(model, nnx.Intermediate)``. Further
      arguments are those of the call.
    wrt: A filter, as in `nnx.grad`: the Variables to train, such as `nnx.LoRAParam`. Give the
      optimizer the same, and make it after adapters are added.
    has_aux: Whether `loss_fn` returns aux too, which becomes ``metrics["aux"]``.
    **options: Those of `make_train_step`, such as `num_microbatches`, `weight_fn` and `mesh`, but
      not the positions of arguments: the batch is known, and keys and what is carried are in the
      model. With ``donate`` (default) a step deletes the arrays that the model and the optimizer
      held. `nnx.clone` and `nnx.state` share these: keep ``jax.tree.map(jnp.copy,
      nnx.state(model))``. `carry_reduction`: see below.

  Returns:
    An `NnxTrainStep`, ``step(model, optimizer, batch, ...) -> metrics``.

    Further arguments of the call, by position or by name, are those of `loss_fn`, and are not
    split: totals of the batch, or another model, such as a teacher. The loss must not change
    another model or a metric, which Flax refuses: call its ``eval()``, or return aux. A bare random
    key is refused.

    ``metrics`` is the dict of a `TrainStep`: ``loss``, ``grad_norm``, ``total_weight``,
    ``skipped_microbatches``, ``stepped``, and what was asked for of ``aux`` and ``noise_scale``.
    ``optimizer.step`` counts the steps that the optimizer took. The step has ``check``, ``lower``,
    ``trace`` and ``eval_shape`` too, which are called as the step is. Microbatches that arrive in
    several calls: ``step.begin(model)``, ``step.add(cycle, model, batch)``, ``step.merge(cycle,
    other)`` and ``step.finish(model, optimizer, cycle)``.

  Raises:
    TypeError, ValueError, RuntimeError: As `make_train_step`; also if a call gets no nnx model and
      its optimizer, if the optimizer's class has an `update` of its own, which the step would not
      call, or if the optimizer was made with another `wrt`.

  What is carried:
    Each microbatch passes on to the next what is neither selected by `wrt`, nor an `nnx.Param`, nor
    a random stream: running statistics, caches, counts. What the loss hands back as it came, such
    as a frozen base in a Variable of its own type, is not carried, and stays to the bit. (Where a
    transform of nnx makes it anew, have it be an `nnx.Param`, which `wrt` does not select.) Random
    streams draw on from microbatch to microbatch, and each device has noise of its own. A change of
    an `nnx.Param` by the loss is lost.

    Over a mesh, and where cycles are merged, floats are averaged by weight. A count, as of right
    answers or of the tokens of each expert, needs a word: `carry_reduction` is a tree of words by
    attribute; those that are not named keep the default, as does None. (A bare word is for every
    leaf, the statistics of batch norm too.) ::

      class Classifier(nnx.Module):
        def __init__(self, rngs):
          ...
          self.norm = nnx.BatchNorm(8, rngs=rngs)
          self.right = nnx.Variable(jnp.zeros((), jnp.int32))

      nnx_train_step(loss_fn, num_microbatches=8, mesh=mesh, carry_reduction={"right": "sum"})

    A word counts for all below an attribute: ``{"counts": "sum"}``, or ``{"counts": {"right":
    "sum", "mean_length": None}}``. With batch normalization the step is not that of the whole
    batch, as in `linen_train_step`. See the guide "Flax nnx, Equinox and Haiku".
  """
  return NnxTrainStep(loss_fn, wrt, has_aux, options)


class NnxTrainStep(flax_step.FlaxStep):
  """What `nnx_train_step` returns: ``step(model, optimizer, batch, ...) -> metrics``."""

  name = "nnx_train_step"
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
    "unsplit": flax_step.UNSPLIT,
    "random": "Draw from a random stream of the model, as nnx.Dropout(0.1, rngs=rngs) does.",
  }
  # Streams draw on from microbatch to microbatch, and as far on every device.
  own_words: ClassVar[dict[str, str]] = {_STREAMS: "max"}

  def __init__(
    self, loss_fn: LossFn, wrt: Any, has_aux: bool, options: StepOptions
  ):
    shown = getattr(wrt, "__name__", repr(wrt))
    super().__init__(loss_fn, has_aux, options, wrt=shown)
    self._wrt = wrt

  def __call__(
    self, model: nnx.Module, optimizer: Optimizer, batch: Batch, *args, **kwargs
  ) -> Metrics:
    """Takes one optimizer step on a batch, and updates model and optimizer in place."""
    return self._prepare(model, optimizer, batch, *args, **kwargs).run()

  def _parts(self, model, optimizer, batch, *args, **kwargs):
    held = self._hold_both(model, optimizer)
    return held, batch, None, Further(args, kwargs)

  def begin(self, model: nnx.Module) -> Cycle:
    """Begins a cycle whose microbatches arrive in several calls, as `TrainStep.begin`."""
    return self._begin(self._hold(model))

  @method
  def add(self, cycle: Cycle, model, batch, *args, **kwargs) -> PreparedCall:
    """``add(cycle, model, batch, ...)`` adds microbatches, as `TrainStep.add`.

    What the loss changes in the model is in the cycle, and in the model when it has finished.
    """
    return self._add(
      cycle, self._hold(model), batch, None, Further(args, kwargs)
    )

  @method
  def finish(self, model, optimizer: Optimizer, cycle: Cycle) -> PreparedCall:
    """``finish(model, optimizer, cycle)`` steps in place, as `TrainStep.finish`: the metrics."""
    return self._finish(self._hold_both(model, optimizer), cycle)

  def _hold_both(self, model, optimizer) -> Held:
    if not isinstance(optimizer, nnx.Optimizer):
      raise TypeError(
        f"optimizer is a {type(optimizer).__name__}; it must be an nnx.Optimizer(model, tx,"
        " wrt=nnx.Param): the order is model, optimizer, and then the batch or the cycle."
      )
    flax_step.check_calls(self.name, optimizer, "update")
    _validate.transformation(optimizer.tx, "optimizer.tx")
    # Of an optimizer without a state, as SGD, nothing else would tell.
    if optimizer.wrt != self._wrt:
      raise ValueError(
        f"The optimizer was made with wrt={optimizer.wrt!r}, and the step with wrt={self._wrt!r}:"
        " pass the same filter to both."
      )
    return self._hold(model, optimizer)

  def _hold(self, model, optimizer: Any = None) -> Held:
    if not isinstance(model, nnx.Module):
      raise TypeError(
        f"model is a {type(model).__name__}; nnx_train_step takes an nnx module. For linen there is"
        " linen_train_step, and for parameters make_train_step."
      )
    graphdef, params, constant, carried = self._split(model)
    arguments = Arguments(params, constant=constant, carried=carried)
    tx = flax_step.NO_OPTIMIZER
    if optimizer is not None:
      tx = optimizer.tx
      opt_state = _values(optimizer.opt_state)
      count = _value(optimizer.step)
      arguments = arguments._replace(opt_state=opt_state, count=count)

    def put(new: Arguments, metrics: Metrics) -> Metrics:
      if isinstance(metrics["loss"], jax.ShapeDtypeStruct):
        return metrics  # of `eval_shape`, which changes nothing
      nnx.update(model, new.params, new.constant, *_states(new.carried))
      optimizer.opt_state = nnx.data(_put(optimizer.opt_state, new.opt_state))
      _put(optimizer.step, new.count)
      return metrics

    program = self._program(graphdef, tx, tuple(carried))
    return Held(program, arguments, (), put)

  def _split(self, model):
    """The structure of a model, parameters, what is constant, and what is carried, by name."""
    parts: Any = nnx.split(model, self._wrt, _CONSTANT, nnx.RngCount, ...)
    graphdef, params, constant, streams, others = parts
    named = nnx.to_pure_dict(_values(others))
    carried = {**named, _STREAMS: _values(streams)}
    return graphdef, _values(params), _values(constant), carried

  def _loss(self, graphdef, params, batch, constant, carried, rngs, further):
    """The user's loss, as one that `make_train_step` takes."""
    model = nnx.merge(graphdef, params, constant, *_states(carried))
    out = self._loss_fn(model, batch, *further.args, **further.kwargs)
    loss, _, aux = self._taken_apart(out, mutable=False)
    *_, changed = self._split(model)
    return loss, (changed, aux)


def _states(carried: Mapping[str, Tree]) -> tuple[Tree, Tree]:
  """What is carried, as nnx takes it: Variables by name, and the counts of random streams."""
  named = dict(carried)
  streams = named.pop(_STREAMS)
  return nnx.State(named), streams


def _is_variable(x: object) -> bool:
  return isinstance(x, nnx.Variable)


def _value(x):
  """The value of a Variable; an array is its own."""
  if _is_variable(x):
    return x.get_raw_value()
  return x


def _values(tree):
  """The tree, with values in the places of the Variables."""
  return jax.tree.map(_value, tree, is_leaf=_is_variable)


def _put(tree, new):
  """The tree, its Variables with new values, and new arrays in the places of arrays."""

  def put(x, new):
    if not _is_variable(x):
      return new
    x.set_raw_value(new)
    return x

  return jax.tree.map(put, tree, new, is_leaf=_is_variable)
