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
from optax_accum._arithmetic.trees import Aux, Kwargs, Leaf, Leaves, Tree
from optax_accum._check_split.facts import Facts, facts_of
from optax_accum._check_split.probes import Call, probes_of
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.cut import known_weight
from optax_accum._microbatches.microbatch import whole_batches
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0
ROWS: Callable[[Call], float] = operator.attrgetter("rows")  # the weight without a `weight_fn`

LossFn: TypeAlias = Callable[..., Tree]


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

  @property
  def is_zero(self) -> bool:
    """Whether loss and gradients are all zero, which those of a wrong split may be too."""
    return not any(map(np.any, self.main))

  def fits(self, leaves: Leaves, slack: float = 1.0) -> bool:
    """Whether loss and gradients are these, but for so many times the rounding."""
    return self.misfit(leaves) <= slack

  def misfit(self, leaves: Leaves) -> float:
    """The largest difference from such loss and gradients, in times of the rounding."""
    each = zip(self.main, leaves, self.allowed, strict=False)
    return float(np.max([_largest(x - y) / max(allowed, 1e-100) for x, y, allowed in each]))


class Part(NamedTuple):  # a microbatch
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

  words: list[str]  # that reduce the loss, each gradient and each aux
  weight: Callable[[Call], float]
  skips: bool  # what is not finite
  axis: int  # of what "concat" joins

  def join(self, parts: Sequence[Part], weights: Sequence[float] | None = None) -> Leaves:
    """All microbatches as one, leaf by leaf: None where a word cannot reduce a leaf."""
    weights = [self.weight(part.call) for part in parts] if weights is None else weights
    keeps = [part.outcome.is_finite or not self.skips for part in parts]
    # A weight of zero leaves a microbatch out, also where it is NaN; one below zero is none.
    weights = [(w if w >= 0 else np.nan) * x for w, x in zip(weights, keeps, strict=True)]
    rows, each = [part.rows for part in parts], [part.outcome.leaves for part in parts]
    joined = zip(self.words, *each, strict=True)
    return [_join(word, leaves, weights, rows, self.axis) for word, *leaves in joined]


def _join(
  word: str, leaves: Leaves, weights: Sequence[float], rows: Leaves, axis: int
) -> np.ndarray | None:
  """One leaf of all microbatches."""
  if word == "concat":
    if [x.shape[axis:][:1] for x in leaves] != [x.shape for x in rows]:
      return None
    return np.concatenate(leaves, axis).take(np.argsort(np.concatenate(rows)), axis)
  if len({x.shape for x in leaves}) > 1 or (word == "mean" and leaves[0].dtype.kind == "i"):
    return None
  counted = [(x, w) for x, w in zip(leaves, weights, strict=True) if w]
  if not counted:
    return np.zeros_like(leaves[0])
  if word == "mean":
    return sum(w * x for x, w in counted) / sum(w for _, w in counted)
  stack = np.stack([x for x, _ in counted])
  return stack[-1] if word == "last" else getattr(stack, word)(0)


