"""`check_split`: the right verdict for each of a zoo of losses, and a fix that works."""

import collections
import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees, zoo
from support.compiled import compilations
from support.devices import make_mesh
from support.samples import alone_and_over_a_mesh, first_of_each, more
from support.zoo import BATCH, EVEN, KEY, PARAMS, Specimen, XY, ZOO

from optax_accum import (
  check_split,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
)

TX = optax.sgd(0.1)
FIXED = {x.fixed.fun.__name__: x.fixed for x in ZOO.values() if x.fixed}
# Microbatches that are all alike show nothing of these: a mean over tokens is one over rows.
HIDDEN = [name for name, x in ZOO.items() if x.hides_in_even_batches]
# Those of them of which another like it is looked at.
ALIKE = ("pad id 0", "lengths", "padding mask", "focal", "rare class", "jnp.mean(where=)", "sample weights")  # fmt: skip
# Those of them that are also looked at on a batch that shows it: one for each kind of weight.
SHOWN = ("token mean", "labels of -100", "class weights")
# Of these the default parts are looked at, 5 rows and 3.
DEFAULTS = ("mean", "token mean", "groups", "halves", "order for a log")
# Of these an argument that is no batch has 8 rows.
EIGHT_ROWS = ("labels apart", "labels apart, whole")
# Over a mesh, where a microbatch of a device has 2 rows, these get another verdict, which is not ok.
ANOTHER = ("switched", "focal")
PICKED = np.random.default_rng(1).integers(8, size=32)


def check(specimen, source=BATCH, **options):
  options = {**specimen.options, **options}
  return check_split(specimen.fun, *specimen.call(source), **options)


def check_one_split(specimen, source=BATCH, **options):
  """The same in microbatches of 6 rows, and 2."""
  options = {**specimen.options, **options}
  if "num_microbatches" not in options:
    options.setdefault("microbatch_size", 6)
  return check(specimen, source, **options)


def many(source):
  """32 rows like those of a batch."""
  rng = np.random.default_rng(2)
  batch = {name: x[PICKED % len(x)] for name, x in source.items()}
  for name, x in batch.items():
    if x.dtype.kind == "f" and not np.isin(x, (0, 1)).all():
      batch[name] = x * rng.uniform(0.5, 1.5, x.shape)
  return batch


def check_over_mesh(specimen, source=BATCH, **options):
  """The report of a step over 8 devices."""
  options = {"num_microbatches": 2, **specimen.options, **options}
  options.pop("microbatch_size", None)
  step = make_train_step(specimen.fun, TX, mesh=make_mesh(8), **options)
  params, *further = specimen.call(many(source))
  return step.check(params, TX.init(params), *further)


CHECKS = {False: check_one_split, True: check_over_mesh}


def is_for_gradients(options):
  """Whether a fix is some options, and all of `microbatch_value_and_grad`."""
  known = inspect.signature(microbatch_value_and_grad).parameters
  return len(options) > 0 and set(options) <= set(known)


@functools.cache
def report_of(name):
  """What is said of a loss of the zoo on its batch: asked once."""
  return (check if name in DEFAULTS else check_one_split)(ZOO[name])


@functools.cache
def report_of_fixed(name):
  """The same of a loss that is fixed as words say, which several losses share."""
  return check_one_split(FIXED[name])


def assert_mends(specimen, options):
  """That microbatches with such options have the whole batch's loss and gradients."""
  whole = jax.jit(jax.value_and_grad(specimen.fun))(*specimen.call())
  # Two of them, and one with fewer rows.
  options = {**specimen.options, **options, "microbatch_size": 3}
  split = microbatch_value_and_grad(specimen.fun, **options)
  trees.assert_close(jax.jit(split)(*specimen.call()), whole, 1e-5)


def options_of(report):
  """The options that a fix has, on lines of their own."""
  lines = [line for line in report.fix.splitlines() if re.match(r"\w+=", line)]
  return eval(f"dict({','.join(lines)})", {"jnp": jnp})


