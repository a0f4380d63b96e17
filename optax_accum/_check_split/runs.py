"""A loss on the whole batch and on rows of it, and what microbatches add up to, in NumPy."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import operator
from typing import NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr
import jax.numpy as jnp
import numpy as np
import tqdm

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.reductions import MergeFn
from optax_accum._arithmetic.trees import Aux, Kwargs, Leaf, Leaves, Tree
from optax_accum._check_split.facts import Facts, facts_of
from optax_accum._check_split.probes import Call, probes_of
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.microbatch import whole_batches
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0
ROWS: Callable[[Call], float] = operator.attrgetter("rows")  # the weight without a `weight_fn`

LossFn: TypeAlias = Callable[..., Tree]
Word: TypeAlias = str | MergeFn  # that reduces an output


class Outcome(NamedTuple):
  """What a loss gave, in NumPy."""

  main: Leaves  # the loss and the gradients
  others: Leaves  # the aux
  allowed: list[float]  # how much of a difference may be rounding, for each of them
  aux: Aux

  @property
  def leaves(self) -> Leaves:
    return [*self.main, *self.others]

  @property
  def is_finite(self) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in self.main)

  def fits(self, leaves: Leaves) -> bool:
    """Whether loss and gradients are these, but for the rounding."""
    less = [x - y for x, y in zip(self.main, leaves, strict=False)]
    return bool(np.max(np.abs(self.in_roundings(less))) <= 1)

  def in_roundings(self, main: Leaves) -> np.ndarray:
    """Such loss and gradients as one vector, in times of what may be rounding."""
    each = zip(main, self.allowed, strict=False)
    return np.concatenate([np.ravel(x).view(float) / max(allowed, 1e-100) for x, allowed in each])


class Part(NamedTuple):
  """A microbatch."""

  rows: np.ndarray  # of the batch, which it has
  call: Call
  outcome: Outcome


class Tried(NamedTuple):
  """One batch: what the whole of it gives, and what the microbatches of each split."""

  call: Call
  whole: Outcome
  splits: list[list[Part]]


class How(NamedTuple):
  """How microbatches become one."""

  words: list[Word]  # that reduce the loss, each gradient and each aux
  weight: Callable[[Call], float]
  skips: bool  # what is not finite
  axis: int  # of what "concat" joins

  def join(self, parts: Sequence[Part]) -> Leaves:
    """All microbatches as one, leaf by leaf: None where a word cannot reduce a leaf."""
    # A weight of zero leaves a microbatch out, also where it is NaN.
    keeps = [part.outcome.is_finite or not self.skips for part in parts]
    weights = np.array([self.weight(x.call) * keep for x, keep in zip(parts, keeps, strict=True)])
    each = zip(self.words, *(part.outcome.leaves for part in parts), strict=True)
    return [self._join(word, leaves, weights, parts) for word, *leaves in each]

  def _join(
    self, word: Word, leaves: Leaves, weights: np.ndarray, parts: Sequence[Part]
  ) -> np.ndarray | None:
    if word == "concat":
      rows = [part.rows for part in parts]
      if [x.shape[self.axis :][:1] for x in leaves] != [x.shape for x in rows]:
        return None
      return np.concatenate(leaves, self.axis).take(np.argsort(np.concatenate(rows)), self.axis)
    if len({x.shape for x in leaves}) > 1 or (word == "mean" and leaves[0].dtype.kind == "i"):
      return None
    stack, weights = np.stack(leaves)[weights != 0], weights[weights != 0]
    if not len(stack):
      return np.zeros_like(leaves[0])
    if word == "mean":
      return np.tensordot(weights, stack, 1) / np.sum(weights)
    return stack[-1] if _is_open(word) else getattr(stack, str(word))(0)


class Runs:
  """A loss, a call of it and its splits, and all that was run.

  `sizes` are the rows of a microbatch, of each split, and `others` batches of as many rows.
  """

  others: Sequence[Call] = ()

  def __init__(self, fun: LossFn, call: Call, options: Kwargs, sizes: Sequence[int]):
    self.fun, self.call, self.options, self.sizes, self.rows = fun, call, options, sizes, call.rows
    wrt = options["argnums"]
    self.params = call.args[wrt] if isinstance(wrt, int) else tuple(call.args[i] for i in wrt)
    self.names = ["loss", *(name for name, _ in _validate.named_leaves("grads", self.params))]
    self._weight = ROWS
    if (weight_fn := options["weight_fn"]) is not None:  # traced, as in microbatches
      count, batch = jax.jit(weight_fn), options["batch_argnums"]
      self._weight = lambda call: float(count(*(call.args[i] for i in batch)))
    self._at_once = jax.value_and_grad(fun, wrt, options["has_aux"])
    self._run = self._compiled(self._at_once)
    split = {**options, "num_microbatches": None, "microbatch_size": sizes[0]}
    # By default an aux of as many rows as a microbatch is refused: `compare` finds those.
    split["aux_reduction"] = "mean" if split["aux_reduction"] is None else split["aux_reduction"]
    self._split = self._compiled(microbatch_value_and_grad(fun, **split))

  def _compiled(self, value_and_grad: LossFn) -> Callable[[Leaves], Tree]:
    """A program of the arrays of a call, compiled fast: it runs some hundred times on few rows."""
    on_cpu = jax.default_backend() == "cpu"
    compiler_options = {"xla_backend_optimization_level": 0} if on_cpu else None
    run = lambda values: value_and_grad(*self.call.rebuild(values))  # noqa: E731
    return jax.jit(run, compiler_options=compiler_options)

  def how(self, **changes: Tree) -> How:
    """How microbatches become one with these options, and with others."""
    options = {"weight": self._weight, **self.options, **changes}
    grads, aux = options["grad_reduction"], options["aux_reduction"]
    grads = options["reduction"] if grads is None else grads
    grads = reduction_words.match("grad_reduction", grads, self.params, "gradients")
    aux = reduction_words.match("aux_reduction", "mean" if aux is None else aux, self.given.aux)
    words = [options["reduction"], *jax.tree.leaves(grads), *jax.tree.leaves(aux)]
    return How(words, options["weight"], options["skip_nonfinite"], options["concat_axis"] or 0)

  @functools.cached_property
  def given(self) -> Outcome:
    with noted(f"The check ran it on the whole batch, {self.rows} rows."):
      return self.whole(self.call)

  @functools.cached_property
  def facts(self) -> Facts:
    return facts_of(self.traced(), self.call)

  @functools.cached_property
  def calls(self) -> list[Call]:
    """The batches to run, the given one first."""
    given, *changed = probes_of(self.call, self.facts.integers, self.facts.floats)
    return [given, *self.others, *changed]

  @functools.cached_property
  def outcomes(self) -> list[Tried]:
    """All batches that tell something. Raises what the loss does."""
    bar = tqdm.tqdm(self.calls, "checking", delay=3, unit="batch", leave=False, disable=None)
    return [tried for call in bar if (tried := self._try(call))]

  @functools.cached_property
  def cuts(self) -> list[list[np.ndarray]]:
    """The rows of the microbatches of each split, as `microbatch_value_and_grad` cuts them.

    Without a smaller one, also parts of neighbors, in the same program: pairs of a first and a
    second half (chosen, rejected) are together in the others.
    """
    cuts, size = [_cut(self.rows, size) for size in self.sizes], self.sizes[0]
    if len(cuts) == 1 and size < self.rows and self.rows % size == 0:
      cuts.append(np.split(np.arange(self.rows), self.rows // size))
    return cuts

  def _try(self, call: Call) -> Tried | None:
    tried = Tried(call, self.whole(call), [])
    if not tried.whole.is_finite:
      return None
    for rows in self.cuts:
      size = len(rows[0])
      with noted(
        f"The check ran it in microbatches of {size} rows. On all {self.rows} rows it ran."
      ):
        tried.splits.append(self.parts(call, rows))
    each = [part for parts in tried.splits for part in parts]
    weights = [(self._weight(part.call), part.outcome.main[0]) for part in each]
    if any(weight < 0 or (weight == 0 and np.isinf(loss)) for weight, loss in weights):
      return None  # such a length is none
    outcomes = [tried.whole, *(part.outcome for part in each)]
    return tried if any(np.any(x) for outcome in outcomes for x in outcome.main) else None

  def parts(self, call: Call, rows: Sequence[np.ndarray]) -> list[Part]:
    calls = [call.take(x) for x in rows]
    return [Part(x, y, self._outcome(self._run, y)) for x, y in zip(rows, calls, strict=True)]

  def whole(self, call: Call) -> Outcome:
    """All rows at once, where the loss does not split by itself."""
    with whole_batches():
      whole, nudged = (self._outcome(self._run, x) for x in (call, call.nudged()))
    # What parameters change that differ in their last bits alone may be rounding too.
    each = zip(whole.leaves, nudged.leaves, whole.allowed, strict=True)
    return whole._replace(allowed=[max(z, _MANY_UNITS * _largest(x - y)) for x, y, z in each])

  def _outcome(self, program: Callable[[Leaves], Tree], call: Call) -> Outcome:
    out = program(call.values)
    value, grads, *_ = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, out)
    loss, aux = value if self.options["has_aux"] else (value, None)
    given = jax.device_get(jax.tree.leaves((loss, grads)))
    main, others = list(map(_wide, given)), list(map(_wide, jax.tree.leaves(aux)))
    tolerance = 1e-9 if all(jnp.finfo(x.dtype).eps < 1e-12 for x in given) else 1e-4
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    least = 1e-2 * max(map(_largest, main))
    sizes = [*(max(_largest(x), least) for x in main), *map(_largest, others)]
    return Outcome(main, others, [tolerance * size for size in sizes], aux)

  def compare(self, how: How, whole: Outcome, leaves: Leaves) -> dict[int, LeafComparison]:
    """The whole batch beside microbatches; not what an aux has of each of them, or of the last."""
    names = [*self.names, *(name for name, _ in _validate.named_leaves("aux", whole.aux))]
    compared = {}
    each = zip(names, how.words, whole.leaves, leaves, whole.allowed, strict=True)
    for i, (name, word, x, y, allowed) in enumerate(each):
      if i < len(whole.main) or not _is_open(word):
        fits = y is not None and x.shape == y.shape
        difference = _largest(x - y) if fits else float("inf")
        compared[i] = LeafComparison(name, _largest(x), difference, allowed)
    return compared

  def agree(self, how: How) -> bool:
    """Whether loss and gradients do in all batches and splits."""
    return all(x.whole.fits(how.join(parts)) for x in self.outcomes for parts in x.splits)

  def wrong(self, how: How) -> set[int]:
    """The leaves that differ in some batch."""
    each = [(x.whole, how.join(parts)) for x in self.outcomes for parts in x.splits]
    compared = (self.compare(how, *both) for both in each)
    return {i for leaves in compared for i, leaf in leaves.items() if not leaf.agrees}

  def as_called(self) -> dict[int, LeafComparison]:
    """What `microbatch_value_and_grad` itself gives for the given call, beside the whole batch."""
    leaves = self._outcome(self._split, self.call).leaves
    return self.compare(self.how(), self.given, leaves)

  def traced(self, is_whole: bool = True) -> ClosedJaxpr:
    """The jaxpr of all rows, traced anew: JAX remembers that of a function it knows."""
    run = lambda values: self._at_once(*self.call.rebuild(values))  # noqa: E731
    with whole_batches() if is_whole else contextlib.nullcontext():
      return jax.make_jaxpr(run)(self.call.values)


def _is_open(word: Word) -> bool:
  """Whether what a reduction gives need not be that of all rows, so that it is not compared."""
  return callable(word) or word in ("stack", "last")


def _cut(rows: int, size: int) -> list[np.ndarray]:
  """The rows of each microbatch, as `microbatch_value_and_grad` cuts them."""
  full = rows // size
  parts = [np.arange(i, full * size, full) for i in range(full)]
  return [*parts, np.arange(full * size, rows)] if rows % size else parts


def _largest(x: np.ndarray) -> float:
  return float(np.max(np.abs(x), initial=0.0))


def _wide(x: Leaf) -> np.ndarray:
  x = np.asarray(x)
  wide = np.int64 if x.dtype.kind in "iub" else np.complex128
  return x.astype(wide if x.dtype.kind in "iubc" else np.float64)


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
  """Adds a note to an error of the loss."""
  try:
    yield
  except Exception as error:
    error.add_note(note)
    raise
