"""`check_split`: the right verdict for each of a zoo of losses, and a fix that works."""

import functools
import inspect
import re
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees, zoo
from support.samples import first_of_each, more
from support.zoo import BATCH, EVEN, KEY, PARAMS, Specimen, XY, ZOO

from optax_accum import check_split, microbatch, microbatch_value_and_grad

FIXED = {
  x.fixed.fun.__name__: x.fixed for x in ZOO.values() if x.fixed is not None
}
# Microbatches that are all alike show nothing of these: a mean over tokens is one over rows.
HIDDEN = [name for name, x in ZOO.items() if x.hides_in_even_batches]
# Those of them of which another like it is looked at.
ALIKE = ("pad id 0", "lengths", "padding mask", "focal", "rare class")
ALIKE += ("jnp.mean(where=)", "sample weights")
# Those of them that are also looked at on a batch that shows it: one for each kind of weight.
SHOWN = ("token mean", "labels of -100", "class weights")
# What begins the words of a fix, where they do not all fit one loss.
FIRST = {
  "contrastive": "A contrastive loss",
  "several terms": "Several denominators",
  "regularised sum": "A sum over rows plus a term without rows, such as a regularizer",
  "neighbours": "A statistic of the data (normalized advantages), or noise that depends on other rows",
  "groups": "Rows in groups",  # nothing was seen: all mends
}


def check(specimen, source=BATCH, **options):
  return check_split(
    specimen.fun, *specimen.call(source), **{**specimen.options, **options}
  )


def check_one_split(specimen, source=BATCH, **options):
  """The same in 6 rows and 2, which a diagnosis compiles too: fewer programs than all splits."""
  given = {"num_microbatches", "microbatch_size"} & {*specimen.options}
  split = {} if given else {"microbatch_size": 6}
  return check(specimen, source, **split, **options)


# Of these the default splits are looked at: 4 rows and 4, 6 and 2.
ALL_SPLITS = ("mean", "token mean", "groups", "halves", "order for a log")


def is_for_gradients(options):
  """Whether a fix is some options, and all of `microbatch_value_and_grad`."""
  known = inspect.signature(microbatch_value_and_grad).parameters
  return len(options) > 0 and set(options) <= set(known)


@functools.cache
def report_of(name):
  """What is said of a loss of the zoo on its batch: asked once."""
  return (check if name in ALL_SPLITS else check_one_split)(ZOO[name])


@functools.cache
def report_of_fixed(name):
  """The same of a loss that is fixed as words say, which several losses share."""
  return check_one_split(FIXED[name])


def assert_mends(specimen, options):
  """That microbatches with such options have the whole batch's loss and gradients."""
  options = {**specimen.options, **options}
  whole = jax.jit(jax.value_and_grad(specimen.fun))(*specimen.call())
  # Two of them, and one with fewer rows.
  split = microbatch_value_and_grad(
    specimen.fun, **{**options, "microbatch_size": 3}
  )
  trees.assert_close(jax.jit(split)(*specimen.call()), whole, 1e-5)


def first_of(fix):
  return fix.partition("\n")[0]


def options_of(report):
  """The options that a fix has, on lines of their own."""
  lines = [line for line in report.fix.splitlines() if re.match(r"\w+=", line)]
  return eval(f"dict({','.join(lines)})", {"jnp": jnp})


def said_of(name):
  """What a report must say."""
  return ZOO[name].verdict, ZOO[name].fix


@pytest.mark.parametrize(
  "name",
  [
    *first_of_each((name for name in ZOO if name not in HIDDEN), said_of),
    *SHOWN,
  ],
)
def test_each_loss_gets_its_verdict_and_a_fix_that_works(name):
  specimen, report = ZOO[name], report_of(name)
  assert report.verdict == specimen.verdict, report
  assert report.ok == (specimen.verdict == "ok")
  assert specimen.fix in report.fix, report
  assert len(report.not_checked) == bool(specimen.not_checked), report
  assert specimen.not_checked in "".join(report.not_checked)
  if name in FIRST:
    assert report.fix.startswith(FIRST[name] + ":"), report
  options = options_of(report)
  if specimen.fixed is not None:
    again = report_of_fixed(specimen.fixed.fun.__name__)
    assert again.ok, again
  elif "rng_argnums" in options:  # the noise of microbatches is another
    again = check_one_split(specimen, **options)
    assert again.ok, again
  elif name not in HIDDEN and is_for_gradients(options):
    assert_mends(specimen, options)


@pytest.mark.parametrize(
  "name", [more(name) if name in ALIKE else name for name in HIDDEN]
)
def test_a_batch_that_hides_what_a_loss_divides_by_is_changed_until_it_shows(
  name,
):
  specimen = ZOO[name]
  report = check_one_split(specimen, EVEN)
  assert report.verdict == specimen.verdict, report
  assert specimen.fix in report.fix, report
  assert "in row 0" in report.where  # on the batch as given the two agree
  options = options_of(report)
  if is_for_gradients(options):
    assert_mends(specimen, options)


