"""A loss on the whole batch and on rows of it, and what microbatches add up to, in NumPy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import functools
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
from optax_accum._check_split.probes import arrays, Call, is_array, probes_of, Rows
from optax_accum._check_split.report import LeafComparison
from optax_accum._microbatches.loss import known_weight
from optax_accum._microbatches.options import WeightFn
from optax_accum._microbatches.unsplit import whole_batches
from optax_accum._microbatches.value_and_grad import microbatch_value_and_grad

# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0
_JOINS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "last": lambda x, y: y}

LossFn: TypeAlias = Callable[..., Tree]
Program: TypeAlias = Callable[[Leaves], tuple[Tree, Tree]]  # arrays to value and gradients


class Outcome(NamedTuple):
  """What a loss gave, in NumPy."""

  leaves: Leaves  # the loss, the gradients, and the aux
  allowed: list[float]  # how much of a difference may be rounding, for each of them
  main: int  # how many are those that are no aux
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
    return all(bool(_largest(x - y) <= slack * allowed) for x, y, allowed in each)


class Part(NamedTuple):
  """One microbatch."""

  rows: Rows
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
  weight_fn: WeightFn | None
  skips: bool  # what is not finite
  axis: int  # of what "concat" joins

  def weights(self, parts: Sequence[Part]) -> list[float]:
    """How much each microbatch counts; NaN for what is no weight."""
    weights = [float(len(part.rows)) for part in parts]
    if self.weight_fn is not None:
      weights = [float(self.weight_fn(*map(p.call.args.__getitem__, p.call.batch))) for p in parts]
    counted = [part.outcome.is_finite or not self.skips for part in parts]
    both = zip(weights, counted, strict=True)
    return [(w if w >= 0 else np.nan) * is_counted for w, is_counted in both]

  def joined(self, parts: Sequence[Part], weights: Sequence[float] | None = None) -> Leaves:
    """All microbatches as one, leaf by leaf: None where a word cannot reduce a leaf."""
    weights = self.weights(parts) if weights is None else weights
    each = zip(self.words, *(part.outcome.leaves for part in parts), strict=True)
    return [self._join(word, leaves, parts, weights) for word, *leaves in each]

  def _join(
    self, word: str, leaves: Leaves, parts: Sequence[Part], weights: Sequence[float]
  ) -> np.ndarray | None:
    if word == "concat":
      sizes = [dict(enumerate(x.shape)).get(self.axis % (x.ndim or 1)) for x in leaves]
      if sizes != [len(part.rows) for part in parts]:
        return None
      order = np.argsort(np.concatenate([part.rows for part in parts]))
      return np.concatenate(leaves, self.axis).take(order, self.axis)
    if len({x.shape for x in leaves}) > 1 or (word == "mean" and leaves[0].dtype.kind == "i"):
      return None
    # A weight of zero leaves a microbatch out, also where it is NaN.
    counted = [(x, w) for x, w in zip(leaves, weights, strict=True) if w]
    if not counted:
      return np.zeros_like(leaves[0])
    if word == "mean":
      return sum(w * x for x, w in counted) / sum(w for _, w in counted)
    return functools.reduce(_JOINS[word], [x for x, _ in counted])


class Runs:
  """A loss, a call of it and its splits, and all that was run.

  `sizes` are the rows of a microbatch, of each split.
  """

  def __init__(self, fun: LossFn, call: Call, options: Kwargs, sizes: Sequence[int]):
    self.fun, self.call, self.sizes = fun, call, sizes
    self.options, self.rows = dict(options), call.rows
    # Of different size, and rows that follow each other.
    self.two = np.split(np.arange(self.rows), [min(-(-2 * self.rows // 3), self.rows - 1)])
    if (weight_fn := options["weight_fn"]) is not None:  # traced, as microbatches do
      self.options["weight_fn"] = jax.jit(functools.partial(known_weight, weight_fn))
    wrt = options["argnums"]
    self.params = call.args[wrt] if isinstance(wrt, int) else tuple(call.args[i] for i in wrt)
    self._unsplit = whole_batches()(self.program(fun))
    self._whole, self._part = _jit(self._unsplit), _jit(self.program(fun))

  def program(self, fun: LossFn, **options: object) -> Program:
    """Value and gradients of the arrays of a call, at once; the rest of it are constants."""
    names = ("argnums", "has_aux", "batch_argnums", "batch_axis")
    at_once = {name: self.options[name] for name in names}
    at_once |= {"num_microbatches": 1, "rng_argnums": (), "aux_reduction": "last"}
    value_and_grad = microbatch_value_and_grad(fun, **(options or at_once))
    leaves, treedef = jax.tree.flatten(self.call.args)

    def run(given: Leaves) -> tuple[Tree, Tree]:
      rest = iter(given)
      args = jax.tree.unflatten(treedef, [next(rest) if is_array(x) else x for x in leaves])
      value, grads, *_ = value_and_grad(*args)
      return value, grads

    return run

  def otherwise(self, fun: LossFn | None = None, batch: Mapping[int, int] | None = None) -> "Runs":
    """The same batches, in microbatches of another loss or in which more is split."""
    other = copy.copy(self)
    other.__dict__.pop("outcomes", None)
    if fun is not None:
      other._part = _jit(self.program(fun))
    if batch is not None:
      other.calls = [call._replace(batch=batch) for call in self.calls]
    return other

  def how(self, **changes: object) -> How:
    """How microbatches become one with these options, or with others."""
    options = {**self.options, **changes}
    axis = options["concat_axis"]
    grads = reduction_words.named_of_gradients(
      options["grad_reduction"], REDUCTIONS[options["reduction"]]
    )
    aux = reduction_words.named_of_aux(options["aux_reduction"], axis)
    kinds = jax.tree.leaves(
      [
        REDUCTIONS[options["reduction"]],
        reduction_words.match("grad_reduction", grads, self.params, "gradients"),
        reduction_words.match("aux_reduction", aux, self.given.aux),
      ]
    )
    words = [kind.name for kind in kinds]
    return How(words, options["weight_fn"], options["skip_nonfinite"], axis or 0)

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
    whole, how = self.whole(call), self.how()
    if not whole.is_finite:
      return None
    tried = Tried(call, whole, [])
    for size in self.sizes:
      with noted(f"check_split ran it in {self.in_words(size)}; on all {self.rows} rows it ran."):
        tried.splits.append(self.parts(call, cut(self.rows, size)))
    if whole.is_zero and all(part.outcome.is_zero for split in tried.splits for part in split):
      return None
    if self.wrong(how, [tried]):
      tried = tried._replace(whole=self.whole(call, rounds=True))
    return tried

  @functools.cached_property
  def in_two(self) -> list[Tried]:
    """The same batches, each in two parts."""
    return [x._replace(splits=[self.parts(x.call, self.two)]) for x in self.outcomes]

  def whole(self, call: Call, rounds: bool = False) -> Outcome:
    """All rows at once, with what parameters change that differ in their last bit, if `rounds`."""
    whole = self._outcome(self._whole, call)
    if not rounds:
      return whole
    nudged = self._outcome(self._whole, call.nudged())
    each = zip(whole.leaves, nudged.leaves, whole.allowed, strict=True)
    return whole._replace(allowed=[max(a, _MANY_UNITS * _largest(x - y)) for x, y, a in each])

  def parts(self, call: Call, rows: Sequence[Rows]) -> list[Part]:
    """Some rows at once, and then others."""
    taken = [call.take(x) for x in rows]
    return [Part(x, y, self._outcome(self._part, y)) for x, y in zip(rows, taken, strict=True)]

  def _outcome(self, program: Program, call: Call) -> Outcome:
    out = program(arrays(call.args))
    value, grads = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, out)
    loss, aux = value if self.options["has_aux"] else (value, None)
    main = jax.tree.leaves(jax.device_get((loss, grads)))
    leaves = list(map(_wide, [*main, *jax.tree.leaves(aux)]))
    sizes, count = list(map(_largest, leaves)), len(main)
    kinds = [x.dtype for x in main if jnp.issubdtype(x.dtype, jnp.inexact)]
    tolerance = 1e-9 if max(float(jnp.finfo(x).eps) for x in kinds) < 1e-12 else 1e-4
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    least = [1e-2 * max(sizes[:count])] * count + [0.0] * (len(leaves) - count)
    allowed = [tolerance * max(x, y) for x, y in zip(sizes, least, strict=True)]
    return Outcome(leaves, allowed, count, aux)

  def compare(self, how: How, whole: Outcome, leaves: Leaves) -> dict[int, LeafComparison]:
    """The whole batch beside microbatches; not what an aux has of each of them, or of the last."""
    names = ["loss", *(name for name, _ in _validate.named_leaves("grads", self.params))]
    names += [name for name, _ in _validate.named_leaves("aux", whole.aux)]
    each = zip(names, whole.leaves, leaves, whole.allowed, strict=True)
    skipped = [i >= whole.main and word in ("stack", "last") for i, word in enumerate(how.words)]
    return {i: _leaf(*leaf) for i, leaf in enumerate(each) if not skipped[i]}

  def agree(self, how: How, slack: float = 1.0, of: Sequence[Tried] | None = None) -> bool:
    """Whether loss and gradients do in all batches and splits."""
    of = self.outcomes if of is None else of
    return all(x.whole.fits(how.joined(parts), slack) for x in of for parts in x.splits)

  def wrong(self, how: How, of: Sequence[Tried] | None = None) -> set[int]:
    """The leaves that differ in some batch."""
    each = [(x.whole, parts) for x in (of or self.outcomes) for parts in x.splits]
    compared = (self.compare(how, whole, how.joined(parts)) for whole, parts in each)
    return {i for leaves in compared for i, leaf in leaves.items() if not leaf.agrees}

  def as_called(self) -> dict[int, LeafComparison]:
    """What `microbatch_value_and_grad` itself gives for the given call, beside the whole batch."""
    size = self.sizes[0]
    program = _jit(self.program(self.fun, **self.options, microbatch_size=size))
    with noted(f"check_split ran it in {self.in_words(size)}; on all {self.rows} rows it ran."):
      leaves = self._outcome(program, self.call).leaves
    return self.compare(self.how(), self.whole(self.call, rounds=True), leaves)

  def traced(self, program: Program | None = None) -> ClosedJaxpr:
    """The jaxpr of a program, by default of the whole batch's, traced anew."""
    program = program or self._unsplit
    # JAX remembers the jaxpr of a function that it knows.
    return jax.make_jaxpr(lambda given: program(given))(arrays(self.call.args))

  def splits_nothing(self) -> bool:
    """Whether the loss calls nothing that runs in microbatches."""
    return fingerprint(self.traced()) == fingerprint(self.traced(self.program(self.fun)))

  def in_words(self, size: int) -> str:
    """A split."""
    count, rest = divmod(self.rows, size)
    if rest:
      return f"microbatches of {size} rows, of {self.rows}"
    return f"{count} microbatch{'es' * (count > 1)} of {size} rows"


def cut(rows: int, size: int) -> list[Rows]:
  """The rows of each microbatch, as `microbatch_value_and_grad` cuts them."""
  full = rows // size
  strided = [np.arange(i, full * size, full) for i in range(full)]
  return [*strided, *([np.arange(full * size, rows)] if rows % size else [])]


def _jit(program: Program) -> Program:
  """The program, which is compiled fast: it runs some hundred times, on a few rows."""
  on_cpu = jax.default_backend() == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  return jax.jit(program, compiler_options=options)


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
