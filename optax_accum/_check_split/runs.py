"""A loss on the whole batch and in microbatches, as NumPy arrays: what `check_split` compares."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._check_split import loss_facts
from optax_accum._check_split.fixed_noise import is_key
from optax_accum._check_split.probes import Arguments, nudge, Probe
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.unsplit import whole_batches
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

# What makes a mean of the microbatches of what is one mean of the whole batch.
_OF_MICROBATCHES = ("weight_fn", "skip_nonfinite", "skip_empty")
_MANY_UNITS = (
  20.0  # what the roundings of a loss may be, of what the last bit of parameters changes
)


class Outcome(NamedTuple):
  """What a loss gave, in NumPy."""

  loss: Any
  aux: Any
  grads: Any
  rounding: tuple[float, ...] = ()  # of each of `leaves`, where it was measured

  @property
  def is_finite(self) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in jax.tree.leaves((self.loss, self.grads)))

  @property
  def is_zero(self) -> bool:
    """Whether loss and gradients are all zero, which those of a wrong split may be too."""
    return not any(bool(np.any(x)) for x in jax.tree.leaves((self.loss, self.grads)))

  @property
  def leaves(self) -> list[np.ndarray]:
    """The loss and the gradients, in float64 or complex128."""
    return [_wide(x) for x in jax.tree.leaves((self.loss, self.grads))]

  def allowed(self) -> list[float]:
    """How much of a difference may be rounding, in many additions, for each of `leaves`."""
    dtypes = [x.dtype for x in jax.tree.leaves((self.loss, self.grads))]
    coarsest = max(float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.inexact))
    tolerance = 1e-9 if coarsest < 1e-12 else 1e-4
    sizes = [_largest(x) for x in self.leaves]
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    allowed = [tolerance * max(size, 1e-2 * max(sizes)) for size in sizes]
    return list(map(max, allowed, self.rounding or allowed))

  def fits(self, leaves: Sequence[np.ndarray], slack: float = 1.0) -> bool:
    """Whether loss and gradients are these, but for so many times the rounding."""
    both = zip(self.leaves, leaves, self.allowed(), strict=True)
    return all(bool(_largest(x - y) <= slack * allowed) for x, y, allowed in both)


class Runs:
  """A loss, run on whole batches and in microbatches. Each program is compiled once."""

  def __init__(
    self,
    fun: Callable[..., Any],
    args: Arguments,
    options: Mapping[str, Any],
    sizes: Sequence[Mapping[str, int]],
    same_loss: "Runs | None" = None,
  ):
    self.fun, self.options, self.sizes, self._args = fun, options, sizes, args
    argnums = options["argnums"]
    self._argnums = [argnums] if isinstance(argnums, int) else list(argnums)
    if same_loss is None:
      whole = {name: x for name, x in options.items() if name not in _OF_MICROBATCHES}
      if options["has_aux"]:  # as the loss returns it
        whole |= {"aux_reduction": "last", "concat_axis": None}
      self._whole_fun = whole_batches()(self._of_arrays(num_microbatches=1, **whole))
      self._whole = jax.jit(self._whole_fun)
      self._known: dict[int, tuple[Probe, Outcome]] = {}
    else:
      self._whole_fun, self._whole = same_loss._whole_fun, same_loss._whole
      self._known = same_loss._known
    self._split_funs = [self._of_arrays(**size, **options) for size in sizes]
    self._splits = [jax.jit(fun) for fun in self._split_funs]

  def with_options(self, **changes: Any) -> "Runs":
    """The same loss, split otherwise."""
    return Runs(self.fun, self._args, {**self.options, **changes}, self.sizes, self)

  def _of_arrays(self, **options: Any) -> Callable[[list[Any]], Any]:
    """Loss, aux and gradients, of the arrays of a call alone: the rest of it are constants."""
    value_and_grad = microbatch_value_and_grad(self.fun, **options)
    treedef: Any
    leaves, treedef = jax.tree.flatten(self._args)

    def run(arrays: list[Any]) -> tuple[Any, Any]:
      rest = iter(arrays)
      merged = [next(rest) if is_array(x) else x for x in leaves]
      value, grads = value_and_grad(*treedef.unflatten(merged))[:2]
      return value, grads

    return run

  def _outcome(self, jitted: Callable[[list[Any]], Any], args: Arguments) -> Outcome:
    out = jax.tree.map(_numbers, jitted(_arrays(args)))
    value, grads = jax.device_get(out)
    loss, aux = value if self.options["has_aux"] else (value, None)
    return Outcome(loss, aux, grads)

  def traced(self, args: Arguments) -> Any:
    """The jaxpr of the whole batch's loss and gradients, traced anew."""
    return self._jaxpr(self._whole_fun, args)

  def _jaxpr(self, fun: Callable[[list[Any]], Any], args: Arguments) -> Any:
    # JAX remembers the jaxpr of a function that it knows.
    return jax.make_jaxpr(lambda arrays: fun(arrays))(_arrays(args))

  def splits_nothing(self, args: Arguments) -> bool:
    """Whether what runs in microbatches is the program of the whole batch."""
    whole = self.traced(args)
    return all(loss_facts.are_the_same(whole, self._jaxpr(fun, args)) for fun in self._split_funs)

  def whole(self, args: Arguments) -> Outcome:
    """The loss on all rows at once: of the batch, or of a part of it."""
    return self._outcome(self._whole, args)

  def whole_of(self, probe: Probe) -> Outcome:
    """The same of a probe, which is run once, however it is split."""
    if id(probe) not in self._known:
      self._known[id(probe)] = probe, self.whole(probe.args)  # kept, so that no other has its id
    return self._known[id(probe)][1]

  def with_rounding(self, whole: Outcome, args: Arguments) -> Outcome:
    """The same, with how much of it parameters change that differ in their last bit alone."""
    nudged = self._outcome(self._whole, nudge(args, self._argnums))
    both = zip(whole.leaves, nudged.leaves, strict=True)
    return whole._replace(rounding=tuple(_MANY_UNITS * _largest(x - y) for x, y in both))

  def outcomes(self, probes: Sequence[Probe]) -> Iterator[tuple[str, Outcome, list[Outcome]]]:
    """Of each probe that tells something: its name, the whole batch's, and each split's."""
    for probe in probes:
      whole = self.whole_of(probe)
      if not whole.is_finite:
        continue
      splits = [self._outcome(split, probe.args) for split in self._splits]
      if not all(whole.fits(split.leaves) for split in splits):
        whole = self.with_rounding(whole, probe.args)
      if not all(outcome.is_zero for outcome in (whole, *splits)):
        yield probe.name, whole, splits

  def compare(self, whole: Outcome, split: Outcome) -> tuple[LeafComparison, ...]:
    """The loss, the gradients and the aux of the whole batch beside those of microbatches."""
    names = ["loss", *(name for name, _ in _validate.named_leaves("grads", whole.grads))]
    both = zip(names, whole.leaves, split.leaves, whole.allowed(), strict=True)
    return (*(_compared(*each) for each in both), *self.compared_aux(whole, split).values())

  def compared_aux(self, whole: Outcome, split: Outcome) -> dict[int, LeafComparison]:
    """The aux that a split can leave as it is, each by its place among the leaves."""
    named = _validate.named_leaves("aux", whole.aux)
    tolerance = whole.allowed()[0] / (_largest(whole.loss) or 1.0)
    both = zip(self.aux_words(whole.aux), named, jax.tree.leaves(split.aux), strict=True)
    return {
      i: _compared(name, _wide(x), _wide(y), tolerance * _largest(x))
      for i, (word, (name, x), y) in enumerate(both)
      if word not in ("stack", "last")
    }

  def aux_words(self, aux: Any) -> list[str]:
    """How each leaf of the aux is reduced."""
    given, axis = self.options["aux_reduction"], self.options["concat_axis"]
    words = reduction_words.named_of_aux(given, axis)
    matched = reduction_words.match("aux_reduction", words, aux)
    return [kind.name for kind in jax.tree.leaves(matched)]


