"""A loss of several devices, traced once: what they exchange is looked at before it runs."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.trees import Args, Params, Tree
from optax_accum._microbatches import collectives, keys_and_carry
from optax_accum._microbatches.cut import Microbatches, Take

Run: TypeAlias = Callable[..., Tree]


class TracedLoss:
  """What `run` computes, ``(loss, others)``, of a microbatch of each size.

  `positions` are those of what is differentiated. `gather` makes of the first argument there what a
  microbatch uses. `sends` says whether devices exchange something, and `sends_back` whether what
  they exchange is gradients, so that the loss is weighed before it is differentiated.
  """

  def __init__(
    self,
    run: Run,
    call: Microbatches,
    positions: Sequence[int],
    gather: Run,
    is_mean: bool,
  ) -> None:
    self._run, self._call, self._positions, self._gather = (
      run,
      call,
      positions,
      gather,
    )
    self._is_mean, self.sends, self.sends_back = is_mean, False, False
    take, tail = call.cut
    self._programs = dict([self._traced(lambda: take(0))])
    if call.tail_rows:
      self._programs.update([self._traced(lambda: tail)])

  def __call__(self, inputs: Args, /, *args: Tree, **kwargs: Tree) -> Tree:
    """As `run` of these arguments, which are those of a microbatch of such `inputs`."""
    program, structure = self._programs[_shapes(inputs)]
    held = [args[i] for i in self._positions]
    return structure.unflatten(program(*jax.tree.leaves((held, inputs))))

  def _traced(self, batch: Take) -> tuple[Any, tuple[Any, Any]]:
    """The shapes of the inputs of a microbatch, and its program with the structure of results."""
    call = self._call

    def arguments() -> tuple[list[Params], Args]:
      carry = keys_and_carry.on_device(call.carry, call.split.axis_name)
      inputs = call.inputs(0, batch(), carry)
      args, _ = call.arguments(inputs)
      first, *others = (args[i] for i in self._positions)
      return [self._gather(first, inputs), *others], inputs

    def run(held: list[Params], inputs: Args) -> Tree:
      args, kwargs = call.arguments(inputs)
      given = dict(enumerate(args)) | dict(
        zip(self._positions, held, strict=True)
      )
      return self._run(*given.values(), **kwargs)

    held, inputs = across_devices.types(
      jax.make_jaxpr(arguments, return_shape=True)()
    )
    closed, like = jax.make_jaxpr(run, return_shape=True)(held, inputs)
    params = jax.tree.leaves(held)
    program = functools.partial(
      jax.core.eval_jaxpr, closed.jaxpr, closed.consts
    )
    collectives.check_own_loss(
      closed.jaxpr, len(params), call.split.axis_name, self._is_mean
    )

    def send_back(params: list[Any], others: list[Any]) -> None:
      loss, backward = jax.vjp(
        lambda params: program(*params, *others)[0], params
      )
      self.sends_back |= self._sends(jax.make_jaxpr(backward)(loss).jaxpr)

    jax.eval_shape(send_back, params, jax.tree.leaves(inputs))
    self.sends |= self.sends_back or self._sends(closed.jaxpr)
    return _shapes(inputs), (program, jax.tree.structure(like))

  def _sends(self, jaxpr: Any) -> bool:
    axes = across_devices.names_of(self._call.split.axis_name)
    return not collectives.axes_sent_over(jaxpr).isdisjoint(axes)


def _shapes(inputs: Args) -> tuple[Any, ...]:
  return tuple(jnp.shape(x) for x in jax.tree.leaves(inputs))