def assert_says(report, verdict, fix=""):
  """The verdict, where it is not any but "ok", and a part of the fix."""
  assert report.ok == (verdict == "ok"), report
  assert verdict in ("", report.verdict), report
  assert fix in " ".join(report.fix.split()), report


def verdict_of(name):
  return ZOO[name].verdict


def verdict_over_mesh(name):
  return "" if name in ANOTHER else ZOO[name].verdict


# The zoo.

GIVEN = first_of_each([name for name in ZOO if name not in HIDDEN], verdict_of)
OVER_MESH = [name for name in ZOO if name not in EIGHT_ROWS]
RIGHT = [name for name, x in ZOO.items() if x.verdict == "ok" and not x.options]
HALF = (*RIGHT, "token mean", "labels of -100", "contrastive", "batch statistics")  # fmt: skip


@pytest.mark.parametrize("name", [*GIVEN, *SHOWN])
def test_each_loss_gets_its_verdict_and_a_fix_that_works(name):
  specimen, report = ZOO[name], report_of(name)
  assert_says(report, specimen.verdict, specimen.fix)
  draws = zoo.DRAWS in " ".join("".join(report.not_checked).split())
  assert draws == (specimen.not_checked == zoo.DRAWS), report
  options = options_of(report)
  if specimen.fixed is not None:
    again = report_of_fixed(specimen.fixed.fun.__name__)
    assert again.ok, again
  elif "rng_argnums" in options:  # the noise of microbatches is another
    again = check_one_split(specimen, **options)
    assert again.ok, again
  elif name not in HIDDEN and is_for_gradients(options):
    assert_mends(specimen, options)


@pytest.mark.parametrize("name", [more(x) if x in ALIKE else x for x in HIDDEN])
def test_a_batch_that_hides_a_weight_is_changed_until_it_shows(name):
  specimen = ZOO[name]
  report = check_one_split(specimen, EVEN)
  assert report.where[:8] != "as given"  # on that the two agree
  if name == "focal":  # a halved label leaves a microbatch without positives, which counts as 1
    assert_says(report, "coupled", BOTH)
    return
  assert_says(report, specimen.verdict, specimen.fix)
  options = options_of(report)
  if is_for_gradients(options):
    assert_mends(specimen, options)


@pytest.mark.parametrize("name", [*first_of_each(OVER_MESH, verdict_of)])
def test_over_a_mesh_each_loss_gets_its_verdict(name):
  assert_says(check_over_mesh(ZOO[name]), verdict_over_mesh(name))


@pytest.mark.parametrize("name", [more(name) for name in HIDDEN])
def test_over_a_mesh_a_batch_that_hides_a_weight_is_changed(name):
  assert_says(check_over_mesh(ZOO[name], EVEN), verdict_over_mesh(name))


@pytest.mark.parametrize("name", ["token mean", more("batch statistics"), more("worst row")])  # fmt: skip
def test_rows_that_are_all_alike_and_parameters_of_zero_hide_nothing(name):
  specimen = ZOO[name]
  alike = {k: np.repeat(x[:1], len(x), 0) for k, x in EVEN.items()}
  params, *further = specimen.call(alike)
  zeros = jax.tree.map(jnp.zeros_like, params)
  report = check_split(specimen.fun, zeros, *further, microbatch_size=6)
  assert_says(report, specimen.verdict)


@pytest.mark.parametrize(("rows", "name"), [(2, "mean"), (3, "sum"), (2, "NumPy's noise"), more(2, "contrastive")])  # fmt: skip
def test_two_or_three_rows_are_enough_for_a_verdict(rows, name):
  report = check(ZOO[name], {k: x[:rows] for k, x in BATCH.items()})
  # one row is compared with none
  assert_says(report, "" if name == "contrastive" else ZOO[name].verdict)


def test_the_fix_of_a_contrastive_loss_is_the_whole_batch():
  args = ZOO["contrastive"].call()
  losses = zoo.contrastive, zoo.split_encoder
  trees.assert_close(*(jax.jit(jax.value_and_grad(f))(*args) for f in losses), 1e-5)  # fmt: skip
  assert "all_gather" in report_of("contrastive").fix


