"""The whole cycle: N backward passes and one optimizer step in one jitted call."""

from collections.abc import Callable
import inspect
from typing import Any, cast, NamedTuple, Unpack

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from optax_accum import _arguments, _reduce, _reductions, _validate
from optax_accum._conditional import update_if
from optax_accum._cycle import AccumulateState
from optax_accum._mesh import DataParallel
from optax_accum._microbatch import loss_cycle, Outputs, value_and_grad_cycle
from optax_accum._shards import Shards
from optax_accum._split import MicrobatchOptions, Split


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  has_aux: bool = False,
  donate: bool = True,
  mesh: jax.sharding.Mesh | None = None,
  data_axis: str = "data",
  reduce_gradients: str = "per_cycle",
  **options: Unpack[MicrobatchOptions],
) -> Callable[..., Any]:
  """A jitted training step on a batch that is run in microbatches.

  ``step(params, opt_state, batch, ...) -> (params, opt_state, metrics)`` computes the
  loss and gradients of the whole batch as `microbatch_value_and_grad` does, and takes
  one optimizer step with them, in one XLA program. Where nothing in the batch counted
  (all weights zero, or all microbatches skipped) there is no gradient to step with:
  parameters and optimizer state stay as they are and the metrics say so.

  Args:
    loss_fn: ``loss_fn(params, batch, ...)``, returning what `microbatch_value_and_grad`
      asks for. Its first argument is differentiated.
    tx: Any optax transformation. It is given the extra arguments ``value`` (the loss),
      ``grad``, ``value_fn`` (the loss of this batch at other parameters, in microbatches
      too, for a line search) and ``weight``, what this call counts in a mean over calls (the
      total weight; 1 under ``reduction="sum"``). So `accumulate` composes: k calls of N
      microbatches are one step of k x N. (An inner optimizer that reads ``value`` sees that of
      the last call.) Not for `optax.lookahead`, whose gradients are those of another tree:
      give it those of `microbatch_value_and_grad`.
    has_aux: Whether `loss_fn` returns ``(loss, aux)``.
    donate: Donate the parameters and the optimizer state to the step, which updates them
      in place: the arrays passed in are deleted. Without it the step needs room for both
      twice.
    mesh: A `jax.sharding.Mesh`, of explicit or automatic axes: data parallel over
      `data_axis`, and other axes are left to the compiler. The batch's rows are sharded
      over that axis (what is not on the mesh is put there; with several processes, make
      global arrays with `jax.make_array_from_process_local_data`), and `microbatch_size` counts the
      rows on all devices together. Losses, gradients, weights and aux are reduced together,
      so the mean is that of the global batch whatever each device holds. "stack" and "concat"
      have the devices' parts one after the other: for "concat" the batch's own order.
    data_axis: The axis of the mesh that the batch is spread over.
    reduce_gradients: ``"per_cycle"``, one reduction over the devices however many
      microbatches, or ``"per_microbatch"``, which communicates more and, where the parameters
      arrive sharded over the data axis (FSDP), needs less memory: "per_cycle" gathers the
      parameters and scatters the gradients once, and has both in whole meanwhile;
      "per_microbatch" keeps shards between microbatches. Sharded parameters keep their
      sharding, and so do gradients and optimizer state. A parameter that uses the data
      axis otherwise (one dimension over two axes) is in whole on every device meanwhile.
    **options: The keyword arguments of `microbatch_value_and_grad`; `num_microbatches` or
      `microbatch_size` is required. Positions count the arguments of `loss_fn`: 0 are the
      parameters, 1 is the batch.

  Returns:
    The jitted step. Arguments of `loss_fn` after the batch follow the batch in the call.
    With `carry_argnum` the new carry comes before the metrics. ``step.lower(...)`` takes
    the same arguments, so ``step.lower(...).compile().memory_analysis()`` tells the
    memory before anything runs.

    ``metrics`` is a dict of arrays: ``loss``; ``grad_norm``, the global norm of the
    gradients before `tx`, in float32 or better; ``aux``, where there is one;
    ``total_weight`` (float32) and ``skipped_microbatches`` (int32).

  Raises:
    ValueError, TypeError: As `microbatch_value_and_grad`; if `tx` is no optax transformation; if
      `data_axis` is no axis of the mesh, the devices do not divide the rows, or arrays are on
      another mesh; if called inside `pmap` or `shard_map` without `axis_name`, where every
      device would step by its own gradient.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_accum
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> tx = optax.sgd(0.01)
    >>> step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=3)
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> params = jnp.array([1.0, -1.0])
    >>> params, opt_state, metrics = step(params, tx.init(params), batch)
    >>> float(metrics["loss"]), float(metrics["total_weight"])
    (4.0, 6.0)
  """
  _validate.transformation(tx, "tx")
  _validate.one_of("reduce_gradients", reduce_gradients, ("per_cycle", "per_microbatch"))
  unknown = set(options) - set(MicrobatchOptions.__annotations__)
  if unknown:
    raise TypeError(
      f"make_train_step has no argument {', '.join(sorted(unknown))}; beside its own it takes"
      f" {', '.join(MicrobatchOptions.__annotations__)}."
    )
  reductions = options.pop("reduction", "mean"), options.pop("aux_reduction", "mean")
  split = Split(**cast(Any, {"batch_argnums": 1, **options}))
  loss = _Loss(loss_fn, has_aux, *reductions, split)
  loss.cycle(split)  # checks the reductions
  step = _Step(optax.with_extra_args_support(tx), loss)
  donated = (0, 1) if donate else ()
  if mesh is None:

    def train_step(params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
      return step.run(params, opt_state, *args, **kwargs)

    jitted = jax.jit(train_step, donate_argnums=donated)
    return _DonatingStep(jitted) if donate else jitted
  parallel = DataParallel(mesh, data_axis, reduce_gradients == "per_microbatch")
  return _DonatingStep(_MeshStep(step, parallel, donated))


class _Loss(NamedTuple):
  """A loss function, and how it is run in microbatches."""

  fun: Callable[..., Any]
  has_aux: bool
  reduction: str
  aux_reduction: Any
  split: Split

  def cycle(self, split: Split, shards: Shards | None = None) -> Callable[..., Any]:
    """``(params, ...) -> (carry, outputs, stats)``."""
    return value_and_grad_cycle(
      self.fun, 0, self.has_aux, self.reduction, self.aux_reduction, split, shards
    )

  def value(self, split: Split, shards: Shards | None = None) -> Callable[..., jax.Array]:
    """``(params, ...) -> loss``."""
    return loss_cycle(self.fun, self.has_aux, self.reduction, split, shards)


class _Step(NamedTuple):
  """A step of `tx` by the gradient of a loss."""

  tx: optax.GradientTransformationExtraArgs
  loss: _Loss

  def run(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    """The step on one device, or on one of the devices of an `axis_name`."""
    split = self.loss.split
    if split.axis_name is None:
      _validate.no_manual_axes()
    return self.finish(
      self.loss.cycle(split), self.loss.value(split), params, opt_state, *args, **kwargs
    )

  def finish(
    self,
    cycle: Callable[..., Any],
    value: Callable[..., jax.Array],
    params: Any,
    opt_state: Any,
    *args: Any,
    **kwargs: Any,
  ) -> Any:
    """Gradients by `cycle`, and the optimizer's step with them."""
    carry, out, stats = cycle(params, *args, **kwargs)

    def value_fn(params: Any, weight: Any = None) -> jax.Array:
      del weight  # optax's line searches refuse an extra argument that value_fn lacks
      return value(params, *args, **kwargs)

    counted = stats.total_weight != 0
    extra_args = {
      "value": out.loss,
      "grad": out.grads,
      "value_fn": value_fn,
      # A sum is not to be weighed again.
      "weight": stats.total_weight
      if self.loss.reduction == "mean"
      else counted.astype(jnp.float32),
    }

    def update(held: Any) -> Any:
      params, opt_state = held
      updates, opt_state = self.tx.update(
        out.grads, opt_state, params, **_accepted(self.tx.update, extra_args)
      )
      return optax.apply_updates(params, updates), opt_state

    # A transformation that accumulates knows itself what a weight of zero means.
    accumulates = any(isinstance(x, AccumulateState) for x in _states(opt_state))
    with jax.named_scope("optimizer"):
      if self.loss.split.weighs and not accumulates:
        held = update_if(counted, update, (params, opt_state))
      else:
        held = update((params, opt_state))
    metrics = {"loss": out.loss, "grad_norm": _global_norm(out.grads), **stats._asdict()}
    if self.loss.has_aux or carry:
      metrics["aux"] = out.aux
    return *held, *carry, metrics


class _MeshStep:
  """The step over a mesh, jitted once for every way that parameters and state are sharded."""

  def __init__(self, step: _Step, parallel: DataParallel, donated: tuple[int, ...]):
    self._step, self._parallel, self._donated = step, parallel, donated
    self._jitted: dict[Any, Any] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    jitted, args, kwargs = self._prepare(*args, **kwargs)
    return jitted(*args, **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As ``lower`` of a jitted function; takes `jax.ShapeDtypeStruct`s too."""
    jitted, args, kwargs = self._prepare(*args, **kwargs)
    return jitted.lower(*args, **kwargs)

  def _prepare(self, params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> Any:
    parallel, split, loss_fn = self._parallel, self._step.loss.split, self._step.loss.fun
    called = (params, *args)
    wanted = (*split.batch_argnums, *split.batch_argnames)
    slots = _arguments.find_slots("batch_argnums", wanted, loss_fn, called, kwargs)

    def put(slot: _arguments.Slot, x: Any) -> Any:
      if slot in slots:
        return parallel.place_batch(f"batch argument {slot!r}", x, split)
      return parallel.place(f"argument {slot!r}", x, lambda _: PartitionSpec())

    params, opt_state = (
      parallel.place(name, x, lambda _: PartitionSpec())
      for name, x in (("params", params), ("opt_state", opt_state))
    )
    rest = tuple(put(i, x) for i, x in enumerate(args, 1))
    named = {name: put(name, x) for name, x in kwargs.items()}
    shardings = jax.tree.map(lambda x: getattr(x, "sharding", None), (params, opt_state))
    leaves, treedef = jax.tree.flatten((params, opt_state))
    key = (treedef, slots, *(getattr(x, "sharding", None) for x in leaves))
    if key not in self._jitted:
      self._jitted[key] = self._jit(parallel.spread(params), slots, shardings)
    return self._jitted[key], (params, opt_state, *rest), named

  def _jit(self, spread: Any, slots: tuple[_arguments.Slot, ...], shardings: Any) -> Any:
    parallel, loss = self._parallel, self._step.loss
    aux = jax.tree.map(
      lambda kind: PartitionSpec(*[parallel.axis] * (kind in _reductions.COLLECTED)),
      loss.aux_reduction,
    )
    specs = parallel.specs(spread)
    everywhere = PartitionSpec()

    def cycle(*args: Any, **kwargs: Any) -> Any:
      return parallel.run(
        lambda local, shards, *args, **kwargs: loss.cycle(local, shards)(*args, **kwargs),
        spread,
        (everywhere, Outputs(everywhere, aux, specs), everywhere),
        loss.split,
        slots,
        args,
        kwargs,
      )

    def gradients(*args: Any, **kwargs: Any) -> Any:
      carry, out, stats = cycle(*args, **kwargs)
      return carry, out._replace(grads=parallel.like(out.grads, shardings[0])), stats

    def value(*args: Any, **kwargs: Any) -> jax.Array:
      return parallel.run(
        lambda local, shards, *args, **kwargs: loss.value(local, shards)(*args, **kwargs),
        spread,
        everywhere,
        loss.split,
        slots,
        args,
        kwargs,
      )

    # Parameters and state come out as they came: left to choose, XLA may shard them otherwise.
    carries = loss.split.carry_argnum is not None

    def train_step(*args: Any, **kwargs: Any) -> Any:
      return self._step.finish(gradients, value, *args, **kwargs)

    return jax.jit(
      train_step,
      donate_argnums=self._donated,
      out_shardings=(*shardings, *[None] * (1 + carries)),
    )


def _states(opt_state: Any) -> list[Any]:
  return jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AccumulateState))


def _accepted(update: Callable[..., Any], extra_args: dict[str, Any]) -> dict[str, Any]:
  """The extra arguments that `update` takes: some transformations refuse those they do not."""
  parameters = inspect.signature(update).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return extra_args
  return {name: x for name, x in extra_args.items() if name in parameters}


class _DonatingStep:
  """A jitted step that takes states in which one array stands twice.

  ``init`` of optax's `lbfgs` returns such a state, and XLA refuses to be donated one buffer
  twice. All that the step returns is distinct, so this copies once.
  """

  def __init__(self, jitted: Callable[..., Any]):
    self._jitted = jitted

  def __call__(self, params: Any, opt_state: Any, /, *args: Any, **kwargs: Any) -> Any:
    seen: set[int] = set()

    def distinct(x: Any) -> Any:
      if id(x) in seen and isinstance(x, jax.Array):
        return jnp.copy(x)
      seen.add(id(x))
      return x

    params, opt_state = jax.tree.map(distinct, (params, opt_state))
    return self._jitted(params, opt_state, *args, **kwargs)

  def __getattr__(self, name: str) -> Any:  # lower, trace, eval_shape, clear_cache, ...
    if name == "_jitted":  # while a copy is being made
      raise AttributeError(name)
    return getattr(self._jitted, name)


def _global_norm(tree: chex.ArrayTree) -> jax.Array:
  return optax.tree.norm(jax.tree.map(lambda x: x.astype(_reduce.accumulator_dtype(x.dtype)), tree))
