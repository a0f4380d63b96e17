"""A loss on the whole batch and on rows of it, and what microbatches add up to, in NumPy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import operator
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np

from optax_accum import _validate
from optax_accum._arithmetic import reduction_words
from optax_accum._arithmetic.dtypes import is_key
from optax_accum._arithmetic.reductions import MergeFn
from optax_accum._arithmetic.trees import Aux, Grads, Kwargs, Leaf, Leaves, Tree
from optax_accum._check_split.devices import Devices, EVERY, OfArrays, on
from optax_accum._check_split.facts import Facts, facts_of
from optax_accum._check_split.probes import Call, probes_of
from optax_accum._check_split.report import LeafComparison
from optax_accum._check_split.words import options_of
from optax_accum._microbatches.loss_function import check_loss
from optax_accum._microbatches.options import Slot
from optax_accum._microbatches.whole import whole_batches

# What the roundings of a loss may be, of what the last bit of parameters changes.
_MANY_UNITS = 20.0
_ONE = Devices()
ROWS: Callable[[Call], float] = operator.attrgetter(
  "rows"
)  # the weight without a `weight_fn`

LossFn: TypeAlias = Callable[..., Tree]
Word: TypeAlias = str | MergeFn  # that reduces an output


class Outcome(NamedTuple):
  """What a loss gave for a call, in NumPy."""

  call: Call
  main: Leaves  # the loss and the gradients
  leaves: Leaves  # these, and the aux
  allowed: list[
    float
  ]  # how much of a difference may be rounding, for each of the leaves
  trees: tuple[
    Grads, Aux
  ]  # of numbers in place of the arrays, which would need memory
  splits: Sequence[
    Sequence["Outcome"]
  ] = ()  # what the microbatches of each split of it give

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
    return np.concatenate(
      [np.ravel(x).view(float) / max(allowed, 1e-100) for x, allowed in each]
    )


class How(NamedTuple):
  """How microbatches become one."""

  words: list[Word]  # that reduce the loss, each gradient and each aux
  weight: Callable[[Call], float]
  skips: bool  # what is not finite

  def reworded(self, names: Sequence[str], words: Mapping[str, str]) -> "How":
    """The same but for the words of some of the leaves `names`."""
    each = zip(names, self.words, strict=True)
    return self._replace(words=[words.get(name, word) for name, word in each])

  def join(self, parts: Sequence[Outcome]) -> Leaves:
    """All microbatches as one, leaf by leaf: None where a word cannot reduce a leaf."""
    # A weight of zero leaves a microbatch out, also where it is NaN.
    weights = np.array(
      [self.weight(x.call) * (x.is_finite or not self.skips) for x in parts]
    )
    rows = [part.call.taken for part in parts]
    each = zip(self.words, *(part.leaves for part in parts), strict=True)
    return [self._join(word, leaves, weights, rows) for word, *leaves in each]

  def _join(
    self, word: Word, leaves: Leaves, weights: np.ndarray, rows: Leaves
  ) -> np.ndarray | None:
    if word == "concat":
      if [x.shape[:1] for x in leaves] != [x.shape for x in rows]:
        return None
      return np.concatenate(leaves)[np.argsort(np.concatenate(rows))]
    if len({x.shape for x in leaves}) > 1 or (
      word == "mean" and leaves[0].dtype.kind == "i"
    ):
      return None
    stack, weights = np.stack(leaves)[weights != 0], weights[weights != 0]
    if not len(stack):
      return np.zeros_like(leaves[0])
    if word == "mean":
      return np.tensordot(weights, stack, 1) / np.sum(weights)
    return stack[-1] if _is_not_compared(word) else getattr(stack, str(word))(0)


class Runs:
  """A loss, a call of it and its splits, and all that was run.

  Of the rows of `batch`, the first `rows` are checked, and as many others at a time; `sizes` are
  those of a microbatch in each split. `options` are all those of `microbatch_value_and_grad`.
  """

  def __init__(
    self,
    fun: LossFn,
    batch: Call,
    options: Kwargs,
    sizes: Sequence[int],
    rows: int,
    devices: Devices = _ONE,
  ):
    self.fun, self.batch, self.options, self.sizes, self.rows = (
      fun,
      batch,
      options,
      sizes,
      rows,
    )
    self.devices = devices
    self.resized = functools.partial(
      Runs, fun, batch, options
    )  # the same of other sizes
    # Other rows, in the programs of the first, refute what is a weight by chance.
    starts = np.unique(np.linspace(0, batch.rows - rows, 8).astype(int))
    some = [
      batch.take(np.arange(i, i + rows), f"rows from {i} on") for i in starts
    ]
    self.call, self.others = some[0]._replace(name=batch.name), some[1:]
    carries, by_slot = (
      options["carry_argnum"] is not None,
      options_of("batch", batch.roles.batch),
    )

    @functools.wraps(fun)
    def with_aux(*args: Tree, **kwargs: Tree) -> tuple[Leaf, Aux]:
      out = fun(*args, **kwargs)
      check_loss(out, options["has_aux"] or carries, carries)
      # A carry is an argument like others, and of the new one nothing is compared.
      return (
        (out[0], out[1][1])
        if carries
        else out
        if options["has_aux"]
        else (out, None)
      )

    def weigh(*args: Tree, **kwargs: Tree) -> Leaf:
      positions, names = by_slot.values()
      return options["weight_fn"](
        *(args[i] for i in positions), **{x: kwargs[x] for x in names}
      )

    at_once = jax.value_and_grad(with_aux, options["argnums"], has_aux=True)
    self._weight = ROWS
    if options["weight_fn"] is not None:  # traced, as in microbatches
      count = _compiled(self._on_one(weigh))
      self._weight = lambda call: float(count(call.values))
    split = {**options, **by_slot, **options_of("rng", batch.roles.rng)}
    axes = tuple(
      batch.roles.batch[slot] for slots in by_slot.values() for slot in slots
    )
    split |= {"batch_axis": axes, "microbatch_size": devices.size or sizes[0]}
    split |= {"fun": with_aux, "has_aux": True}
    split |= dict.fromkeys(
      ("num_microbatches", "carry_argnum", "carry_reduction")
    )
    # By default an aux of as many rows as a microbatch is refused: `compare` finds those.
    split["aux_reduction"] = options["aux_reduction"] or "mean"
    self._split = _compiled(devices.step(self.call, split), devices.mesh)
    if devices.sends:
      self._each = _compiled(devices.of_each(with_aux, self.call), devices.few)
    self._whole, self._mesh = self._on_one(at_once), None
    self._forward = self._on_one(with_aux)
    if not devices.is_alone:
      self._whole = devices.step(self.call, {**split, "microbatch_size": rows})
      self._forward = self._whole
      self._mesh = devices.mesh
    self._run = _compiled(self._whole, self._mesh)

  def _on_one(self, fun: LossFn) -> OfArrays:
    return self.devices.on_one(functools.partial(self.call.called, fun))

  def how(self, **changes: Tree) -> How:
    """How microbatches become one with these options, and with others."""
    options = {"weight": self._weight, **self.options, **changes}
    grads, aux = options["grad_reduction"], options["aux_reduction"]
    grads = options["reduction"] if grads is None else grads
    like = self.given.trees
    grads = reduction_words.match("grad_reduction", grads, like[0], "gradients")
    aux = reduction_words.match(
      "aux_reduction", "mean" if aux is None else aux, like[1]
    )
    words = [
      options["reduction"],
      *jax.tree.leaves(grads),
      *jax.tree.leaves(aux),
    ]
    return How(words, options["weight"], options["skip_nonfinite"])

  @functools.cached_property
  def given(self) -> Outcome:
    return self.whole(self.call)

  @functools.cached_property
  def names(self) -> list[str]:
    """Of the loss, its gradients and aux."""
    trees = zip(("grads", "aux"), self.given.trees, strict=True)
    return [
      "loss",
      *(name for tree in trees for name, _ in _validate.named_leaves(*tree)),
    ]

  @functools.cached_property
  def facts(self) -> Facts:
    """What the jaxpr of the loss tells."""
    twice = self.call.take(np.arange(2 * self.rows) % self.rows)
    closed = self._trace(self._forward, self.call)
    try:
      twin = self._trace(self._forward, twice)
    except Exception:  # it runs on certain numbers of rows
      twin = closed
    return facts_of(closed, twin, self.call)

  @functools.cached_property
  def calls(self) -> list[Call]:
    """The batches to run, the given one first."""
    given, *changed = probes_of(
      self.call, self.facts.integers, self.facts.floats
    )
    return [given, *self.others, *changed]

  @functools.cached_property
  def outcomes(self) -> list[Outcome]:
    """All batches that tell something. Raises what the loss does."""
    import tqdm  # training does without

    bar = tqdm.tqdm(
      self.calls, "checking", delay=3, unit="batch", leave=False, disable=None
    )
    return [tried for call in bar if (tried := self._try(call))]

  @functools.cached_property
  def cuts(self) -> list[list[np.ndarray]]:
    """The rows of the microbatches of each split, as `microbatch_value_and_grad` cuts them.

    Without a smaller one, also parts of neighbors, in the same program: pairs of a first and a
    second half (chosen, rejected) are together in the others.
    """
    cuts, size = [_cut(self.rows, size) for size in self.sizes], self.sizes[0]
    if self.devices.sends:
      return cuts
    if len(cuts) == 1 and size < self.rows and self.rows % size == 0:
      cuts.append(np.split(np.arange(self.rows), self.rows // size))
    return cuts

  def _try(self, call: Call) -> Outcome | None:
    whole = self.whole(call)
    if not whole.is_finite:
      return None
    splits = [self.parts(call, rows) for rows in self.cuts]
    each = [part for parts in splits for part in parts]
    if self.devices.sends and not all(part.is_finite for part in each):
      return None  # because of a device where nothing counts
    weights = [(self._weight(part.call), part.main[0]) for part in each]
    if any(
      weight < 0 or (weight == 0 and np.isinf(loss)) for weight, loss in weights
    ):
      return None  # such a length is none
    with contextlib.suppress(Exception):  # a weight of groups of rows
      if any(self._weight(call.take(np.array([i]))) < 0 for i in (0, -1)):
        return None  # nor is that of one row, which others outweigh
    if not any(weight for weight, _ in weights):
      return None  # a step is not taken
    is_zero = not any(
      np.any(x) for outcome in (whole, *each) for x in outcome.main
    )
    return None if is_zero else whole._replace(splits=splits)

  def parts(self, call: Call, rows: Sequence[np.ndarray]) -> list[Outcome]:
    if self.devices.sends:
      return [part for x in rows for part in self._of_each(call, x)]
    return [self._outcome(self._run, call.take(x)) for x in rows]

  def _of_each(self, call: Call, rows: np.ndarray) -> Iterator[Outcome]:
    """What one microbatch gives on each device."""
    out = jax.device_get(_without_keys(self._each(call.take(rows).values)))
    own = lambda i, _: jax.tree.map(operator.itemgetter(i), out)  # noqa: E731
    for i, x in enumerate(np.split(rows, len(out[0][0]))):
      yield self._outcome(functools.partial(own, i), call.take(x))

  def whole(self, call: Call) -> Outcome:
    """All rows at once, where the loss does not split by itself."""
    with whole_batches():
      whole, nudged = (
        self._outcome(self._run, x) for x in (call, call.nudged())
      )
    # What parameters change that differ in their last bits alone may be rounding too.
    each = zip(whole.leaves, nudged.leaves, whole.allowed, strict=True)
    return whole._replace(
      allowed=[max(z, _MANY_UNITS * _largest(x - y)) for x, y, z in each]
    )

  def _outcome(self, program: Callable[[Leaves], Tree], call: Call) -> Outcome:
    try:
      out = program(call.values)
    except Exception as error:
      where = "one device, without named axes"
      if self.devices.axes:
        where = (
          "its mesh" if self._mesh else "one device, where its axes have size 1"
        )
      note = f"The check ran it on {where}, on {call.rows} of {self.rows} rows."
      error.add_note(
        f"{note} On all it ran." if call.rows < self.rows else note
      )
      raise
    (loss, aux), grads, *_ = _without_keys(out)
    given = jax.device_get(jax.tree.leaves((loss, grads)))
    main, others = (
      list(map(_wide, given)),
      list(map(_wide, jax.tree.leaves(aux))),
    )
    is_double = all(jnp.finfo(x.dtype).eps < 1e-12 for x in given)
    tolerance = 1e-9 if is_double and not self.facts.is_single else 1e-4
    # Where a gradient is zero but for rounding, that is the rounding of what cancelled, which is
    # many units of what was added up: 1e-6 of the largest leaf in float32.
    least = 1e-2 * max(map(_largest, main))
    sizes = [*(max(_largest(x), least) for x in main), *map(_largest, others)]
    allowed = [tolerance * size for size in sizes]
    return Outcome(
      call, main, [*main, *others], allowed, jax.tree.map(np.ndim, (grads, aux))
    )

  def read_carry(self) -> list[str]:
    """What in the carry the loss changes, and is another by. Not keys, nor integers: counters."""
    old = [x for x in self.call.arrays if x.role == "carry"]
    if not any(x.kind in "fcb" for x in old):
      return []
    new = _compiled(self._on_one(self._new_carry))(self.call.moved(1).values)
    changed = [
      x
      for x, y in zip(old, new, strict=False)
      if not np.array_equal(x.value, y)
    ]
    names = [x.name for x in changed if x.kind in "fcb"]

    def is_read(name: str) -> bool:
      others = (self.call.moved_carry(name, size) for size in (0.1, 3.0))
      return any(
        not self.given.fits(self.whole(call).leaves) for call in others
      )

    return list(filter(is_read, names))

  def _new_carry(self, *args: Tree, **kwargs: Tree) -> Leaves:
    """The arrays of the carry that the loss returns, for each array of that it gets."""
    [slot] = self.batch.roles.carry
    given = dict[Slot, Tree]([*enumerate(args), *kwargs.items()])
    new = self.fun(*args, **kwargs)[1][0]
    pairs = zip(
      jax.tree.leaves(given[slot]),
      _without_keys(jax.tree.leaves(new)),
      strict=False,
    )
    return [y for x, y in pairs if isinstance(x, jax.Array)]

  def compare(
    self, how: How, whole: Outcome, leaves: Leaves
  ) -> list[LeafComparison]:
    """The whole batch beside microbatches; not what an aux has of each of them, or of the last."""
    each = zip(
      self.names, how.words, whole.leaves, leaves, whole.allowed, strict=True
    )
    return [
      LeafComparison(name, _largest(x), _difference(x, y), allowed)
      for name, word, x, y, allowed in each
      if name[:3] != "aux" or not _is_not_compared(word)
    ]

  def agree(self, how: How) -> bool:
    """Whether loss and gradients do in all batches and splits."""
    return all(
      x.fits(how.join(parts)) for x in self.outcomes for parts in x.splits
    )

  def comparisons(self, how: How) -> Iterator[tuple[str, list[LeafComparison]]]:
    """All batches and splits, each with its name."""
    for whole, parts in [
      (x, parts) for x in self.outcomes for parts in x.splits
    ]:
      size = self.sizes[0] if self.devices.sends else parts[0].call.rows
      split = f"microbatches of {size} rows, of {self.rows}"
      where = f"{whole.call.name}; {split}"
      yield where, self.compare(how, whole, how.join(parts))

  def wrong(self, how: How) -> set[str]:
    """The leaves that differ in some batch."""
    return {
      x.name
      for _, leaves in self.comparisons(how)
      for x in leaves
      if not x.agrees
    }

  def as_called(self) -> Iterator[tuple[str, list[LeafComparison]]]:
    """What the step itself gives, beside the whole batch: one over a mesh for all batches."""
    calls = [self.given, *(self.outcomes if self.devices.loss else ())]
    size = self.devices.size or self.sizes[0]
    over = ", over the mesh" * (self.devices.loss is not None)
    for whole in calls:
      given = self._outcome(self._split, whole.call)
      # Few rows of a device may all count for nothing, which spoils what it sends.
      if given.is_finite and whole.call.oddity < 2:
        where = f"{whole.call.name}; microbatches of {size} rows, of {self.rows}{over}"
        yield where, self.compare(self.how(), whole, given.leaves)

  def traced(self, is_whole: bool = True) -> Any:
    """The jaxpr of all rows, traced anew: JAX remembers that of a function it knows."""
    return self._trace(self._whole, self.call, is_whole)

  def _trace(self, fun: OfArrays, call: Call, is_whole: bool = True) -> Any:
    run = lambda values: fun(values)  # noqa: E731
    with (
      on(self._mesh),
      whole_batches() if is_whole else contextlib.nullcontext(),
    ):
      return jax.make_jaxpr(run)(call.values)

  def fingerprint(self, is_whole: bool = True) -> tuple[str, list[bytes]]:
    """What two jaxprs of it share, unless NumPy drew numbers while it was traced."""
    closed = self.traced(is_whole)
    consts = [np.asarray(x).tobytes() for x in closed.consts if not is_key(x)]
    return re.sub(r"0x[0-9a-f]+", "", str(closed)), consts


def _compiled(run: OfArrays, mesh: Mesh | None = None) -> OfArrays:
  """A program, over a mesh if given, compiled fast: it runs some hundred times on few rows."""
  fast = (
    {"xla_backend_optimization_level": 0}
    if jax.default_backend() == "cpu"
    else None
  )
  program = jax.jit(run, compiler_options=fast)
  if not mesh:
    return program

  def over_mesh(values: Leaves) -> Tree:
    with on(mesh):  # where keys are not yet
      return program(jax.device_put(values, NamedSharding(mesh, EVERY)))

  return over_mesh


def _without_keys(tree: Tree) -> Tree:
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if is_key(x) else x, tree
  )


def _is_not_compared(word: Word) -> bool:
  """Whether this reduction may give what all rows do not."""
  return callable(word) or word in ("stack", "last")


def _cut(rows: int, size: int) -> list[np.ndarray]:
  """The rows of each microbatch, as `microbatch_value_and_grad` cuts them."""
  full = rows // size
  parts = [np.arange(i, full * size, full) for i in range(full)]
  return [*parts, np.arange(full * size, rows)] if rows % size else parts


def _largest(x: np.ndarray) -> float:
  return float(np.max(np.abs(x), initial=0.0))


def _difference(x: np.ndarray, y: np.ndarray | None) -> float:
  return float("inf") if y is None or x.shape != y.shape else _largest(x - y)


def _wide(x: Leaf) -> np.ndarray:
  x = np.asarray(x)
  wide = np.int64 if x.dtype.kind in "iub" else np.complex128
  return x.astype(wide if x.dtype.kind in "iubc" else np.float64)