def test_a_report_prints_the_verdict_and_what_differs():
  text = str(report_of("token mean"))
  assert text.startswith("check_split: weighted\nwhy: ")
  assert "\nfix: weight_fn=lambda batch: jnp.sum(batch['mask'])\n" in text
  assert "grads['w']" in text
  assert "not checked: the random numbers that" in str(report_of("dropout"))
  assert report_of("mean").not_checked == ()


def test_it_gives_the_same_report_again():
  name = "dropout, key shared"
  assert check_one_split(ZOO[name]) == report_of(name)


def test_of_a_right_loss_two_programs_are_compiled():
  """All rows at once, and the step."""
  with compilations() as compiled:
    assert check(ZOO["mean"]).ok
  assert sum("jit(run)" in line for line in compiled) == 2, compiled


# Further losses.


def row(fun, uses, verdict, fix="", source=BATCH, further=(), **options):
  """A loss, what must be said of it, and on which batch."""
  return Specimen(fun, uses, verdict, fix, None, options, further), source


def mean_of_tokens(params, batch, mask):
  each = zoo.cross_entropy(params, batch["tokens"], batch["targets"])
  return jnp.mean(each, where=mask)


@jax.jit
def masked(params, batch, pad):
  return mean_of_tokens(params, batch, batch["targets"] != pad)


def mean_over_what_it_counts(params, batch):
  each = jnp.maximum(zoo.per_row(params, batch) - 0.5, 0)
  return jnp.sum(each) / jnp.maximum(jnp.sum(each > 0), 1).astype(each.dtype)


def centered_pairs(params, batch):
  each = zoo.per_row(params, batch).reshape(-1, 2)
  return jnp.mean((each - jnp.mean(each, 1, keepdims=True)) ** 2)


def splits_itself(params, batch):
  """A loss of which `microbatch` would make another."""

  def standard(params, x):
    x = x @ params["w"]
    return x / (jnp.std(x, 0, keepdims=True) + 1)

  run = microbatch(standard, reduction="concat", batch_argnums=1, num_microbatches=2)  # fmt: skip
  return jnp.mean((jax.jit(run)(params, batch["x"]) - batch["y"][:, None]) ** 2)


def gradient_that_cancels(params, batch):
  """Normalized twice: the gradient of what comes before is the rounding of larger ones."""

  def normalized(x):
    center = x - x.mean(-1, keepdims=True)
    return center / (x.std(-1, keepdims=True) + 1e-6)

  x = normalized(zoo.logits(params, batch["x"]))
  x = normalized(x.reshape(-1, 2)).reshape(x.shape)
  return jnp.mean((x @ params["v"].sum(0) - batch["y"]) ** 2)


def where(valid):
  """A mean over the rows that `valid` says of the batch."""

  def loss(params, batch, *further):
    is_valid = valid(batch, *further)
    y = jnp.where(is_valid, batch["y"], 0)
    each = (zoo.logits(params, batch["x"])[:, 0] - y) ** 2
    return zoo.mean_where(each, is_valid, least=1)

  return loss


def samplers_that_draw_until_they_accept(params, batch, key):
  like = batch["x"].shape, batch["x"].dtype
  noise = jax.random.gamma(key, 2.0, *like)
  noise += jax.random.truncated_normal(key, -1.0, 1.0, *like)
  return zoo.mean(params, {**batch, "x": batch["x"] + noise})


def key_in_a_carry(params, batch, carry):
  key, again = jax.random.split(carry["key"])
  new = {"key": key, "steps": carry["steps"] + 1}
  return zoo.dropout(params, batch, again), (new, None)


def with_aux(aux, loss=zoo.mean):
  def fun(params, batch):
    return loss(params, batch), aux(zoo.per_row(params, batch), batch)

  return fun


def all_kinds(each, batch):
  aux = {"each": each, "count": each.size, "mean": jnp.mean(each)}
  return {**aux, "largest": jnp.max(each), "total": jnp.sum(each)}


def positives(each, batch):
  return jnp.sum(each > 0).astype(each.dtype)