def agree(leaves: Sequence[LeafComparison]) -> bool:
  """Whether all leaves do."""
  return all(leaf.agrees for leaf in leaves)


def is_array(x: Any) -> bool:
  """Whether `x` is an array, and not a constant of the call."""
  return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _arrays(args: Arguments) -> list[Any]:
  return [x for x in jax.tree.leaves(args) if is_array(x)]


def in_check_dtype(x: Any) -> Any:
  """An array as NumPy's, its floats in float32, or float64 where x64 is enabled."""
  if is_key(x):
    return x
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = x.astype(jnp.result_type(complex))
  elif jnp.issubdtype(x.dtype, jnp.floating):
    x = x.astype(jnp.result_type(float))
  return np.asarray(x)


def _numbers(x: Any) -> Any:
  return jax.random.key_data(x) if is_key(x) else x


def _largest(x: Any) -> float:
  return float(np.max(np.abs(x), initial=0.0))


def _wide(x: Any) -> np.ndarray:
  x = np.asarray(x)
  return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _compared(name: str, x: np.ndarray, y: np.ndarray, allowed: float) -> LeafComparison:
  same_shape = x.shape == y.shape and bool(np.all(np.isfinite(y)))
  difference = _largest(x - y) if same_shape else float("inf")
  return LeafComparison(name, _largest(x), difference, allowed)