def test_a_changed_batch_with_a_weight_below_zero_is_left_out():
  # A length of -1 makes a weight below 0 of a right weight_fn, in microbatches of one row.
  weigh = lambda batch: jnp.sum(batch["lengths"])  # noqa: E731
  report = check(ZOO["lengths"], microbatch_size=1, weight_fn=weigh)
  assert report.ok, report
  assert any("= -1" in x for x in report.left_out)


def test_a_row_with_a_weight_below_zero_that_others_outweigh_is_left_out():
  weigh = lambda batch: jnp.sum(batch["lengths"] - 1)  # noqa: E731
  # of no row 0
  source = {
    **BATCH,
    "lengths": np.array([2, 3, 5, 3, 2, 4, 3, 2]),
  }
  report = check(ZOO["lengths but one"], source, weight_fn=weigh)
  assert report.ok, report
  assert any("= 0 in row" in x for x in report.left_out)


@pytest.mark.more
def test_a_length_that_is_none_is_no_evidence():
  def loss(params, batch):
    valid = jnp.arange(zoo.TIMES)[None] < batch["lengths"][:, None]
    return zoo.token_mean(
      params, {**batch, "mask": valid.astype(batch["tokens"].dtype)}
    )

  specimen = Specimen(loss, ("tokens", "targets", "lengths"))
  report = check_one_split(specimen, EVEN)
  assert first_of(report.fix) == zoo.weigh("batch['lengths']"), report
  again = check_one_split(specimen, EVEN, **options_of(report))
  assert again.ok
  assert any("'lengths'] = -1" in name for name in again.left_out)


def test_a_number_that_a_jitted_part_of_the_loss_is_given_is_found():
  @jax.jit
  def masked(params, tokens, labels, pad):
    return zoo.mean_where(
      zoo.cross_entropy(params, tokens, labels), labels != pad, least=1
    )

  def loss(params, batch):
    return masked(params, batch["tokens"], batch["targets"], 3)

  # without a 3
  report = check_one_split(Specimen(loss, ("tokens", "targets")), EVEN)
  assert first_of(report.fix) == zoo.weigh("batch['targets'] != 3"), report


def total_of(errors, mask):
  return jnp.sum(errors, where=mask), jnp.sum(mask)


def mean_of(errors, mask):
  total, count = total_of(errors, mask)
  return total / count.astype(total.dtype), count


MEAN = "The first of what the loss returns, (total, weight), is a mean over"


@pytest.mark.parametrize(
  ("pair", "verdict", "reason"),
  [
    (total_of, "ok", ""),
    (lambda errors, mask: (jnp.sum(errors), 8), "sum", "The losses and"),
    (mean_of, "weighted", MEAN),
    (lambda errors, mask: (jnp.mean(errors), jnp.sum(mask)), "weighted", MEAN),
    (lambda errors, mask: (jnp.mean(errors), 1.0), "weighted", MEAN),
    (
      lambda errors, mask: (jnp.mean(errors) ** 2, len(errors)),
      "coupled",
      "The loss of a row",
    ),
  ],
)
def test_a_loss_that_returns_its_weight_is_compared_by_that(
  pair, verdict, reason
):
  def drawn(params, batch, key):
    errors = (batch["x"] @ params - batch["y"]) ** 2
    mask = jax.random.bernoulli(key, 0.5, batch["y"].shape) & batch["mask"]
    return pair(errors, mask)

  rng = np.random.default_rng(0)
  x = rng.normal(size=(8, 3))
  batch = {"x": x, "y": x[:, 0] + 1, "mask": np.arange(8) % 3 > 0}
  options = {"microbatch_size": 6, "rng_argnums": 2, "has_weight": True}
  key = jax.random.key(0)
  report = check_split(drawn, np.ones(3), batch, key, **options)
  assert report.verdict == verdict, report
  assert report.reason.startswith(reason), report
  if verdict != "ok":
    assert "the sum of their losses, which is no mean, and how" in report.fix
    assert ("Or return total / weight" in report.fix) == (reason != MEAN)


def test_a_weight_below_zero_is_no_fix():
  # of the two rows of the last microbatch
  weight = np.where(np.arange(8) < 6, 1.0, -0.25)
  report = check_one_split(ZOO["sample weights"], {**BATCH, "weight": weight})
  assert report.verdict == "coupled", report


def test_a_class_of_which_the_batch_has_no_row_is_tried():
  report = check_one_split(
    ZOO["rare class"], {**BATCH, "label": BATCH["label"] % 2}
  )
  assert report.verdict == "weighted", report
  assert first_of(report.fix) == ZOO["rare class"].fix, report