def drawn(pair):
  """A loss that draws which rows count, and returns its weight."""

  def loss(params, batch, key):
    each = zoo.per_row(params, batch)
    mask = jax.random.bernoulli(key, 0.5, each.shape) & (batch["label"] > 0)
    return pair(each, mask)

  return loss


TOKENS, LENGTHS, LABELS = zoo.TOKENS, ("tokens", "targets", "lengths"), (*XY, "label")  # fmt: skip
USED = ("x", "y", "mask", "lengths")
POSITIVE = {**BATCH, "y": np.linspace(1.0, 9.0, 8), "mask": EVEN["mask"]}
POSITIVE["lengths"] = np.where(np.arange(8) == 2, 200, 6)
SOME_NAN = {**POSITIVE, "y": np.where(np.arange(8) % 5 == 1, np.nan, 2.0)}
NO_ROW_0 = {**BATCH, "lengths": np.array([2, 3, 5, 3, 2, 4, 3, 2])}
FEW_CLASSES = {**BATCH, "label": BATCH["label"] % 2}
NO_3 = {**BATCH, "label": np.minimum(BATCH["label"], 2)}
SOME_ROWS = {**BATCH, "mask": BATCH["mask"] * (np.arange(8) % 2)[:, None]}
KEYS = {"key": KEY, "steps": jnp.zeros((), jnp.int32)}
RAW_KEYS = {**KEYS, "key": jax.random.PRNGKey(0)}  # not known for a key
COUNTED = {"carry_argnum": 2, "carry_reduction": "max"}
PAIR = {"further": (KEY,), "rng_argnums": 2, "has_weight": True}
BOTH = "(total, weight)"
WORDS = {"each": "concat", "count": "sum", "mean": "mean", "largest": "max", "total": "sum"}  # fmt: skip
LOSSES = {
  "a length of -1 is no evidence": row(
    zoo.lengths, LENGTHS, "ok", microbatch_size=1, weight_fn=lambda b: jnp.sum(b["lengths"])),
  "nor is one that others outweigh": row(
    zoo.lengths_but_one, LENGTHS, "ok", "", NO_ROW_0, weight_fn=lambda b: jnp.sum(b["lengths"] - 1)),
    "a length that is none": row(
    lambda p, b: mean_of_tokens(p, b, jnp.arange(zoo.TIMES)[None] < b["lengths"][:, None]),
    LENGTHS, "weighted", "has_weight=True", EVEN),
  "a number in a jitted part": row(
    lambda p, batch: masked(p, batch, 3), ("tokens", "targets"), "weighted", zoo.weigh("batch['targets'] != 3"), EVEN),
  "a class of which there is no row": row(
    zoo.rare_class, LABELS, "weighted", zoo.weigh("batch['label'] == 2"), FEW_CLASSES),
  "two classes": row(
    lambda p, b: zoo.mean_where(zoo.per_row(p, b), b["label"] >= 2), LABELS, "weighted", "", NO_3),
  "a mask of floats": row(
    lambda p, b: mean_of_tokens(p, b, b["mask"] > 0.5), TOKENS, "weighted", "", EVEN),
  "a mask made in the loss": row(
    lambda p, b: zoo.mean_where(zoo.per_row(p, b), b["x"][:, 0] > 0, least=1), XY, "weighted", "has_weight=True"),
  "positive": row(where(lambda b: b["y"] > 0), USED, "weighted", "batch['y'] > 0", POSITIVE),
  "no NaN": row(where(lambda b: ~jnp.isnan(b["y"])), USED, "weighted", "~jnp.isnan(batch['y'])", SOME_NAN),
  "any of a row": row(where(lambda b: jnp.any(b["mask"] > 0.5, -1)), USED, "weighted", "has_weight=True", POSITIVE),
  "none of several": row(
    where(lambda b: ~jnp.isin(b["lengths"], np.array([101, 102]))), USED, "weighted", "has_weight=True", POSITIVE),
  "not a number that is an argument": row(
    where(lambda b, pad: b["lengths"] != pad), USED, "weighted", "batch['lengths'] != 777", POSITIVE,
    (np.int32(777),), batch_argnums=1),
  "a constant weight": row(zoo.mean, XY, "weighted", "weight_fn=None", weight_fn=lambda b: 1.0),
  "0/0 that weighs nothing": row(
    zoo.token_mean, TOKENS, "ok", "", SOME_ROWS, microbatch_size=4, weight_fn=zoo.count_of_mask),
  "0/0 that is skipped": row(
    zoo.token_mean, TOKENS, "ok", "", SOME_ROWS, microbatch_size=4, skip_nonfinite=True,
    weight_fn=lambda b: jnp.maximum(jnp.sum(b["mask"]), 1e-6)),
  "0/0 without a weight": row(
    zoo.token_mean, TOKENS, "weighted", "", SOME_ROWS, microbatch_size=4, skip_nonfinite=True),
  "a small term over another number": row(
    lambda p, b: zoo.token_mean(p, b) + 1e-3 * zoo.mean_of_row_means(p, b), TOKENS, "coupled"),
  "what the loss says counts": row(mean_over_what_it_counts, XY, "coupled"),
  "shares that do not add up to one": row(
    lambda p, b: zoo.sum_of_rows(p, b) / len(b["y"]) ** 0.5, XY, "coupled"),
  "by the longest row": row(
    lambda p, b: zoo.mean(p, b) / jnp.max(b["lengths"]).astype(float), (*XY, "lengths"), "", "", EVEN),
  "rows in pairs": row(centered_pairs, XY, "coupled", "x.reshape(-1, group", num_microbatches=2),
  "rows in pairs, as rows": row(
    lambda p, b: centered_pairs(p, {"x": b["x"].reshape(-1, 3), "y": b["y"].ravel()}), XY, "ok", "",
    {"x": BATCH["x"].reshape(2, 4, -1), "y": BATCH["y"].reshape(2, 4)}, microbatch_size=1),
  "microbatches that differ from the whole": row(splits_itself, XY, "coupled", num_microbatches=1),
  "one microbatch": row(zoo.contrastive, ("x",), "coupled", num_microbatches=1),
  "infinite on some altered batches": row(
    lambda p, b: jnp.mean(jnp.sqrt(b["label"].astype(float)) * zoo.per_row(p, b)), LABELS, "ok"),
  "zero on all batches": row(lambda p, b: jnp.mean(jax.nn.relu(-zoo.per_row(p, b))), XY, "unknown"),
  "never finite": row(lambda p, b: zoo.mean(p, b) / jnp.sum(b["y"] * 0), XY, "unknown"),
  "a gradient that cancels": row(gradient_that_cancels, XY, "ok"),
  "samplers that draw until they accept": row(
    samplers_that_draw_until_they_accept, XY, "ok", further=(KEY,), rng_argnums=2),
  "a key in a carry": row(key_in_a_carry, XY, "ok", further=(KEYS,), **COUNTED),
  "a raw key in a carry": row(
    key_in_a_carry, XY, "random", "In a carry, let it be a jax.random.key", further=(RAW_KEYS,), **COUNTED),
  "two words in a carry": row(
    lambda p, b, carry: (zoo.mean(p, b), (carry + jnp.ones(2, jnp.uint32), None)), XY, "ok",
    further=(jnp.zeros(2, jnp.uint32),), **COUNTED),
  "a total and a count, which is asked for": row(
    drawn(lambda each, mask: (jnp.sum(each, where=mask), jnp.sum(mask))), LABELS, "ok", **PAIR),
  "a total and a constant": row(drawn(lambda each, mask: (jnp.sum(each), 8)), LABELS, "sum", **PAIR),
  "a mean and its count": row(
    drawn(lambda each, mask: (zoo.mean_where(each, mask), jnp.sum(mask))), LABELS, "", BOTH, **PAIR),
  "a mean and another count": row(
    drawn(lambda each, mask: (jnp.mean(each), jnp.sum(mask))), LABELS, "", BOTH, **PAIR),
  "the square of a mean, and a count": row(
    drawn(lambda each, mask: (jnp.mean(each) ** 2, len(each))), LABELS, "coupled", BOTH, **PAIR),
  "a sum that lacks has_weight": row(
    lambda p, b: (zoo.sum_of_rows(p, b), jnp.sum(b["x"] > 0).astype(float)), XY, "sum",
    "has_weight=True in the place of has_aux=True", has_aux=True),
  "an aux that is a sum": row(with_aux(positives), XY, "sum", 'aux_reduction="sum"', has_aux=True),
  "an aux that is no mean": row(
    with_aux(lambda each, _: jnp.sqrt(jnp.mean(each))), XY, "unknown", 'two aux reduced by "sum"', has_aux=True),
  "right words for aux": row(with_aux(all_kinds), XY, "ok", has_aux=True, aux_reduction=WORDS),
  "a wrong word for an aux": row(
    with_aux(all_kinds), XY, "sum", '"total": "sum"', has_aux=True, aux_reduction={**WORDS, "total": "mean"}),
  "wrong words for aux": row(
    with_aux(all_kinds), XY, "unknown", has_aux=True, aux_reduction={**WORDS, "total": "mean", "largest": "mean"}),
  "a weight beside an aux": row(
    with_aux(lambda _, b: jnp.sum(b["mask"]), zoo.token_mean), (*XY, *TOKENS), "weighted", has_aux=True,
    aux_reduction="sum"),
}  # fmt: skip


