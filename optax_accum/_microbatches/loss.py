"""A loss run in microbatches: its value, or value and gradient, on one device."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _validate
from optax_accum._arithmetic import (
  across_devices,
  reduction_words,
  weighted_mean,
)
from optax_accum._arithmetic.reductions import Mean, Reduction, REDUCTIONS, Sum
from optax_accum._arithmetic.trees import (
  Args,
  Carry,
  Grads,
  Kwargs,
  Leaf,
  Params,
  Tree,
)
from optax_accum._arithmetic.weighted_mean import Weight
from optax_accum._microbatches import options, parameters
from optax_accum._microbatches.cut import batch_rows, Microbatches
from optax_accum._microbatches.in_place import Accumulators, check_options
from optax_accum._microbatches.loop import Reduced, run_in_microbatches, runner
from optax_accum._microbatches.noise_scale import (
  check_noise_scale,
  noise_of,
  noise_reductions,
)
from optax_accum._microbatches.options import Split
from optax_accum._microbatches.traced_loss import TracedLoss

_ASKED = ("reduction", "grad_reduction", "aux_reduction")


class Outputs(NamedTuple):
  """What the scan reduces. Messages call it by these names."""

  loss: Leaf
  aux: Tree
  grads: Grads
  noise: Tree = None  # a `Noise`, where it is asked for
  weights: Tree = (
    None  # of each microbatch of a device, where some may be left out
  )


@dataclasses.dataclass(eq=False, repr=False)
class LocalLoss:
  """A loss on one device, or on each of the devices of an `axis_name`."""

  fun: Callable[..., Tree]
  argnums: int | Sequence[int]
  has_aux: bool
  split: Split
  asked: (
    Kwargs  # options as they were given, of which those of `_ASKED` are kept
  )
  noise_scale: bool = False
  # Gathers the parameters in a microbatch. Its other arguments tie this to the loop.
  gather_in_loop: Callable[..., Params] = lambda params, *others: params
  tell: Callable[[bool], object] = (
    bool  # is told whether devices exchange something, once traced
  )

  def __post_init__(self) -> None:
    _validate.function(self.fun)
    _validate.booleans(has_aux=self.has_aux, noise_scale=self.noise_scale)
    positions = options.names_or_positions("argnums", self.argnums, int)
    if not positions or len(set(positions)) < len(positions):
      raise ValueError(
        f"argnums={self.argnums!r} must name one or more arguments, each once."
      )
    self.asked = {name: self.asked[name] for name in _ASKED}
    word, grads, aux = (self.asked[name] for name in _ASKED)
    self.reduction = REDUCTIONS[
      _validate.one_of("reduction", word, ("mean", "sum"))
    ]  # of losses
    check_noise_scale(self.noise_scale, self.split, word)
    check_options(self.split, grads)
    # Prefix trees of reductions.
    self.grad_reduction = reduction_words.named(
      "grad_reduction", grads, self.reduction
    )
    self.aux_reduction = reduction_words.named(
      "aux_reduction", aux, Mean(default=True)
    )

  def value(self, weights: Leaf, /, *args: Tree, **kwargs: Tree) -> jax.Array:
    """The loss alone. `weights` are those of the microbatches, if they are known."""
    call = Microbatches(
      self.fun, self.split, args, kwargs, self._positions(args), weights
    )
    reductions = Outputs(self.reduction, None, None)
    return run_in_microbatches(
      call, runner(call, self._evaluate), reductions
    ).outputs.loss

  def value_and_grad(
    self, weights: Leaf, /, *args: Tree, **kwargs: Tree
  ) -> Reduced:
    """The loss and its gradients. A device that has shards of parameters gets shards of these."""
    positions = self._positions(args)
    held = list(args)
    for i in positions:
      parameters.check_differentiable(self.split.name(i), args[i])
      arrays = jax.tree.map(jnp.asarray, args[i])
      held[i] = across_devices.varying(arrays, self.split.axis_name)
    args = tuple(held)
    call = Microbatches(self.fun, self.split, args, kwargs, positions, weights)
    accumulators, grads = None, self.grad_reduction
    if self.split.in_place and not call.is_whole:
      accumulators = Accumulators(
        args, self.argnums, grads, self.split.accumulator_dtype
      )
      grads = accumulators.reductions
    traced, sends = None, False
    if self.split.axis_name is not None:
      is_mean = self.reduction.name == "mean"
      traced = TracedLoss(
        self._run, call, positions, self.gather_in_loop, is_mean
      )
      sends = traced.sends_back
      self.tell(traced.sends)
    if sends:
      grads = jax.tree.map(self._of_weighed, grads)
    noise = noise_reductions(call.count) if self.noise_scale else None
    recorded = (
      REDUCTIONS["stack"]
      if self.split.skip_nonfinite and weights is None
      else None
    )
    reductions = Outputs(
      self.reduction, self.aux_reduction, grads, noise, recorded
    )
    run = runner(
      call, functools.partial(self._differentiate, accumulators, traced), sends
    )
    return run_in_microbatches(call, run, reductions, root="")

  def derivatives(self, grads: Grads) -> Grads:
    """`grads`, with None for those that are no derivatives of the loss, because of a reduction."""
    name = self.reduction.name
    each = reduction_words.match("grad_reduction", self.grad_reduction, grads)
    return jax.tree.map(
      lambda kind, g: g if kind.name == name else None, each, grads
    )

  def _positions(self, args: Args) -> Any:
    """The positions of what is differentiated."""
    wanted = options.names_or_positions("argnums", self.argnums, int)
    return options.find_slots("argnums", wanted, self.fun, args, {})

  def _evaluate(
    self, call: Microbatches, _: None, /, *inputs: Tree
  ) -> tuple[Carry, Outputs]:
    """One microbatch's new carry and loss."""
    args, kwargs = call.arguments(inputs)
    loss, (carry, _) = self._run(
      self.gather_in_loop(*args), *args[1:], **kwargs
    )
    return carry, Outputs(loss, None, None)

  def _differentiate(
    self,
    accumulators: Accumulators | None,
    traced: TracedLoss | None,
    call: Microbatches,
    factor: Any,
    /,
    *inputs: Tree,
  ) -> tuple[Carry, Outputs]:
    """One microbatch's new carry, loss, aux and gradients."""
    args, kwargs = call.arguments(inputs)
    params = self.gather_in_loop(*args)
    run = self._run if traced is None else functools.partial(traced, inputs)
    value_and_grad = jax.value_and_grad(run, self.argnums, has_aux=True)
    if factor is not None and self.reduction.name != "mean":
      factor = weighted_mean.counts(factor) * 1.0
    if accumulators is not None:
      value_and_grad = functools.partial(
        accumulators.value_and_grad, run, factor
      )
    elif factor is not None:
      value_and_grad = functools.partial(
        self._weigh_and_differentiate, run, factor
      )
    (loss, (carry, aux)), grads = value_and_grad(params, *args[1:], **kwargs)
    reduction_words.match("aux_reduction", self.aux_reduction, aux)
    reduction_words.match(
      "grad_reduction", self.grad_reduction, grads, "gradients"
    )
    noise = noise_of(self.derivatives(grads)) if self.noise_scale else None
    if noise is not None and factor is not None:
      noise = noise._replace(squared_norm=noise.squared_norm / factor**2)
    return carry, Outputs(loss, aux, grads, noise)

  def _weigh_and_differentiate(
    self,
    run: Callable[..., Tree],
    factor: Weight,
    /,
    *args: Tree,
    **kwargs: Tree,
  ) -> tuple[tuple[Leaf, Tree], Grads]:
    """As `jax.value_and_grad`, with the gradients of the factor times the loss."""

    def weighed(*args: Tree, **kwargs: Tree) -> tuple[Leaf, Tree]:
      loss, others = run(*args, **kwargs)
      if isinstance(factor, jax.Array) and jnp.finfo(loss.dtype).bits < 32:
        raise TypeError(
          f"The loss has dtype {loss.dtype}, to which its weight would be rounded: it sends"
          " something to other devices, and so is weighed before it is differentiated. Return it"
          " in float32."
        )
      return loss * jnp.asarray(factor, loss.dtype), (loss, others)

    value_and_grad = jax.value_and_grad(weighed, self.argnums, has_aux=True)
    (_, out), grads = value_and_grad(*args, **kwargs)
    return out, grads

  def _of_weighed(self, kind: Reduction) -> Reduction:
    """The reduction of gradients of a loss that was weighed before it was differentiated."""
    if not isinstance(kind, Sum):
      return kind
    if kind.name != self.reduction.name:
      raise ValueError(
        f'grad_reduction="{kind.name}" with reduction="{self.reduction.name}", of a loss that sends'
        " something to other devices: what crosses devices is weighed as losses are. Leave it out."
      )
    return dataclasses.replace(kind, is_weighed=True)

  def _run(
    self, /, *args: Tree, **kwargs: Tree
  ) -> tuple[Leaf, tuple[Carry, Tree]]:
    """The user's function on one microbatch: ``(loss, (new_carry, aux))``."""
    try:
      out = self.fun(*args, **kwargs)
    except (TypeError, ValueError) as error:
      roles = self.split.roles(self.fun, args, kwargs, self._positions(args))
      if note := options.note_on_settings(error, self.fun, roles):
        error.add_note(note)
      if "shape" in str(error):
        rows = batch_rows(
          self.split, roles.batch, dict([*enumerate(args), *kwargs.items()])
        )
        error.add_note(
          f"The loss was given {rows} rows, a microbatch on one device."
        )
      raise
    carries = self.split.carry_argnum is not None
    check_loss(out, self.has_aux or carries, carries)
    if carries:
      return out
    return (out[0], (None, out[1])) if self.has_aux else (out, (None, None))

  def place(
    self, args: Args, kwargs: Kwargs
  ) -> tuple["LocalLoss", Args, Kwargs]:
    """The loss that a step with such arguments runs, and the arguments as it takes them."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and self.split.axis_name is None:
      raise ValueError(
        f"The step is called inside pmap or shard_map over {axes} without axis_name, so each device"
        " would step with its own gradient: pass axis_name=, or call it outside, with mesh=."
      )
    return self, args, kwargs

  # What follows is what a step asks of a `PlacedLoss`, which has more to do.
  local = property(lambda self: self)  # the loss on one device
  parallel = None  # the `DataParallel` of a loss over a mesh
  out_shardings = None  # of what a step returns first: left to the compiler

  def beside(self, params: Params, opt_state: Tree) -> "LocalLoss":
    """The loss whose gradients are sharded as a step with this state needs them."""
    return self

  def stepped(
    self, update: Callable[[Tree], Tree], params: Params, opt_state: Tree
  ) -> Tree:
    """What `update` makes of parameters that are sharded as the gradients meanwhile."""
    return update((params, opt_state))


def check_loss(out: Tree, has_aux: bool, carries: bool) -> None:
  """Checks what a loss function returned."""

  def is_pair(x: Tree) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2

  def kind(x: Tree) -> str:
    return (
      type(x).__name__
      if x is None or isinstance(x, (tuple, list, dict))
      else ""
    )

  if has_aux and not (is_pair(out) and (not carries or is_pair(out[1]))):
    wanted = "carry_argnum it must return (loss, (new_carry, aux))"
    wanted = wanted if carries else "has_aux=True it must return (loss, aux)"
    raise TypeError(
      f"The function returned a {kind(out) or 'single value'}; with {wanted}."
    )
  loss = out[0] if has_aux else out
  if got := kind(loss):
    got = f"is a {got}"
  elif jnp.shape(loss) or not jnp.issubdtype(
    jnp.result_type(loss), jnp.floating
  ):
    got = f"has shape {jnp.shape(loss)} and dtype {jnp.result_type(loss)}"
  if got:
    raise TypeError(
      f"The loss {got}; it must be a real scalar: take the mean or sum over the rows, in a floating"
      " dtype. If the rest is auxiliary, return (loss, aux) and pass has_aux=True;"
      " if it is jax.value_and_grad of a loss, give that loss itself."
    )
