"""N backward passes and one optimizer step as one program, with its arguments and donation."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum._arithmetic.trees import Args, Kwargs, Leaves, OptState, Params, Tree
from optax_accum._microbatches.noise_scale import noise_terms, squared_norm
from optax_accum._train_step.donation import arrays, check_alive, distinct, Known
from optax_accum._train_step.optimizer_step import has_stepped, loss_elsewhere, optimizer_step
from optax_accum._train_step.step import Loss, Placed, Step

Transform: TypeAlias = optax.GradientTransformationExtraArgs


class PreparedCall(NamedTuple):
  """What a call runs: a jitted function, and the arguments as it takes them."""

  jitted: Any
  args: Args
  kwargs: Kwargs
  others: Leaves  # the arrays of what is not updated, as they were passed


@dataclasses.dataclass(eq=False, repr=False)
class StepProgram:
  """A step of `tx` with the gradient of a loss, compiled for each sharding of its arguments.

  It takes the parameters, the optimizer state, and the other arguments of the loss. It returns new
  ones of the first two, the carry if there is one, and the metrics.
  """

  step: Step  # whose program it is
  loss: Loss
  tx: Transform
  donate: bool  # whether what is updated is donated

  def __post_init__(self) -> None:
    self.local = self.loss.local
    self._jitted: dict[Placed, Any] = {}
    self._returned, self._passed = Known([]), Known([])  # in the last call

  def prepare(self, args: Args, kwargs: Kwargs, kept: Tree = ()) -> PreparedCall:
    """Checks and places the arguments, and copies those donated twice or still needed (`kept`)."""
    held = arrays(self._updated_of(args))
    others = arrays(([x for i, x in enumerate(args) if i not in self.step.updated], kwargs, kept))
    check_alive([*held, *others], lambda: self.step.names(*args, **kwargs))
    loss, placed, named = self.loss.place(args, kwargs)
    if self.donate:
      new = [*self._returned.new(held), *self._passed.new(others)]
      there = self._updated_of(placed)
      once = distinct(there, held if placed is args else arrays(there), others, new)
      if once is not there:
        copied = dict(zip(self.step.updated, once, strict=True))
        placed = tuple(copied.get(i, x) for i, x in enumerate(placed))
    if loss not in self._jitted:
      self._jitted[loss] = self._compiled(loss)
    return PreparedCall(self._jitted[loss], placed, named, others)

  def run(self, call: PreparedCall) -> tuple[Any, ...]:
    """One step."""
    out = call.jitted(*call.args, **call.kwargs)
    if self.donate:
      updated = out[: len(self.step.updated)]
      self._returned, self._passed = Known(arrays(updated)), Known(call.others)
    return out

  def _updated_of(self, args: Args) -> Args:
    return tuple(args[i] for i in self.step.updated)

  def _compiled(self, loss: Placed) -> Any:
    """The jitted function for a loss."""
    known = loss.out_shardings
    shardings = (*known, *[None] * self.step.beside) if known else None
    donated = self.step.updated if self.donate else ()
    run = self.step.finished(self.function(loss))
    return jax.jit(run, donate_argnums=donated, out_shardings=shardings)

  def function(self, loss: Placed) -> Callable[..., Any]:
    """One step of `tx` by the gradient of `loss`."""
    local = self.local

    def train_step(params: Params, opt_state: OptState, /, *args: Any, **kwargs: Any) -> Args:
      self.step.check_arguments(params, opt_state, *args, **kwargs)
      beside = loss.beside(params, opt_state)
      reduced = beside.value_and_grad(None, params, *args, **kwargs)
      out, stats = reduced.outputs, reduced.stats
      weight, counted = stats.total_weight, stats.total_weight != 0
      if local.reduction.name != "mean":  # a sum is not to be weighed again
        weight = counted.astype(weight.dtype) if local.split.weighs else 1.0
      value_fn = functools.partial(loss_elsewhere, beside, reduced.weights, args, kwargs)
      extra_args = {"value": out.loss, "grad": out.grads, "value_fn": value_fn, "weight": weight}

      with jax.named_scope("optimizer"):
        moves = counted if local.split.weighs else True
        update = functools.partial(optimizer_step, self.tx, out.grads, extra_args, moves)
        new = beside.stepped(update, params, opt_state)
      of_mean = squared_norm(local.derivatives(out.grads))
      metrics = {"loss": out.loss, "grad_norm": jnp.sqrt(of_mean), **stats._asdict()}
      metrics["stepped"] = counted & has_stepped(opt_state, new[1])
      if local.noise_scale:
        metrics["noise_scale"] = noise_terms(out.noise, of_mean, stats.total_weight)
      if local.has_aux or reduced.carry:
        metrics["aux"] = out.aux
      return *new, *reduced.carry, metrics

    return train_step