def test_a_class_beside_one_that_the_loss_orders_by_is_tried():
  def rare_classes(params, batch):
    return zoo.mean_where(zoo.per_row(params, batch), batch["label"] >= 2)

  # No row tells it from the mean over class 2.
  batch = {**BATCH, "label": np.minimum(BATCH["label"], 2)}
  report = check_one_split(Specimen(rare_classes, (*XY, "label")), batch)
  assert report.fix.startswith(zoo.weigh("batch['label'] >= 2")), report


class Rows(NamedTuple):
  tokens: Any
  targets: Any
  mask: Any


@flax.struct.dataclass
class Struct:
  tokens: Any
  targets: Any
  mask: Any


@pytest.mark.parametrize("kind", [Rows, more(Struct)])
def test_a_fix_names_fields_as_python_does(kind):
  params, batch = ZOO["token mean"].call()
  loss = lambda params, batch: zoo.token_mean(params, vars_of(batch))  # noqa: E731
  vars_of = lambda batch: {k: getattr(batch, k) for k in zoo.TOKENS}  # noqa: E731
  report = check_split(loss, params, kind(**batch), microbatch_size=6)
  assert first_of(report.fix) == "weight_fn=lambda batch: jnp.sum(batch.mask)"
  assert "batch.tokens halved in row 0" in report.batches


def test_the_fix_of_a_contrastive_loss_is_the_whole_batch():
  args = ZOO["contrastive"].call()
  whole, fixed = (
    jax.jit(jax.value_and_grad(f))(*args)
    for f in (zoo.contrastive, zoo.split_encoder)
  )
  trees.assert_close(fixed, whole, 1e-5)
  assert (
    "microbatches of 8 rows, of 8" in report_of_fixed("split_encoder").where
  )


@pytest.mark.more
def test_what_a_loss_splits_itself_is_compared_with_the_same_unsplit():
  def norm(x):
    return (x - jnp.mean(x, 0, keepdims=True)) / (
      jnp.std(x, 0, keepdims=True) + 1
    )

  def wrong(params, batch):
    run = microbatch(lambda p, x: norm(x @ p["w"]), **split)
    return jnp.mean(
      (jax.jit(run)(params, batch["x"]) - batch["y"][:, None]) ** 2
    )

  split = {"reduction": "concat", "batch_argnums": 1, "num_microbatches": 2}
  report = check(Specimen(wrong, XY), num_microbatches=1)
  assert report.verdict == "coupled", report
  specimen = ZOO["contrastive"]
  with pytest.raises(
    ValueError, match="num_microbatches=1 splits nothing, and the loss calls no"
  ):
    check(specimen, num_microbatches=1)
  jitted = jax.jit(zoo.split_encoder)  # traced anew, and left as it was
  assert check(Specimen(jitted, specimen.uses), num_microbatches=1).ok
  assert "scan" in str(jax.make_jaxpr(jitted)(*specimen.call()))


def test_the_zoo_has_what_people_train_with():
  losses = {specimen.fun for specimen in ZOO.values()}
  assert len(losses) >= 16
  verdicts = {specimen.verdict for specimen in ZOO.values()}
  assert verdicts == {
    "ok",
    "sum",
    "weighted",
    "coupled",
    "random",
    "unsplit",
  }


@pytest.mark.parametrize(
  "name", ["token mean", more("batch statistics"), more("worst row")]
)
def test_rows_that_are_all_alike_and_parameters_of_zero_hide_nothing(name):
  specimen = ZOO[name]
  batch = {k: np.repeat(x[:1], len(x), 0) for k, x in EVEN.items()}
  params, *further = specimen.call(batch)
  report = check_split(
    specimen.fun,
    jax.tree.map(jnp.zeros_like, params),
    *further,
    microbatch_size=6,
  )
  assert report.verdict == specimen.verdict, report


def test_a_report_prints_the_verdict_and_a_table_of_what_differs():
  report = report_of("token mean")
  first, why, *_ = str(report).splitlines()
  assert (first, why[:5]) == ("check_split: weighted", "why: ")
  text, table = str(report).split(
    "\n\nas given; microbatches of 4 rows, of 8\n"
  )
  assert "\nfix: weight_fn=lambda batch: jnp.sum(batch['mask'])\n" in text
  assert text.endswith("with has_weight=True.")
  assert "grads['w']" in table
  assert all(line.endswith("differs") for line in table.splitlines()[1:])
  assert "batches:  as given; parameters moved" in report.details()
  agree = "The loss and 4 gradients agree on the given batch and "
  assert str(report_of("mean")).splitlines()[1].startswith(agree)
  assert "grads['b']" in report_of("mean").details()


def test_what_was_not_looked_at_is_printed():
  assert "not checked: the random numbers that the loss draws" in str(
    report_of("dropout")
  )
  assert report_of("mean").not_checked == ()

  def loss(w, x):  # compares what a loop adds the batch to
    layer = lambda c, _: (c + jnp.mean(x), jnp.maximum(c, 0.5))  # noqa: E731
    return jnp.mean(jax.lax.scan(layer, jnp.sum(w), None, 3)[1])

  of_rows = lambda w, x: jnp.mean(jnp.maximum(x[:, None] * w[None], 0))  # noqa: E731
  assert (
    check_split(of_rows, jnp.full(3, 0.3), np.arange(1.0, 7.0)).not_checked
    == ()
  )
  (text,) = check_split(loss, jnp.full(3, 0.3), np.arange(1.0, 7.0)).not_checked
  assert text.startswith("thresholds: ")