@pytest.mark.parametrize(
  ("name", "over_mesh"), [*alone_and_over_a_mesh(LOSSES, lambda name: LOSSES[name][0].verdict)]
)
def test_a_loss_gets_its_verdict(name, over_mesh):
  specimen, source = LOSSES[name]
  with jax.numpy_rank_promotion("allow" if "cancels" in name else "raise"):
    report = CHECKS[over_mesh](specimen, source)
  assert_says(report, specimen.verdict, "" if over_mesh else specimen.fix)
  options = options_of(report)
  if ("aux_reduction" in options or "weight_fn" in options) and not over_mesh:
    again = check_one_split(specimen, source, **options)
    assert again.ok, again


Rows = collections.namedtuple("Rows", zoo.TOKENS)


def test_a_fix_names_fields_as_python_does():
  def loss(params, batch):
    return zoo.token_mean(params, batch._asdict())

  params, batch = ZOO["token mean"].call()
  report = check_split(loss, params, Rows(**batch), microbatch_size=6)
  assert_says(report, "weighted", "weight_fn=lambda batch: jnp.sum(batch.mask)")


# Dtypes and settings.


def in_bfloat16(loss):
  def cast(x):
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

  def half(params, batch):
    args = jax.tree.map(cast, (params, batch))
    return loss(*args).astype(jnp.float32)

  return half


