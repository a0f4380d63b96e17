"""What a step says of the gradients of its microbatches, of which it keeps none."""

from typing import get_args, NamedTuple, Protocol

from jax.typing import ArrayLike

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._arithmetic.trees import Grads, Kwargs, Tree
from optax_accum._microbatches.noise_scale import (
  check_reduction,
  NOISE,
  noise_of,
)


class GradMetricsFn(Protocol):
  """What `grad_metrics_fn` of a step is: a function of the gradient of one microbatch.

  It returns a pytree of arrays or numbers, one or more, whose shapes do not depend on the rows.
  `grad_metrics_reduction` says how those of all microbatches are combined.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> def loss_fn(params, x):
    ...   return jnp.mean(params["w"] * x)  # the gradient is the mean of x
    >>> def norms(grads):
    ...   return {"mean": optax.tree.norm(grads), "each": optax.tree.norm(grads)}
    >>> params, tx = {"w": jnp.float32(1)}, optax.sgd(0.1)
    >>> step = optax_accum.make_train_step(
    ...   loss_fn, tx, num_microbatches=2, grad_metrics_fn=norms,
    ...   grad_metrics_reduction={"mean": "mean", "each": "stack"})
    >>> _, _, metrics = step(params, tx.init(params), jnp.array([3.0, -4.0]))
    >>> float(metrics["grad_norm"]), float(metrics["grad_metrics"]["mean"])
    (0.5, 3.5)
    >>> metrics["grad_metrics"]["each"].tolist()
    [3.0, 4.0]
  """

  def __call__(self, grads: Grads, /) -> Tree: ...


class GradMetrics(NamedTuple):
  """Functions of the gradient of each microbatch, by the names of what they return."""

  funs: Kwargs
  reductions: Kwargs  # of what each returns, a prefix tree of them

  @classmethod
  def of(cls, options) -> "GradMetrics":
    """What the options of a step ask for. Checked."""
    funs = {}
    reductions = {}
    with_noise = options.get("noise_scale", False)
    _validate.booleans(noise_scale=with_noise)
    if with_noise:
      check_reduction(options["reduction"])
      funs["noise_scale"] = noise_of
      reductions["noise_scale"] = NOISE
    fun = options.get("grad_metrics_fn")
    words = options.get("grad_metrics_reduction")
    if callable(fun):
      funs["grad_metrics"] = fun
      reductions["grad_metrics"] = _named(words)
    elif fun is not None or words is not None:
      raise TypeError(
        f"grad_metrics_fn={fun!r} must be a function of the gradients, and"
        f" grad_metrics_reduction={words!r} combines what it returns: give it, or leave both out."
      )
    return cls(funs, reductions)

  def values(self, grads):
    """What each returns for the gradient of one microbatch. Checked."""
    values = {}
    for name, fun in self.funs.items():
      out = fun(grads)
      for where, x in _validate.named_leaves(name, out) or [(name, out)]:
        if not isinstance(x, get_args(ArrayLike)):
          raise TypeError(
            f"{where} is {x!r}, and {name}_fn must return arrays or numbers, in a tree or alone,"
            " such as optax.tree.norm(grads)."
          )
      reduction_words.match(f"{name}_reduction", self.reductions[name], out)
      values[name] = out
    return values


def _named(words):
  """The reductions of `grad_metrics_reduction`."""
  option = "grad_metrics_reduction"
  for where, word in _validate.named_leaves(option, words):
    if word == "concat":
      raise ValueError(
        f'{where}="concat" joins values of rows, and a gradient has none: use "stack" for one'
        " value per microbatch."
      )
  return reduction_words.named(option, words, REDUCTIONS["mean"])