def test_the_table_folds_what_agrees():
  def loss(params, batch):
    return zoo.mean(params["p"], batch) + jnp.sqrt(params["s"]) * sum(
      params["many"].values()
    )

  params, batch = ZOO["mean"].call()
  params = {"p": params, "s": jnp.ones(()), "many": {}}
  params["many"] = {f"{i} {'long' * 20}": jnp.ones(()) for i in range(7)}
  text = str(check_split(loss, params, batch))
  assert "The loss and 12 gradients agree on" in text
  assert "grads" not in text
  text = str(check_split(loss, params, batch, reduction="sum"))
  # where, a head, 5 leaves, and
  assert len(text.partition("\n\n")[2].splitlines()) == 8
  assert text.endswith("... and 7 more: report.details()")
  assert max(map(len, text.splitlines())) <= 85


def test_batches_on_which_the_loss_is_not_finite_are_left_out():
  def loss(params, batch):
    each = jnp.sqrt(batch["label"].astype(params["w"].dtype)) * zoo.per_row(
      params, batch
    )
    return jnp.mean(each)

  report = check_one_split(Specimen(loss, (*XY, "label")))
  assert report.ok
  assert report.left_out
  assert all("= -1" in name for name in report.left_out)
  assert "left out: batch['label'] = -1 in row 0;" in report.details()


def test_an_argument_that_may_have_as_many_rows_by_chance_gets_two_fixes():
  report = report_of("labels apart")
  assert report.fix.startswith(
    "batch_argnums=(1, 2)\nor, if argument 2 has as many"
  )
  assert report.fix.endswith("  batch_argnums=1")


def test_it_gives_the_same_report_again():
  again = check_one_split(ZOO["dropout, key shared"])
  assert again == report_of("dropout, key shared")


def test_where_x64_is_on_the_check_is_in_float64():
  with jax.enable_x64(True):
    report = check_one_split(ZOO["mean"])
    assert report.ok
    assert (
      max(leaf.difference / leaf.size for leaf in report.leaves if leaf.size)
      < 1e-12
    )

    def slightly(params, batch):
      return zoo.mean(params, batch) + 1e-6 * zoo.sum_of_rows(params, batch)

    assert not check_one_split(Specimen(slightly, XY)).ok
    assert check_one_split(ZOO["token mean"]).verdict == "weighted"


def test_float32_within_a_float64_loss_is_rounding():
  def loss(params, batch):
    scores = zoo.logits(params, batch["tokens"]).astype(jnp.float32)
    return jnp.mean(jax.nn.softmax(scores).astype(jnp.float64) ** 2)

  with jax.enable_x64(True):
    assert check_one_split(Specimen(loss, ("tokens",))).ok


def test_the_words_for_a_contrastive_loss_say_nothing_of_batch_norm():
  fix = report_of("contrastive").fix
  assert "all_gather" in fix
  assert "Batch norm" not in fix


def test_half_precision_arguments_are_checked_in_float32():
  specimen = ZOO["mean"]
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), specimen.call())
  report = check_split(specimen.fun, *half, microbatch_size=6)
  assert report.ok
  assert report.leaves[0].difference < 1e-6


def test_a_loss_that_computes_in_bfloat16_is_not_ok():
  def loss(params, batch):
    cast = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731
    return zoo.mean(cast(params), cast(batch)).astype(jnp.float32)

  report = check_one_split(Specimen(loss, XY))
  assert report.verdict == "unknown"
  assert "float32" in report.fix


def test_only_the_split_that_is_asked_for_is_looked_at():
  report = check(ZOO["mean"], num_microbatches=4)
  assert (report.ok, report.where) == (
    True,
    "as given; microbatches of 2 rows, of 8",
  )
  report = check(ZOO["token mean"], microbatch_size=3)
  assert report.verdict == "weighted"
  assert report.where == "as given; microbatches of 3 rows, of 8"


def test_a_weight_that_is_the_same_for_fewer_rows_is_wrong():
  # right in equal microbatches alone
  report = check(ZOO["mean"], weight_fn=lambda batch: 1.0)
  assert (report.verdict, report.fix) == ("weighted", "weight_fn=None")


def test_an_aux_that_is_nan_in_microbatches_does_not_agree():
  def loss(params, batch):
    each = zoo.per_row(params, batch)
    return jnp.mean(each), jnp.var(each, ddof=1)

  report = check(
    Specimen(loss, XY, options={"has_aux": True}), microbatch_size=1
  )
  assert report.verdict == "unknown"
  assert "Loss and gradients agree, but aux does not" in report.reason