@pytest.mark.parametrize(("name", "over_mesh"), [*alone_and_over_a_mesh(HALF, verdict_of)])
def test_a_loss_that_computes_in_bfloat16_gets_a_verdict(name, over_mesh):
  specimen = ZOO[name]
  half = Specimen(in_bfloat16(specimen.fun), specimen.uses)
  report = (check_over_mesh if over_mesh else check)(half)
  # Weights that differ by little look alike, so none is named.
  fix = BOTH if specimen.verdict == "weighted" else specimen.fix
  assert_says(report, specimen.verdict, "" if over_mesh else fix)
  assert "weight_fn" not in report.fix
  assert "in 16 bits" in report.reason
  if specimen.verdict == "weighted" and not over_mesh:
    right = eval(f"dict({specimen.fix})", {"jnp": jnp})
    again = check(half, **right)
    assert again.ok, again


class Narrow(Specimen):
  """With parameters in bfloat16."""

  def call(self, source=BATCH):
    params, batch = super().call(source)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch


@pytest.mark.parametrize(("kind", "over_mesh"), [
  (Specimen, False), more(Specimen, True), more(Narrow, False), (Narrow, True),
])  # fmt: skip
def test_in_bfloat16_a_large_loss_hides_no_gradient(kind, over_mesh):
  normalized = in_bfloat16(ZOO["batch statistics"].fun)

  def offset(params, batch):
    return normalized(params, batch) + 1e4

  assert_says(CHECKS[over_mesh](kind(offset, XY)), "coupled")


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    half = {"dtype": jnp.bfloat16}
    qkv = nn.Dense(96, **half)(nn.LayerNorm(**half)(x))
    query, key, value = jnp.split(qkv, 3, axis=-1)
    scores = query @ key.mT / 32**0.5
    before = jnp.tril(jnp.ones_like(scores, dtype=bool))
    x = x + jax.nn.softmax(jnp.where(before, scores, -1e9)) @ value
    hidden = nn.gelu(nn.Dense(64, **half)(nn.LayerNorm(**half)(x)))
    return x + nn.Dense(32, **half)(hidden)


