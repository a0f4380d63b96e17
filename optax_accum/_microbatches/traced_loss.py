"""A loss of several devices, traced once: what they exchange is looked at before it runs."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arithmetic import across_devices
from optax_accum._arithmetic.trees import Tree
from optax_accum._microbatches import collectives
from optax_accum._microbatches.call import Microbatches, Take


class TracedLoss:
  """What `run` computes, ``(loss, (weight, *others))``, of a microbatch of each size.

  `gather` makes of the first argument what a microbatch uses. `sends` says whether devices exchange
  something, and `sends_back` whether what they exchange is gradients, so that the loss is weighed
  before it is differentiated.
  """

  def __init__(
    self,
    run: Callable[..., Tree],
    call: Microbatches,
    gather: Callable[..., Tree],
    is_mean: bool,
  ) -> None:
    self._run = run
    self._call = call
    self._gather = gather
    self.sends = False
    self.sends_back = False
    self._programs: dict[Any, Any] = {}
    for rows in call.sizes:
      params, inputs = self._types(call.taken(0, rows))
      # In this frame, so that few stand between a call and the loss.
      trace = jax.make_jaxpr(self._run_on, return_shape=True)
      closed, like = trace(params, inputs)
      axis_name = call.split.axis_name
      count = len(jax.tree.leaves(params))
      names = ["loss"]
      if call.split.has_weight:
        names.append("weight")
      collectives.check_own_loss(closed.jaxpr, count, axis_name, is_mean, names)
      self._note(closed, params, inputs, jax.tree.structure(like))

  def of(self, inputs) -> Callable[..., Tree]:
    """`run` of the arguments of a microbatch of such `inputs`."""
    program, structure = self._programs[_shapes(inputs)]

    def run(*args, **kwargs):
      params = [args[i] for i in self._call.roles.differentiated]
      return structure.unflatten(program(*jax.tree.leaves((params, inputs))))

    return run

  def _types(self, take: Take):
    """The types of what is differentiated, and of the inputs of a microbatch of these rows."""
    call = self._call

    def arguments():
      carry = call.devices.with_own_noise(call.carry)
      inputs = call.inputs(0, take(), carry)
      args, _ = call.arguments(inputs)
      first, *others = (args[i] for i in call.roles.differentiated)
      return [self._gather(first, inputs), *others], inputs

    return across_devices.types(jax.make_jaxpr(arguments, return_shape=True)())

  def _run_on(self, params, inputs):
    """`run`, with these in the place of what is differentiated."""
    args, kwargs = self._call.arguments(inputs)
    given = dict(enumerate(args))
    given.update(zip(self._call.roles.differentiated, params, strict=True))
    return self._run(*given.values(), **kwargs)

  def _note(self, closed, params, inputs, structure) -> None:
    """Notes a program and the structure of its results, and whether devices exchange something."""
    program = functools.partial(
      jax.core.eval_jaxpr, closed.jaxpr, closed.consts
    )

    def send_back(params, others):
      def loss_of(params):
        return program(*params, *others)[0]

      loss, backward = jax.vjp(loss_of, params)
      self.sends_back |= self._sends(jax.make_jaxpr(backward)(loss).jaxpr)

    jax.eval_shape(send_back, *map(jax.tree.leaves, (params, inputs)))
    self.sends |= self.sends_back or self._sends(closed.jaxpr)
    count = self._call.split.virtual_devices
    if count is not None and self._sends(closed.jaxpr, with_index=True):
      collectives.refuse_real_devices("The loss", count)
    self._programs[_shapes(inputs)] = program, structure

  def _sends(self, jaxpr, with_index: bool = False) -> bool:
    axes = across_devices.names_of(self._call.split.axis_name)
    sent = collectives.axes_sent_over(jaxpr, with_index)
    return not sent.isdisjoint(axes)


def _shapes(inputs) -> tuple[Any, ...]:
  return tuple(jnp.shape(x) for x in jax.tree.leaves(inputs))