@pytest.mark.parametrize(
  ("rows", "name"),
  [(2, "mean"), (3, "sum"), (2, "NumPy's noise"), more(2, "contrastive")],
)
def test_two_or_three_rows_are_enough_for_a_verdict(rows, name):
  report = check(ZOO[name], {k: x[:rows] for k, x in BATCH.items()})
  if name == "contrastive":
    assert not report.ok
  else:
    assert report.verdict == ZOO[name].verdict, report


def test_gradients_by_several_arguments_are_named_by_their_argument():
  def loss(head, batch, body, power):
    return jnp.mean(
      (batch["x"] @ body["w"] @ head - batch["y"][:, None]) ** power
    )

  params, batch = Specimen(loss, XY).call()
  args = (jnp.ones((zoo.CLASSES, 1)), batch, {"w": params["w"]}, 2)
  report = check_split(loss, *args, argnums=(0, 2), microbatch_size=6)
  assert report.ok
  assert [leaf.name for leaf in report.leaves] == [
    "loss",
    "grads[0]",
    "grads[1]['w']",
  ]


@pytest.mark.parametrize("aux", ["each", "count", more("steps")])
def test_an_aux_that_the_default_cannot_reduce_gets_the_word_that_can(aux):
  def loss(params, batch):
    each = zoo.per_row(params, batch)
    return jnp.mean(each), {
      "each": each,
      "count": jnp.sum(each > 0),
      "steps": 3,
    }[aux]

  specimen = Specimen(loss, XY, options={"has_aux": True})
  report = check_one_split(specimen)
  assert report.verdict == ("sum" if aux == "count" else "unknown"), report
  right = {"each": "concat", "count": "sum", "steps": "max"}[aux]
  assert options_of(report) == {"aux_reduction": right}
  assert check_one_split(specimen, **options_of(report)).ok


@pytest.mark.more
def test_a_loss_and_its_aux_are_mended_at_once():
  def loss(params, batch):
    count = jnp.sum(batch["mask"])
    return zoo.token_mean(params, batch), {
      "tokens": count,
      "each": batch["mask"][:, 0],
    }

  specimen = Specimen(loss, zoo.TOKENS, options={"has_aux": True})
  for given in ({"tokens": "mean", "each": "concat"}, "mean"):
    report = check_one_split(specimen, aux_reduction=given)
    assert report.verdict == "weighted", report
    assert set(options_of(report)) == {"weight_fn", "aux_reduction"}
  assert check_one_split(specimen, **options_of(report)).ok


@pytest.mark.parametrize("dtype", [int, more(float)])
def test_a_sum_whose_aux_is_one_number_may_lack_has_weight(dtype):
  def pair(params, batch):
    total, count = total_of(zoo.per_row(params, batch), batch["label"] > 0)
    return total, count.astype(dtype)

  uses = (*XY, "label")
  report = check_one_split(Specimen(pair, uses, options={"has_aux": True}))
  assert report.verdict == "sum", report
  assert "has_weight=True in the place of has_aux=True gives" in report.fix
  both = dict.fromkeys(("reduction", "aux_reduction"), "sum")
  assert options_of(report) == both
  specimen = Specimen(pair, uses)
  assert check_one_split(specimen, has_weight=True).ok


@pytest.mark.more
def test_a_microbatch_that_holds_nothing_agrees_where_it_weighs_nothing():
  # 0/0 in the even rows
  batch = {
    **BATCH,
    "mask": BATCH["mask"] * (np.arange(8) % 2)[:, None],
  }
  in_two = functools.partial(check, ZOO["token mean"], batch, microbatch_size=4)
  weigh = {"weight_fn": lambda batch: jnp.sum(batch["mask"])}
  assert in_two(**weigh).ok

  def never_zero(batch):
    return jnp.maximum(jnp.sum(batch["mask"]), 1e-6)

  assert in_two(weight_fn=never_zero, skip_nonfinite=True).ok
  assert in_two(skip_nonfinite=True).verdict == "weighted"


def test_a_microbatch_of_weight_0_with_an_infinite_loss_is_no_evidence():
  def loss(params, batch):
    return jnp.sum(zoo.per_row(params, batch)) / jnp.sum(batch["valid"])

  source = {**BATCH, "valid": 1.0 * (np.arange(8) != 6)}
  weigh = lambda batch: jnp.sum(batch["valid"])  # noqa: E731
  specimen = Specimen(loss, (*XY, "valid"))
  report = check_one_split(specimen, source, weight_fn=weigh)
  assert report.ok, report
  assert any("'valid'] = 0 in rows 0 and 7" in x for x in report.left_out)


