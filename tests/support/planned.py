"""Steps to plan: some that are compiled, each once, and some of which all is written down."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import make_train_step

ROWS = 96  # with 12 divisors
COUNTS = [n for n in range(1, ROWS + 1) if ROWS % n == 0]
TX = optax.adamw(1e-3)


def mlp_loss(params, batch):
  for w in params:
    batch = jnp.tanh(batch @ w)
  return jnp.mean(batch**2)


def shape(*dims, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(dims, dtype)


def arguments(params, batch):
  return params, jax.eval_shape(TX.init, params), batch


class Compilations:
  """Steps that are compiled once, however often they are asked for, and that say which were."""

  def __init__(self, loss_fn, args):
    self._loss_fn, self._args, self.asked = loss_fn, args, []
    self._compiled = functools.cache(self._compile)

  def _compile(self, count):
    step = make_train_step(self._loss_fn, TX, num_microbatches=count)
    return step.lower(*self._args).compile()

  def memory(self, count):
    stats = self._compiled(count).memory_analysis()
    given = stats.argument_size_in_bytes + stats.generated_code_size_in_bytes
    out = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return given + out + stats.temp_size_in_bytes

  def build_step(self, count):
    def stats():
      self.asked.append(count)
      return self._compiled(count).memory_analysis()

    return lowers_to(stats)


class Made:
  def __init__(self, **attributes):
    self.__dict__.update(attributes)


def lowers_to(stats):
  """A step whose program has the memory that `stats()` says."""
  compiled = Made(memory_analysis=stats)
  return Made(lower=lambda *args: Made(compile=lambda: compiled))


def compiled_once(build_step, args):
  """`build_step` for several plans of these arguments, which together compile each step once.

  The arguments may be a function of the choice, as the planner takes them.
  """

  @functools.cache
  def build(num_microbatches, **choice):
    step = build_step(num_microbatches, **choice)
    lower = step.lower

    @functools.cache
    def lowered():
      made = lower(*(args(**choice) if callable(args) else args))
      return Made(compile=functools.cache(made.compile))

    step.lower = lambda *args: lowered()
    return step

  return build


class Memory(NamedTuple):
  """What `memory_analysis` returns."""

  temp_size_in_bytes: int
  argument_size_in_bytes: int = 1000
  output_size_in_bytes: int = 600
  alias_size_in_bytes: int = 500
  generated_code_size_in_bytes: int = 0


FIXED = 1100  # of these, what is reserved but for temporary buffers


def written_down(temp, asked=None):
  """A `build_step` that compiles nothing: `temp(num_microbatches, **choice)` is the memory."""

  def build_step(num_microbatches, **choice):
    def stats():
      if asked is not None:
        asked.append(num_microbatches)
      return Memory(temp(num_microbatches, **choice))

    return lowers_to(stats)

  return build_step


def build_mlp(num_microbatches, remat=False, mesh=None):
  loss_fn = jax.checkpoint(mlp_loss) if remat else mlp_loss
  return make_train_step(loss_fn, TX, num_microbatches=num_microbatches, mesh=mesh)


def mlp_args(width=64, rows=ROWS * 8):
  return arguments([shape(width, width)] * 2, shape(rows, width))