class Runs:
  """A loss, a call of it and its splits, and all that was run.

  `sizes` are the rows of a microbatch, of each split.
  """

  def __init__(self, fun: LossFn, call: Call, options: Kwargs, sizes: Sequence[int]):
    self.fun, self.call, self.options, self.sizes, self.rows = fun, call, options, sizes, call.rows
    # Two parts of different size, whose rows follow each other.
    self.two = np.split(np.arange(self.rows), [min(-(-2 * self.rows // 3), self.rows - 1)])
    wrt = options["argnums"]
    self.params = call.args[wrt] if isinstance(wrt, int) else tuple(call.args[i] for i in wrt)
    grads = _validate.named_leaves("grads", self.params)
    self.names = {i: name for i, (name, _) in enumerate(grads, 1)}  # of gradients
    self._weight = ROWS
    if (weight_fn := options["weight_fn"]) is not None:  # traced, as in microbatches
      count, batch = jax.jit(functools.partial(known_weight, weight_fn)), options["batch_argnums"]
      self._weight = lambda call: float(count(*(call.args[i] for i in batch)))
    self._at_once = jax.value_and_grad(fun, wrt, options["has_aux"])
    self._run = self._compiled(self._at_once)
    split = {**options, "num_microbatches": None, "microbatch_size": sizes[0]}
    self._split = self._compiled(microbatch_value_and_grad(fun, **split))

  def _compiled(self, value_and_grad: LossFn) -> Callable[[Leaves], Tree]:
    """A program of the arrays of a call, compiled fast: it runs some hundred times on few rows."""
    on_cpu = jax.default_backend() == "cpu"
    compiler_options = {"xla_backend_optimization_level": 0} if on_cpu else None
    run = lambda values: value_and_grad(*self.call.rebuild(values))  # noqa: E731
    return jax.jit(run, compiler_options=compiler_options)

  def how(self, **changes: Tree) -> How:
    """How microbatches become one with these options, and with others."""
    options = {**self.options, **changes}
    given, default = options["grad_reduction"], options["reduction"]
    grads = default if given is None else given
    grads = reduction_words.match("grad_reduction", grads, self.params, "gradients")
    aux = "mean" if options["aux_reduction"] is None else options["aux_reduction"]
    aux = reduction_words.match("aux_reduction", aux, self.given.aux)
    weight = changes.get("weight", self._weight)
    words = [options["reduction"], *jax.tree.leaves(grads), *jax.tree.leaves(aux)]
    return How(words, weight, options["skip_nonfinite"], options["concat_axis"] or 0)

  @functools.cached_property
  def given(self) -> Outcome:
    with noted(f"check_split ran it on the whole batch, {self.rows} rows."):
      return self.whole(self.call)

  @functools.cached_property
  def facts(self) -> Facts:
    return facts_of(self.traced(), self.call)

  @functools.cached_property
  def calls(self) -> list[Call]:
    """The batches to run, the given one first."""
    return list(probes_of(self.call, self.facts.integers, self.facts.floats))

  @functools.cached_property
  def outcomes(self) -> list[Tried]:
    """All batches that tell something. Raises what the loss does."""
    bar = tqdm.tqdm(self.calls, "checking", delay=3, unit="batch", leave=False, disable=None)
    return [tried for call in bar if (tried := self._try(call))]

  def _try(self, call: Call) -> Tried | None:
    tried = Tried(call, self.whole(call), [])
    if not tried.whole.is_finite:
      return None
    for size in self.sizes:
      with noted(f"check_split ran it in {self.in_words(size)}; on all {self.rows} rows it ran."):
        tried.splits.append(self.parts(call, _cut(self.rows, size)))
    if not self.weighs(self.how(), tried):
      return None
    if tried.whole.is_zero and all(x.outcome.is_zero for split in tried.splits for x in split):
      return None
    if not self.wrong(self.how(), [tried]):
      return tried
    return tried._replace(whole=self.rounded(call, tried.whole))

  @functools.cached_property
  def in_two(self) -> list[Tried]:
    return [x._replace(splits=[self.parts(x.call, self.two)]) for x in self.outcomes]

  def parts(self, call: Call, rows: Sequence[np.ndarray]) -> list[Part]:
    calls = [call.take(x) for x in rows]
    return [Part(x, y, self._outcome(self._run, y)) for x, y in zip(rows, calls, strict=True)]

  def whole(self, call: Call) -> Outcome:
    """All rows at once, where the loss does not split by itself."""
    with whole_batches():
      return self._outcome(self._run, call)

  def rounded(self, call: Call, whole: Outcome) -> Outcome:
    """`whole`, allowed also what parameters change that differ in their last bits alone."""
    nudged = self.whole(call.nudged())
    each = zip(whole.leaves, nudged.leaves, whole.allowed, strict=True)
    return whole._replace(allowed=[max(z, _MANY_UNITS * _largest(x - y)) for x, y, z in each])

  def _outcome(self, program: Callable[[Leaves], Tree], call: Call) -> Outcome:
    out = program(call.values)
    value, grads, *_ = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, out)
    loss, aux = value if self.options["has_aux"] else (value, None)
    given = jax.device_get(jax.tree.leaves((loss, grads)))
    main, others = list(map(_wide, given)), list(map(_wide, jax.tree.leaves(aux)))
    sizes = list(map(_largest, main))
    tolerance = 1e-9 if all(jnp.finfo(x.dtype).eps < 1e-12 for x in given) else 1e-4
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    least = 1e-2 * max(sizes)
    sizes = [*(max(size, least) for size in sizes), *map(_largest, others)]
    return Outcome(main, others, [tolerance * size for size in sizes], aux)

  def compare(self, how: How, whole: Outcome, leaves: Leaves) -> dict[int, LeafComparison]:
    """The whole batch beside microbatches; not what an aux has of each of them, or of the last."""
    names = ["loss", *self.names.values()]
    names += [name for name, _ in _validate.named_leaves("aux", whole.aux)]
    compared = {}
    each = zip(names, how.words, whole.leaves, leaves, whole.allowed, strict=True)
    for i, (name, word, x, y, allowed) in enumerate(each):
      if i < len(whole.main) or word not in ("stack", "last"):
        fits = y is not None and x.shape == y.shape and bool(np.all(np.isfinite(y)))
        difference = _largest(x - y) if fits else float("inf")
        compared[i] = LeafComparison(name, _largest(x), difference, allowed)
    return compared

  def weighs(self, how: How, tried: Tried) -> bool:
    """Whether no microbatch of a changed batch weighs less than 0, as with lengths of -1."""
    parts = [part for split in tried.splits for part in split]
    return tried.call is self.call or all(how.weight(part.call) >= 0 for part in parts)

  def agree(self, how: How, slack: float = 1.0) -> bool:
    """Whether loss and gradients do in all batches and splits."""
    of = [x for x in self.outcomes if self.weighs(how, x)]
    return all(x.whole.fits(how.join(y), slack) for x in of for y in x.splits)

  def wrong(self, how: How, of: Sequence[Tried] | None = None) -> set[int]:
    """The leaves that differ in some batch."""
    each = [(x.whole, parts) for x in (of or self.outcomes) for parts in x.splits]
    compared = (self.compare(how, whole, how.join(parts)) for whole, parts in each)
    return {i for leaves in compared for i, leaf in leaves.items() if not leaf.agrees}

  def as_called(self) -> dict[int, LeafComparison]:
    """What `microbatch_value_and_grad` itself gives for the given call, beside the whole batch."""
    outcome = self._outcome(self._split, self.call)
    return self.compare(self.how(), self.rounded(self.call, self.given), outcome.leaves)

  def traced(self, is_whole: bool = True) -> ClosedJaxpr:
    """The jaxpr of all rows, traced anew: JAX remembers that of a function it knows."""
    run = lambda values: self._at_once(*self.call.rebuild(values))  # noqa: E731
    with whole_batches() if is_whole else contextlib.nullcontext():
      return jax.make_jaxpr(run)(self.call.values)

  def in_words(self, size: int) -> str:
    count, rest = divmod(self.rows, size)
    if rest:
      return f"microbatches of {size} rows, of {self.rows}"
    return f"{count} microbatch{'es' * (count > 1)} of {size} rows"


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