def test_a_carry_of_which_a_loss_reads_what_is_far_or_what_is_near_couples():
  def loss(params, batch, carry):
    far = jnp.maximum(carry["far"] - 2.0, 0.0)
    near = jnp.where(jnp.abs(carry["near"] - 1.1) < 0.05, 1.0, 0.0)
    new = jax.tree.map(lambda x: 0.9 * x, carry)
    return zoo.mean(params, batch) + far + near, (new, None)

  carry = {"far": jnp.ones(()), "near": jnp.ones(())}
  specimen = Specimen(loss, XY, options={"carry_argnum": 2}, further=(carry,))
  report = check_one_split(specimen)
  assert report.verdict == "coupled", report
  assert "another carry['far'] and carry['near']" in report.reason


@pytest.mark.more
def test_rows_in_groups_are_coupled_where_a_microbatch_parts_them():
  def in_pairs(params, batch):
    each = zoo.per_row(params, batch).reshape(-1, 2)
    return jnp.mean((each[:, 0] - each[:, 1]) ** 2)

  def in_fours(params, batch):
    each = zoo.per_row(params, batch).reshape(-1, 4)
    return jnp.mean((each - jnp.mean(each, 1, keepdims=True)) ** 2)

  def of_rows(params, batch):
    return in_fours(
      params, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    )

  for options, reason in (
    ({}, "not on 2 or 6 of them"),
    ({"microbatch_size": 4}, "in groups"),
  ):
    report = check(Specimen(in_fours, XY), **options)
    assert report.verdict == "coupled", report
    assert reason in report.reason
    assert "x.reshape(-1, group" in report.fix
  six = {k: x[:6] for k, x in BATCH.items()}
  for source, options, rows in (
    (six, {}, 3),
    (BATCH, {"num_microbatches": 8}, 1),
  ):
    report = check(Specimen(in_pairs, XY), source, **options)
    assert report.verdict == "coupled", report
    assert f"not on {rows} " in report.reason
    assert "x.reshape(-1, group" in report.fix
  params, batch = Specimen(in_fours, XY).call()
  batch = {"x": batch["x"].reshape(2, 4, -1), "y": batch["y"].reshape(2, 4)}
  assert check_split(of_rows, params, batch).ok


def test_a_small_term_over_another_number_is_no_weight():
  def loss(params, batch):
    # So small that a share which is free hides most of it.
    small = 3.2e-4 * zoo.mean_of_row_means(params, batch)
    return zoo.token_mean(params, batch) + small

  report = check(Specimen(loss, zoo.TOKENS))
  assert report.verdict == "coupled", report


def test_a_mean_over_what_the_loss_itself_says_counts_is_coupled():
  def loss(params, batch):
    each = jnp.maximum(zoo.per_row(params, batch) - 0.5, 0)
    return jnp.sum(each) / jnp.maximum(jnp.sum(each > 0), 1).astype(each.dtype)

  assert check_one_split(Specimen(loss, XY)).verdict == "coupled"


def test_shares_that_do_not_add_up_to_one_are_no_weights():
  def loss(params, batch):
    each = zoo.per_row(params, batch)
    return jnp.sum(each) / each.size**0.5

  assert check_one_split(Specimen(loss, XY)).verdict == "coupled"


@pytest.mark.more
def test_each_wrong_word_for_an_aux_is_named_with_the_right_one():
  def loss(params, batch):
    each = zoo.per_row(params, batch)
    aux = {
      "each": each,
      "count": each.size,
      "mean": jnp.mean(each),
      "largest": jnp.max(each),
    }
    return jnp.mean(each), {**aux, "total": jnp.sum(each)}

  right = {
    "each": "concat",
    "count": "sum",
    "mean": "mean",
    "largest": "max",
    "total": "sum",
  }
  specimen = Specimen(loss, XY, options={"has_aux": True})
  assert check_one_split(specimen, aux_reduction=right).ok
  report = check_one_split(specimen, aux_reduction={**right, "total": "mean"})
  assert report.verdict == "sum"
  assert eval(f"dict({report.fix})") == {"aux_reduction": right}
  report = check_one_split(
    specimen, aux_reduction={**right, "total": "mean", "largest": "mean"}
  )
  assert report.verdict == "unknown"
  assert eval(f"dict({report.fix})") == {"aux_reduction": right}

  def ratio(params, batch):
    return zoo.mean(params, batch), {"r": zoo.root_mean_square(params, batch)}

  report = check_one_split(Specimen(ratio, XY, options={"has_aux": True}))
  assert report.verdict == "unknown"
  assert 'two aux reduced by "sum"' in report.fix


def test_keys_in_a_carry_draw_the_same_and_raw_ones_do_not():
  def loss(params, batch, carry):
    key, again = jax.random.split(carry["key"])
    return zoo.dropout(params, batch, again), (
      {"key": key, "steps": carry["steps"] + 1},
      None,
    )

  carry = {"key": KEY, "steps": jnp.zeros((), jnp.int32)}
  assert check_one_split(
    Specimen(loss, XY, options={"carry_argnum": 2}, further=(carry,))
  ).ok
  # which the check does not know for a key
  raw = {
    **carry,
    "key": jax.random.PRNGKey(0),
  }
  report = check_one_split(
    Specimen(loss, XY, options={"carry_argnum": 2}, further=(raw,))
  )
  assert report.verdict == "random"
  assert "In a carry, let it be a jax.random.key" in report.fix