class LanguageModel(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(48, 32, dtype=jnp.bfloat16)(tokens)
    for _ in range(2):
      x = Block()(x)
    return nn.Dense(48, dtype=jnp.bfloat16)(x)


@pytest.mark.more
def test_a_language_model_in_bfloat16_gets_its_weight(usual_promotion):
  model = LanguageModel()
  apply = jax.jit(model.apply)  # traced once

  def total(params, batch):
    logits = apply(params, batch["tokens"])[:, :-1].astype(jnp.float32)
    labels, mask = batch["tokens"][:, 1:], batch["mask"][:, 1:]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(each * mask), jnp.sum(mask)

  def quotient(params, batch):
    return jnp.divide(*total(params, batch))

  rng = np.random.default_rng(0)
  mask = np.arange(12) < rng.integers(3, 13, 32)[:, None]
  batch = {"tokens": rng.integers(0, 48, (32, 12)), "mask": mask * 1.0}
  params = jax.jit(model.init)(jax.random.key(0), batch["tokens"][:1])
  make = functools.partial(make_train_step, tx=TX, num_microbatches=2, mesh=make_mesh(8))
  report = make(quotient).check(params, TX.init(params), batch)
  assert_says(report, "weighted", "has_weight=True")
  weigh = {"weight_fn": lambda batch: jnp.sum(batch["mask"][..., 1:])}
  for step in (make(quotient, **weigh), make(total, has_weight=True)):
    report = step.check(params, TX.init(params), batch)
    assert report.ok, report


def test_where_x64_is_on_the_check_is_in_float64():
  def slightly(params, batch):
    return zoo.mean(params, batch) + 1e-6 * zoo.sum_of_rows(params, batch)

  def within_float32(params, batch):  # whose rounding is no evidence
    scores = zoo.logits(params, batch["tokens"]).astype(jnp.float32)
    return jnp.mean(jax.nn.softmax(scores).astype(jnp.float64) ** 2)

  with jax.enable_x64(True):
    report = check_one_split(ZOO["mean"])
    assert report.ok
    assert all(x.difference <= 1e-12 * x.size for x in report.leaves)
    assert not check_one_split(Specimen(slightly, XY)).ok
    assert check_one_split(ZOO["token mean"]).verdict == "weighted"
    assert check_one_split(Specimen(within_float32, ("tokens",))).ok


@pytest.mark.parametrize("over_mesh", [False, True])
@pytest.mark.parametrize(("narrow", "wide"), [("bfloat16", "float32"), ("float32", "float64")])
def test_gradients_are_rounded_as_their_parameters_are(narrow, wide, over_mesh):
  """They have their dtype, whatever the loss computes in, and the loss has not."""

  def cast(tree, dtype):
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)

  def check_of(name, constant=0.0):
    def loss(params, batch):
      return ZOO[name].fun(cast(params, wide), cast(batch, wide)) + constant

    params, batch = ZOO[name].call(many(BATCH))
    params = cast(params, narrow)
    # In two of 16 rows, on one device, what a statistic changes is less than the rounding.
    split = {"num_microbatches": 2, "mesh": make_mesh(8)} if over_mesh else {"num_microbatches": 8}
    step = make_train_step(loss, TX, **split)
    return step.check(params, TX.init(params), batch)

  with jax.enable_x64(wide == "float64"):
    report = check_of("mean")
    assert report.ok, report
    assert_says(check_of("labels of -100"), "weighted", ZOO["labels of -100"].fix)
    assert check_of("batch statistics", 1e4).verdict == "coupled"


