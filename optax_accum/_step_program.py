"""N backward passes and one optimizer step as one program: its arguments, placed and donated."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from optax_accum import _parameters, _settings
from optax_accum._donation import check_alive, Donation
from optax_accum._loss import LocalLoss, MeshLoss
from optax_accum._optimizer_step import optimizer_step
from optax_accum._value_fn import loss_elsewhere
from optax_accum._weighted_mean import accumulator_dtype

Transform: TypeAlias = optax.GradientTransformationExtraArgs


class PreparedCall(NamedTuple):
  """What a call runs: a jitted function, and the arguments as it takes them."""

  jitted: Any
  args: tuple[Any, ...]
  kwargs: Mapping[str, Any]
  others: list[Any]  # the leaves that were passed and not donated


@dataclasses.dataclass(eq=False, repr=False)
class StepProgram:
  """A step of `tx` by the gradient of a loss, compiled for each way to shard its arguments.

  Its arguments are the parameters, the optimizer state, and all others of the loss. It returns the
  first two anew, the carry if there is one, and the metrics. A step of another signature is one
  with another `function`, whose arguments begin alike, and with its own words for them.
  """

  local: LocalLoss
  loss: LocalLoss | MeshLoss
  tx: Transform
  donated: tuple[int, ...]  # the positions of what the first results replace, in their order
  results: int  # how many there are

  def __post_init__(self) -> None:
    self._jitted: dict[Any, Any] = {}
    self._donation = Donation()

  def prepare(
    self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kept: Any = ()
  ) -> PreparedCall:
    """Checks the arguments, puts them on the mesh, and sees that nothing is donated twice.

    `kept` are arrays that are not passed, and that the caller has further use for.
    """
    donated, others = before = self._leaves(args, kwargs)
    goes_on = self._donation.goes_on(donated)  # told from the arrays
    told_by_jax = goes_on and self.loss is self.local  # it takes a while for many leaves
    check_alive(others if told_by_jax else [*donated, *others], self.names(args, kwargs))
    if not goes_on:
      self.check(*args)
    _settings.refuse(others, self.local.fun, args[2:], kwargs)
    loss, placed, named = self.loss.place(args, kwargs)
    after = before if placed is args else self._leaves(placed, named)
    if loss not in self._jitted:
      shardings = loss.out_shardings and (*loss.out_shardings, *[None] * (self.results - 2))
      self._jitted[loss] = jax.jit(
        self.function(loss), donate_argnums=self.donated, out_shardings=shardings
      )
    elsewhere = jax.tree.leaves(kept)
    others = [*others, *elsewhere]
    if self.donated:
      both = (donated, after[0]), (others, [*after[1], *elsewhere])
      distinct = self._donation.distinct(*both, goes_on)
      if distinct is not after[0]:
        placed = self._with_donated(placed, distinct)
    return PreparedCall(self._jitted[loss], placed, named, others)

  def run(self, call: PreparedCall) -> tuple[Any, ...]:
    """One step."""
    try:
      out = call.jitted(*call.args, **call.kwargs)
    except (RuntimeError, ValueError) as error:
      if "deleted" in str(error):
        check_alive(jax.tree.leaves((call.args, call.kwargs)), self.names(call.args, call.kwargs))
      raise
    if self.donated:
      self._donation.remember(jax.tree.leaves(out[: len(self.donated)]), call.others)
    return out

  def function(self, loss: Any) -> Callable[..., Any]:
    """What is compiled."""
    return _step_function(self.local, loss, self.tx)

  def check(self, *args: Any) -> None:
    """Checks arguments that are not what the last call returned."""
    _parameters.check_step(*args)

  def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, by the names that messages have for them."""
    return {f"argument {slot!r}": x for slot, x in (*enumerate(args), *kwargs.items())}

  def _leaves(
    self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
  ) -> tuple[list[Any], list[Any]]:
    """The leaves of what is donated, and of what is not."""
    others = [x for i, x in enumerate(args) if i not in self.donated]
    donated = [args[i] for i in self.donated]
    return jax.tree.leaves(donated), jax.tree.leaves((others, kwargs))

  def _with_donated(self, args: tuple[Any, ...], leaves: list[Any]) -> tuple[Any, ...]:
    """The arguments, with other leaves in what is donated."""
    treedef: Any = jax.tree.structure([args[i] for i in self.donated])
    new = dict(zip(self.donated, treedef.unflatten(leaves), strict=True))
    return tuple(new.get(i, x) for i, x in enumerate(args))


def _step_function(local: LocalLoss, placed: Any, tx: Transform) -> Callable[..., Any]:
  """One step of `tx` by the gradient of a loss."""

  def train_step(params: Any, opt_state: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    loss = placed.beside(params, opt_state)
    reduced = loss.value_and_grad(None, params, *args, **kwargs)
    out, stats = reduced.outputs, reduced.stats
    counted = stats.total_weight != 0
    averages = local.reduction.name == "mean"  # a sum is not to be weighed again
    weight = stats.total_weight
    if not averages:
      weight = counted.astype(weight.dtype) if local.split.weighs else 1.0
    value_fn = functools.partial(loss_elsewhere, loss, reduced.weights, args, kwargs)
    extra_args = {"value": out.loss, "grad": out.grads, "value_fn": value_fn, "weight": weight}

    with jax.named_scope("optimizer"):
      moves = counted if local.split.weighs else True
      update = functools.partial(optimizer_step, tx, out.grads, extra_args, moves)
      new = loss.stepped(update, params, opt_state)
    derivatives = local.derivatives(out.grads)
    wide = jax.tree.map(lambda x: x.astype(accumulator_dtype(x.dtype)), derivatives)
    metrics = {"loss": out.loss, "grad_norm": optax.tree.norm(wide), **stats._asdict()}
    if local.has_aux or reduced.carry:
      metrics["aux"] = out.aux
    return *new, *reduced.carry, metrics

  return train_step