def test_two_words_in_a_carry_are_not_taken_for_a_key():
  def loss(params, batch, carry):
    return zoo.mean(params, batch), (carry + jnp.ones(2, jnp.uint32), None)

  carry = jnp.zeros(2, jnp.uint32)
  assert check_one_split(
    Specimen(loss, XY, options={"carry_argnum": 2}, further=(carry,))
  ).ok


def test_samplers_that_draw_until_they_accept_come_to_an_end():
  def loss(params, batch, key):
    noise = jax.random.gamma(key, 2.0, batch["x"].shape, batch["x"].dtype)
    noise += jax.random.truncated_normal(
      key, -1.0, 1.0, batch["x"].shape, batch["x"].dtype
    )
    return zoo.mean(params, {**batch, "x": batch["x"] + noise})

  assert check_one_split(
    Specimen(loss, XY, options={"rng_argnums": 2}, further=(KEY,))
  ).ok


def test_nothing_is_compiled_twice(monkeypatch):
  compiled = []
  jit = jax.jit

  def counted(fun, **options):
    if options.get("inline"):  # part of another program
      return jit(fun, **options)
    return jit(lambda *args: (compiled.append(fun), fun(*args))[1], **options)

  monkeypatch.setattr(jax, "jit", counted)
  assert check(ZOO["mean"]).ok
  # All rows, 4, 6 and 2 of them, and the microbatches as called: whatever is changed.
  assert len(compiled) == 5


def test_of_a_loss_that_is_not_finite_nothing_is_known():
  loss = lambda params, batch: zoo.mean(params, batch) / jnp.sum(batch["y"] * 0)  # noqa: E731
  report = check(Specimen(loss, XY))
  assert report.verdict == "unknown"
  assert "not finite on the whole batch" in report.reason


def test_one_row_cannot_be_split():
  batch = {k: x[:1] for k, x in BATCH.items()}
  with pytest.raises(
    ValueError, match=r"has 1 row, which cannot be split: give 2"
  ):
    check(ZOO["mean"], batch)


def test_a_batch_without_arrays_is_refused():
  with pytest.raises(
    ValueError, match=r"The batch \(argument 1\) has no arrays"
  ):
    check_split(zoo.mean, PARAMS, {})


def test_an_error_of_the_loss_comes_with_the_rows_that_it_was_given():
  def whole(params, batch):
    raise RuntimeError("mine")

  with pytest.raises(RuntimeError, match="mine") as raised:
    check(Specimen(whole, XY))
  where = "The check ran it on one device, without named axes, on"
  assert f"{where} 8 of 8 rows." in raised.value.__notes__

  def eight(params, batch):
    return jnp.mean(zoo.per_row(params, batch) * jnp.ones(8))

  with pytest.raises(TypeError, match="shapes") as raised:
    check(Specimen(eight, XY))
  assert raised.value.__notes__[-1] == f"{where} 4 of 8 rows. On all it ran."


def test_an_empty_tree_of_words_is_refused():
  def loss(params, batch):
    return jnp.sum(batch["x"] @ params["w"]), {
      "rows": jnp.float32(len(batch["x"]))
    }

  batch = {"x": np.ones((6, 2), np.float32)}
  with pytest.raises(
    ValueError, match=r"aux_reduction=\{\} is not a prefix tree"
  ):
    check_split(loss, {"w": jnp.ones(2)}, batch, has_aux=True, aux_reduction={})


def test_a_loss_that_returns_no_scalar_is_refused():
  with pytest.raises(
    TypeError, match=r"loss has shape \(8,\) .* it must be a real scalar"
  ):
    check(Specimen(zoo.per_row, XY))


@pytest.mark.parametrize(
  ("options", "error", "text"),
  [
    (
      {"num_microbatches": 3},
      ValueError,
      "does not divide the 8 rows of argument 1",
    ),
    (
      {"microbatch_size": 8},
      ValueError,
      "microbatch_size=8 does not split 8 rows",
    ),
    (
      {"num_microbatches": 2, "microbatch_size": 4},
      ValueError,
      "give exactly one",
    ),
    ({"axis_name": "data"}, ValueError, "leave axis_name='data' out"),
    (
      {"weigh_fn": jnp.sum},
      TypeError,
      "unexpected keyword argument 'weigh_fn'",
    ),
    ({"carry_argnum": 5}, ValueError, "carry_argnum names argument 5"),
  ],
)
def test_options_that_cannot_work_are_refused(options, error, text):
  with pytest.raises(error, match=text):
    check(ZOO["mean"], **options)