def test_half_precision_arguments_are_checked_in_float32():
  specimen = ZOO["mean"]
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), specimen.call())
  report = check_split(specimen.fun, *half, microbatch_size=6)
  assert report.ok
  assert report.leaves[0].difference < 1e-6


def test_settings_of_jax_that_would_make_differences_are_set():
  def loss(params, batch):
    assert jax.config.jax_default_matmul_precision == "highest"
    return zoo.token_mean(params, batch)

  with jax.debug_nans(True):  # an altered batch divides 0 by 0
    assert check_one_split(Specimen(loss, TOKENS)).verdict == "weighted"


# Errors.


TWO = {"num_microbatches": 2}


def raises(params, batch):
  raise RuntimeError("mine")


def for_eight_rows(params, batch):
  return jnp.mean(zoo.per_row(params, batch) * jnp.ones(8))


def in_pairs(params, batch):
  each = zoo.per_row(params, batch).reshape(-1, 2)
  return jnp.mean((each[:, 0] - each[:, 1]) ** 2)


@pytest.mark.parametrize(
  ("loss", "rows", "options", "error", "text"),
  [
    (zoo.mean, 1, {}, ValueError, "has 1 row, which cannot be split: give 2"),
    (raises, 8, {}, RuntimeError, "mine"),
    (for_eight_rows, 8, TWO, TypeError, "shapes"),
    (in_pairs, 6, TWO, TypeError, "reshape"),
    (in_pairs, 8, {"num_microbatches": 8}, TypeError, "reshape"),
    (zoo.per_row, 8, TWO, TypeError, r"loss has shape \(4,\) .* it must be a real scalar"),
    (zoo.mean, 8, {"num_microbatches": 3}, ValueError, "does not divide the 8 rows"),
    (zoo.mean, 8, {"num_microbatches": 2, "microbatch_size": 4}, ValueError, "give exactly one"),
    (zoo.mean, 8, {"weigh_fn": jnp.sum}, TypeError, "unexpected keyword argument 'weigh_fn'"),
    (zoo.mean, 8, {"carry_argnum": 5}, ValueError, "carry_argnum names argument 5"),
    (with_aux(lambda each, batch: {"n": 1.0}), 8, {"has_aux": True, "aux_reduction": {}}, ValueError, "not a prefix tree"),
  ],
)  # fmt: skip
def test_what_cannot_be_checked_is_an_error(loss, rows, options, error, text):
  source = {k: x[:rows] for k, x in BATCH.items()}
  with pytest.raises(error, match=text):
    check(Specimen(loss, XY), source, **options)


@pytest.mark.parametrize("aux", ["each", more("steps")])
def test_where_the_step_raises_the_check_does(aux):
  fun = with_aux(lambda each, batch: {"each": each, "steps": 3}[aux])
  specimen = Specimen(fun, XY, options={"has_aux": True})
  split = microbatch_value_and_grad(fun, has_aux=True, **TWO)
  with pytest.raises((ValueError, TypeError)) as of_step:
    split(*specimen.call())
  with pytest.raises(of_step.type, match=re.escape(str(of_step.value))):
    check(specimen, **TWO)


def test_arguments_that_cannot_work_are_refused():
  loss = zoo.class_weights
  params, batch = ZOO["class weights"].call()
  abstract = jax.eval_shape(lambda x: x, batch)
  for args, named, error in (
    ((loss, params, abstract), {}, "ShapeDtypeStruct"),
    ((loss, params), {"batch": batch}, "unexpected keyword argument 'batch'"),
    ((params, loss, batch), {}, "The loss is of type dict: give the function"),
    ((loss, batch, params), {}, r"argument 1\['scale'\] has shape \(\)"),
    ((zoo.mean, PARAMS, {}), {}, r"The batch \(argument 1\) has no arrays"),
  ):
    with pytest.raises((TypeError, ValueError), match=error):
      check_split(*args, **named)
  with pytest.raises(TypeError, match=r"[Tt]race"):
    jax.jit(lambda x: check_split(loss, x, batch).ok)(params)
