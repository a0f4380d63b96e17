"""N backward passes and one optimizer step as one program: its arguments, placed and donated."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_accum._microbatches import parameters
from optax_accum._microbatches.loss import LocalLoss
from optax_accum._microbatches.noise_scale import noise_terms, squared_norm
from optax_accum._train_step.donation import check_alive, distinct, Shards
from optax_accum._train_step.flattened import Flattened
from optax_accum._train_step.last_call import joined, LastCall, Passed
from optax_accum._train_step.optimizer_step import optimizer_step
from optax_accum._train_step.step import Loss
from optax_accum._train_step.value_fn import loss_elsewhere

Transform: TypeAlias = optax.GradientTransformationExtraArgs
Leaves: TypeAlias = list[Any]

_KEPT = None  # where what is kept is among arguments


class PreparedCall(NamedTuple):
  """What a call runs: a jitted function, and the arguments as it takes them."""

  jitted: Any
  flat: Any  # the same, with what is updated `Flattened`, in and out
  args: tuple[Any, ...]
  kwargs: Mapping[str, Any]
  updated: list[Flattened]
  passed: Passed


@dataclasses.dataclass(eq=False, repr=False)
class StepProgram:
  """A step of `tx` by the gradient of a loss, compiled for each way to shard its arguments.

  Its arguments are the parameters, the optimizer state, and all others of the loss. It returns the
  first two anew, the carry if there is one, and the metrics. A step of another signature is one
  with another `function`, whose arguments begin alike, and with its own words for them.

  What the last call returned, and what else it was passed, is not looked at again.
  """

  loss: Loss
  tx: Transform
  updated: tuple[int, ...]  # the positions of what the first results replace, in their order
  results: int  # how many there are
  donate: bool  # whether what is updated is donated

  def __post_init__(self) -> None:
    self.local = self.loss.local
    self._jitted: dict[Any, tuple[Any, Any]] = {}
    self._recent: tuple[Any, Any] = None, None  # a loss and its functions: a loss is long to hash
    self._shards = Shards()
    self._last = LastCall([], Passed({}, frozenset(), None))

  def prepare(
    self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kept: Any = ()
  ) -> PreparedCall:
    """Checks the arguments, puts them on the mesh, and sees that nothing is donated twice.

    `kept` are arrays that are not passed, and that the caller has further use for.
    """
    last, updated = self._last, [Flattened.of(args[i]) for i in self.updated]
    held, given = joined(x.leaves for x in updated), self._others(args, kwargs)
    others = {slot: jax.tree.leaves(x) for slot, x in given.items()}
    goes_on, new = last.returned(held) and last.had_trees(updated), last.new(others)
    told_by_jax = goes_on and last.on_one_device  # it takes a while for many leaves
    alive = joined([[] if told_by_jax else held, *others.values()])
    check_alive(alive, lambda: self.names(args, kwargs))
    if not goes_on:
      self.check(*args)
      parameters.check_count(len(args) + len(kwargs))

    on_mesh = self.loss is not self.local
    before = last.loss if on_mesh and goes_on else None
    same = last.there - new.keys()
    loss, placed, named = self.loss.place(args, kwargs, before, same)
    there = {slot for slot, x in self._others(placed, named).items() if x is given[slot]}
    if placed is not args:
      moves = zip(self.updated, updated, strict=True)
      updated = [x if placed[i] is args[i] else Flattened.of(placed[i]) for i, x in moves]
    others[_KEPT] = jax.tree.leaves(kept)
    passed = Passed(others, there, loss)
    if self.donate:
      placed, updated = self._distinct(placed, held, updated, passed, last, goes_on)
    return PreparedCall(*self._functions(loss, updated), placed, named, updated, passed)

  def run(self, call: PreparedCall) -> tuple[Any, ...]:
    """One step."""
    args = [*call.args]
    for i, x in zip(self.updated, call.updated, strict=True):
      args[i] = x
    try:
      out = call.flat(*args, **call.kwargs)
    except (RuntimeError, ValueError) as error:
      if "deleted" in str(error):
        leaves = jax.tree.leaves((call.args, call.kwargs))
        check_alive(leaves, lambda: self.names(call.args, call.kwargs))
      raise
    count = len(self.updated)
    self._last = LastCall(out[:count], call.passed)
    return (*[x.tree() for x in out[:count]], *out[count:])

  def _distinct(
    self,
    args: Any,
    held: Leaves,
    updated: list[Flattened],
    passed: Passed,
    last: LastCall,
    goes_on: bool,
  ) -> tuple[Any, list[Flattened]]:
    """The arguments, and those that are updated, with a copy of what is passed a second time."""
    new = joined(last.new(passed.others).values())
    if goes_on and not self._shards.may_have(new):
      return args, updated  # soon found: every call comes here
    placed = joined(x.leaves for x in updated)
    if not goes_on:
      new += last.not_returned(held, placed)
    leaves = distinct((held, placed), joined(passed.others.values()), new)
    if leaves is placed:
      return args, updated
    rest = iter(leaves)
    updated = [Flattened([next(rest) for _ in x.leaves], x.treedef) for x in updated]
    trees = dict(zip(self.updated, (x.tree() for x in updated), strict=True))
    return tuple(trees.get(i, x) for i, x in enumerate(args)), updated

  def _others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """What is not updated, by where the loss has it."""
    return {i - 1: x for i, x in enumerate(args) if i not in self.updated} | dict(kwargs)

  def _functions(self, loss: Any, updated: list[Flattened]) -> tuple[Any, Any]:
    """The jitted function for a loss, and the same with what is updated `Flattened`."""
    if loss is not self._recent[0]:
      if loss not in self._jitted:
        self._jitted[loss] = self._made(loss, updated)
      self._recent = loss, self._jitted[loss]
    return self._recent[1]

  def _made(self, loss: Any, updated: list[Flattened]) -> tuple[Any, Any]:
    function, known = self.function(loss), list(loss.out_shardings or ())
    donated, rest = self.updated if self.donate else (), [None] * (self.results - len(known))
    flat_known = [x.alike(tree) for x, tree in zip(updated, known, strict=False)]

    @functools.wraps(function)
    def flat(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
      out = function(*[x.tree() if isinstance(x, Flattened) else x for x in args], **kwargs)
      new = [*map(Flattened.of, out[: len(self.updated)])]
      for x, like in itertools.zip_longest(new, flat_known):
        self._shards.add(x.leaves, like.leaves if like else [None] * len(x.leaves))
      return (*new, *out[len(new) :])

    flat_rest = *known[len(flat_known) :], *rest
    shardings = ((*known, *rest), (*flat_known, *flat_rest)) if known else (None, None)
    jitted = functools.partial(jax.jit, donate_argnums=donated)
    return jitted(function, out_shardings=shardings[0]), jitted(flat, out_shardings=shardings[1])

  def function(self, loss: Any) -> Callable[..., Any]:
    """What is compiled."""
    return _step_function(self.local, loss, self.tx)

  def check(self, *args: Any) -> None:
    """Checks arguments that are not what the last call returned."""
    parameters.check_step(*args)

  def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, by the names that messages have for them."""
    return {f"argument {slot!r}": x for slot, x in (*enumerate(args), *kwargs.items())}


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
    of_mean = squared_norm(local.derivatives(out.grads))
    metrics = {"loss": out.loss, "grad_norm": jnp.sqrt(of_mean), **stats._asdict()}
    if local.noise_scale:
      metrics["noise_scale"] = noise_terms(out.noise, of_mean, stats.total_weight)
    if local.has_aux or reduced.carry:
      metrics["aux"] = out.aux
    return *new, *reduced.carry, metrics

  return train_step