def test_arguments_that_cannot_work_are_refused():
  params, batch = ZOO["class weights"].call()
  abstract = jax.eval_shape(lambda x: x, batch)
  with pytest.raises(
    TypeError, match=r"batch\['label'\] is a ShapeDtypeStruct: check"
  ):
    check_split(zoo.class_weights, params, abstract)
  by_position = r"comes by position: check_split\(loss_fn, params, batch\)"
  loss = zoo.class_weights
  for args, named, error in (
    ((loss, params), {"batch": batch}, "unexpected keyword argument 'batch'"),
    ((params, loss, batch), {}, "The loss is of type dict: give the function"),
    ((loss, batch, params), {}, r"argument 0\['label'\] has dtype int32"),
  ):
    with pytest.raises(TypeError, match=error) as raised:
      check_split(*args, **named)
    assert re.search(by_position, raised.value.__notes__[-1])


def test_settings_of_jax_that_would_make_differences_are_set():
  def loss(params, batch):
    assert jax.config.jax_default_matmul_precision == "highest"
    return zoo.token_mean(params, batch)

  with jax.debug_nans(True):  # a probe divides 0 by 0
    assert check_one_split(Specimen(loss, zoo.TOKENS)).verdict == "weighted"


def test_under_jit_it_refuses():
  with pytest.raises(
    TypeError, match=r"params\['b'\] is traced: check outside jax\.jit"
  ):
    jax.jit(lambda x: check_split(zoo.mean, x, ZOO["mean"].call()[1]).ok)(
      ZOO["mean"].call()[0]
    )


def test_zero_on_all_batches_is_not_ok():
  def hinge(params, batch):
    weight = jnp.asarray([1.0, 3.0, 1.0, 3.0])[batch["label"]]
    margins = 1e3 + logits_of(params, batch)
    return jnp.sum(weight * jax.nn.relu(1 - margins)) / jnp.sum(weight)

  logits_of = lambda params, batch: zoo.logits(params, batch["x"])[:, 0]  # noqa: E731
  report = check_one_split(Specimen(hinge, ("x", "label")))
  assert report.verdict == "unknown"
  assert "zero on all batches" in report.reason


def test_a_gradient_that_cancels_is_rounding():
  # Normalised twice: the gradient of what comes before is the rounding of larger ones.
  def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)

  def loss(params, batch):
    x = normalised(zoo.logits(params, batch["x"]))
    x = normalised(x.reshape(-1, 2)).reshape(x.shape)
    return jnp.mean((x @ params["v"].sum(0) - batch["y"]) ** 2)

  with jax.numpy_rank_promotion("allow"):
    report = check_one_split(Specimen(loss, XY))
  assert report.ok, report


POSITIVE = {
  **BATCH,
  "y": np.linspace(1.0, 9.0, 8),
  "mask": EVEN["mask"],
  "lengths": np.where(np.arange(8) == 2, 200, 6),
}
SPECIAL = np.array([101, 102])


def mean_of_valid(valid):
  """A mean over the entries that `valid` says of the batch."""

  def loss(params, batch, *further):
    is_valid = valid(batch, *further)
    each = jnp.square(
      zoo.logits(params, batch["x"])[:, 0] - jnp.where(is_valid, batch["y"], 0)
    )
    return zoo.mean_where(each, is_valid, least=1)

  return loss


@pytest.mark.parametrize(
  ("valid", "fix", "further"),
  [
    more(lambda b: b["y"] > 0, "batch['y'] > 0", ()),
    (lambda b: ~jnp.isnan(b["y"]), "~jnp.isnan(batch['y'])", ()),
    more(
      lambda b: jnp.any(b["mask"] > 0.5, -1),
      "jnp.any(batch['mask'] != 0, axis=-1)",
      (),
    ),
    (
      lambda b, pad: b["lengths"] != pad,
      "batch['lengths'] != 777",
      (np.int32(777),),
    ),
    (
      lambda b: ~jnp.isin(b["lengths"], SPECIAL),
      "what the loss divides by",
      (),
    ),
  ],
)
def test_the_fix_says_which_rows_the_loss_leaves_out(valid, fix, further):
  uses = ("x", "y", "mask", "lengths")
  report = check_one_split(
    Specimen(mean_of_valid(valid), uses, further=further),
    POSITIVE,
    batch_argnums=1,
  )
  assert report.verdict == "weighted", report
  assert fix in report.fix, report


def test_the_longest_row_couples_and_a_mask_of_floats_is_compared():
  def longest(params, batch):
    return zoo.mean(params, batch) / jnp.max(batch["lengths"]).astype(float)

  assert not check_one_split(Specimen(longest, (*XY, "lengths")), EVEN).ok

  def where(params, batch):
    each = zoo.cross_entropy(params, batch["tokens"], batch["targets"])
    return jnp.mean(each, where=batch["mask"] > 0.5)

  report = check_one_split(Specimen(where, ("tokens", "targets", "mask")), EVEN)
  assert "jnp.sum(batch['mask'] > 0.5)" in report.fix, report
