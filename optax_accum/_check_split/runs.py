"""A loss on the whole batch and on rows of it, and what microbatches add up to, in NumPy."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import copy
import functools
import operator
from typing import NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr
import jax.numpy as jnp
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.reductions import REDUCTIONS
from optax_accum._arithmetic.trees import Aux, Kwargs, Leaf, Leaves, Tree
from optax_accum._check_split.facts import Facts, facts_of, fingerprint
from optax_accum._check_split.probes import Call, probes_of
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.loss import known_weight
from optax_accum._microbatches.microbatch import whole_batches
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0
ROWS: Callable[[Call], float] = operator.attrgetter("rows")  # the weight without a `weight_fn`

LossFn: TypeAlias = Callable[..., Tree]
Program: TypeAlias = Callable[[Leaves], tuple[Tree, Tree]]  # arrays to value and gradients


class Outcome(NamedTuple):
  """What a loss gave, in NumPy."""

  leaves: Leaves  # the loss, the gradients, and the aux
  allowed: list[float]  # how much of a difference may be rounding, for each of them
  main: int  # how many are no aux
  aux: Aux

  @property
  def is_finite(self) -> bool:
    return all(bool(np.all(np.isfinite(x))) for x in self.leaves[: self.main])

  @property
  def is_zero(self) -> bool:
    """Whether loss and gradients are all zero, which those of a wrong split may be too."""
    return not any(map(np.any, self.leaves[: self.main]))

  def fits(self, leaves: Leaves, slack: float = 1.0) -> bool:
    """Whether loss and gradients are these, but for so many times the rounding."""
    each = zip(self.leaves[: self.main], leaves, self.allowed, strict=False)
    return all(_largest(x - y) <= slack * allowed for x, y, allowed in each)


class Part(NamedTuple):
  """One microbatch."""

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
    # The whole batch, where the loss does not split by itself, and some rows of it.
    self._whole, self.part = whole_batches()(self.compiled(fun)), self.compiled(fun)

  def _program(self, fun: LossFn, **options: Tree) -> Program:
    """Value and gradients of the arrays of a call: at once, or with these options."""
    names = ("argnums", "has_aux", "batch_argnums", "batch_axis")
    at_once = {"num_microbatches": 1, "rng_argnums": (), "aux_reduction": "last"}
    at_once |= {name: self.options[name] for name in names}
    value_and_grad = microbatch_value_and_grad(fun, **(options or at_once))

    def run(values: Leaves) -> tuple[Tree, Tree]:
      value, grads, *_ = value_and_grad(*self.call.rebuild(values))
      return value, grads

    return run

  def compiled(self, fun: LossFn, **options: Tree) -> Program:
    """The program of a loss, which is compiled fast: it runs some hundred times, on a few rows."""
    on_cpu = jax.default_backend() == "cpu"
    compiler_options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(self._program(fun, **options), compiler_options=compiler_options)

  def otherwise(self, **changes: Tree) -> "Runs":
    """The same with other attributes."""
    other = copy.copy(self)
    other.__dict__.pop("outcomes", None)
    other.__dict__.update(changes)
    return other

  def how(self, **changes: Tree) -> How:
    """How microbatches become one with these options, and with others."""
    options = {**self.options, **changes}
    reduction, axis = REDUCTIONS[options["reduction"]], options["concat_axis"]
    grads = reduction_words.named_of_gradients(options["grad_reduction"], reduction)
    aux = reduction_words.named_of_aux(options["aux_reduction"], axis)
    kinds = [
      reduction,
      *jax.tree.leaves(reduction_words.match("grad_reduction", grads, self.params, "gradients")),
      *jax.tree.leaves(reduction_words.match("aux_reduction", aux, self.given.aux)),
    ]
    weight = changes.get("weight", self._weight)
    return How([kind.name for kind in kinds], weight, options["skip_nonfinite"], axis or 0)

  @functools.cached_property
  def given(self) -> Outcome:
    """What the given call gives."""
    with noted(f"check_split ran it on the whole batch, {self.rows} rows."):
      return self.whole(self.call)

  @functools.cached_property
  def facts(self) -> Facts:
    """What the loss does by its jaxpr."""
    return facts_of(self.traced(), self.call)

  @functools.cached_property
  def calls(self) -> list[Call]:
    """The batches to run, the given one first."""
    return list(probes_of(self.call, self.facts.integers, self.facts.floats))

  @functools.cached_property
  def outcomes(self) -> list[Tried]:
    """All batches that tell something. Raises what the loss does."""
    return [tried for call in self.calls if (tried := self._try(call))]

  def _try(self, call: Call) -> Tried | None:
    tried = Tried(call, self.whole(call), [])
    if not tried.whole.is_finite:
      return None
    for size in self.sizes:
      with self._noted(size):
        tried.splits.append(self.parts(call, _cut(self.rows, size)))
    if tried.whole.is_zero and all(x.outcome.is_zero for split in tried.splits for x in split):
      return None
    return tried._replace(whole=self.rounded(call)) if self.wrong(self.how(), [tried]) else tried

  @functools.cached_property
  def in_two(self) -> list[Tried]:
    """The same batches, each in two parts."""
    return [x._replace(splits=[self.parts(x.call, self.two)]) for x in self.outcomes]

  def parts(self, call: Call, rows: Sequence[np.ndarray]) -> list[Part]:
    """Some rows at once, and then others."""
    calls = [call.take(x) for x in rows]
    return [Part(x, y, self._outcome(self.part, y)) for x, y in zip(rows, calls, strict=True)]

  def whole(self, call: Call) -> Outcome:
    """All rows at once."""
    return self._outcome(self._whole, call)

  def rounded(self, call: Call) -> Outcome:
    """The same, allowed also what parameters change that differ in their last bits alone."""
    whole, nudged = self.whole(call), self.whole(call.nudged())
    each = zip(whole.leaves, nudged.leaves, whole.allowed, strict=True)
    return whole._replace(allowed=[max(z, _MANY_UNITS * _largest(x - y)) for x, y, z in each])

  def _outcome(self, program: Program, call: Call) -> Outcome:
    out = program(call.values)
    value, grads = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, out)
    loss, aux = value if self.options["has_aux"] else (value, None)
    main = jax.tree.leaves(jax.device_get((loss, grads)))
    leaves = list(map(_wide, [*main, *jax.tree.leaves(aux)]))
    sizes = list(map(_largest, leaves))
    coarsest = max(float(jnp.finfo(x.dtype).eps) for x in main if x.dtype != jax.dtypes.float0)
    tolerance = 1e-9 if coarsest < 1e-12 else 1e-4
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    least = [1e-2 * max(sizes[: len(main)])] * len(main) + [0.0] * len(leaves)
    allowed = [tolerance * max(x, y) for x, y in zip(sizes, least, strict=False)]
    return Outcome(leaves, allowed, len(main), aux)

  def compare(self, how: How, whole: Outcome, leaves: Leaves) -> dict[int, LeafComparison]:
    """The whole batch beside microbatches; not what an aux has of each of them, or of the last."""
    names = ["loss", *self.names.values()]
    names += [name for name, _ in _validate.named_leaves("aux", whole.aux)]
    each = enumerate(zip(names, whole.leaves, leaves, whole.allowed, strict=True))
    not_reduced = {i for i, word in enumerate(how.words) if word in ("stack", "last")}
    return {i: _leaf(*x) for i, x in each if i < whole.main or i not in not_reduced}

  def agree(self, how: How, slack: float = 1.0, of: Sequence[Tried] | None = None) -> bool:
    """Whether loss and gradients do in all batches and splits."""
    of = self.outcomes if of is None else of
    return all(x.whole.fits(how.join(parts), slack) for x in of for parts in x.splits)

  def wrong(self, how: How, of: Sequence[Tried] | None = None) -> set[int]:
    """The leaves that differ in some batch."""
    each = [(x.whole, parts) for x in (of or self.outcomes) for parts in x.splits]
    compared = (self.compare(how, whole, how.join(parts)) for whole, parts in each)
    return {i for leaves in compared for i, leaf in leaves.items() if not leaf.agrees}

  def as_called(self) -> dict[int, LeafComparison]:
    """What `microbatch_value_and_grad` itself gives for the given call, beside the whole batch."""
    options = {**self.options, "num_microbatches": None, "microbatch_size": self.sizes[0]}
    with self._noted(self.sizes[0]):
      outcome = self._outcome(self.compiled(self.fun, **options), self.call)
    return self.compare(self.how(), self.rounded(self.call), outcome.leaves)

  def traced(self) -> ClosedJaxpr:
    """The jaxpr of the whole batch, traced anew: JAX remembers that of a function it knows."""
    with whole_batches():
      return jax.make_jaxpr(self._program(self.fun))(self.call.values)

  def splits_nothing(self) -> bool:
    """Whether the loss calls nothing that runs in microbatches."""
    split = jax.make_jaxpr(self._program(self.fun))(self.call.values)
    return fingerprint(self.traced()) == fingerprint(split)

  def in_words(self, size: int) -> str:
    """A split."""
    count, rest = divmod(self.rows, size)
    if rest:
      return f"microbatches of {size} rows, of {self.rows}"
    return f"{count} microbatch{'es' * (count > 1)} of {size} rows"

  def _noted(self, size: int) -> contextlib.AbstractContextManager[None]:
    return noted(f"check_split ran it in {self.in_words(size)}; on all {self.rows} rows it ran.")


def _cut(rows: int, size: int) -> list[np.ndarray]:
  """The rows of each microbatch, as `microbatch_value_and_grad` cuts them."""
  full = rows // size
  parts = [np.arange(i, full * size, full) for i in range(full)]
  return [*parts, np.arange(full * size, rows)] if rows % size else parts


def _largest(x: np.ndarray) -> float:
  return float(np.max(np.abs(x), initial=0.0))


def _wide(x: Leaf) -> np.ndarray:
  x = np.asarray(x)
  dtype = {"c": np.complex128, "i": np.int64, "u": np.int64, "b": np.int64}
  return x.astype(dtype.get(x.dtype.kind, np.float64))


def _leaf(name: str, x: np.ndarray, y: np.ndarray | None, allowed: float) -> LeafComparison:
  fits = y is not None and x.shape == y.shape and bool(np.all(np.isfinite(y)))
  return LeafComparison(name, _largest(x), _largest(x - y) if fits else float("inf"), allowed)


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
  """Adds a note to an error of the loss."""
  try:
    yield
  except Exception as error:
    error.add_note(note)
    raise
