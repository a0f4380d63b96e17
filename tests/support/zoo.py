"""Losses that people train with: what `check_split` must say of each, and the same loss fixed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import microbatch

ROWS, TIMES, FEATURES, CLASSES = 8, 6, 3, 4
rng = np.random.default_rng(0)
LENGTHS = np.array([6, 2, 5, 3, 1, 4, 6, 2])
VALID = np.arange(TIMES) < LENGTHS[:, None]
LABELS = rng.integers(1, CLASSES, size=(ROWS, TIMES))
BATCH = {
  "x": rng.normal(size=(ROWS, FEATURES)),
  "y": rng.normal(size=ROWS),
  "label": np.array([0, 1, 2, 3, 3, 1, 0, 1]),
  "weight": rng.uniform(0.5, 2.0, size=ROWS),
  "tokens": rng.normal(size=(ROWS, TIMES, FEATURES)),
  "targets": LABELS,
  "ignored": np.where(VALID, LABELS, -100),
  "padded": np.where(VALID, LABELS, 0),
  "mask": VALID.astype(np.float64),
  "valid": VALID,
  "pad": ~VALID,
  "lengths": LENGTHS,
}
# Even microbatches: nothing in them shows what the loss is a mean over.
EVEN = {
  **BATCH,
  "weight": np.ones(ROWS),
  "mask": np.ones((ROWS, TIMES)),
  "valid": np.ones((ROWS, TIMES), bool),
  "pad": np.zeros((ROWS, TIMES), bool),
  "ignored": LABELS,
  "padded": LABELS,
  "lengths": np.full(ROWS, TIMES),
  "label": np.full(ROWS, 2),
  "targets": np.full((ROWS, TIMES), 2),
}
PARAMS = {
  "w": rng.normal(size=(FEATURES, CLASSES)),
  "b": rng.normal(size=CLASSES),
}
PARAMS |= {"v": rng.normal(size=(FEATURES, CLASSES)), "scale": np.array(1.5)}
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Specimen:
  """A loss, and what must be said of it."""

  fun: Any
  uses: tuple[str, ...]  # of the batch
  verdict: str = "ok"
  fix: str = ""  # a part of what the fix says
  fixed: Any = None  # a loss that the words of a fix come to; None: the fix is options
  options: Any = dataclasses.field(default_factory=dict)
  further: tuple[Any, ...] = ()  # arguments after the batch, or functions of the batch
  not_checked: str = ""  # a part of what the report says that it did not look at

  @property
  def hides_in_even_batches(self):
    """Whether the batch as given is split well where microbatches are alike."""
    uneven = {
      "mask",
      "valid",
      "pad",
      "ignored",
      "padded",
      "lengths",
      "weight",
      "label",
      "targets",
    }
    return self.verdict == "weighted" and bool(uneven & set(self.uses))

  def call(self, source=BATCH):
    """The arguments of a call."""
    batch = {k: source[k] for k in self.uses}
    as_arrays = functools.partial(jax.tree.map, jnp.asarray)
    further = [x(batch) if callable(x) else x for x in self.further]
    return as_arrays(PARAMS), as_arrays(batch), *further


def logits(params, x):
  out = jnp.einsum("...i,ij->...j", x, params["w"].astype(x.dtype))
  return out + jnp.broadcast_to(params["b"], out.shape)


def per_row(params, batch):
  return (params["scale"] * jnp.tanh(logits(params, batch["x"])).sum(-1) - batch["y"]) ** 2


def cross_entropy(params, x, labels):
  log_p = jax.nn.log_softmax(logits(params, x))
  return -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]


def mean(params, batch):
  return jnp.mean(per_row(params, batch))


def sum_of_rows(params, batch):
  return jnp.sum(per_row(params, batch))


def fixed_denominator(params, batch):
  return jnp.sum(per_row(params, batch)) / 64


def mean_where(each, valid, least=0):
  count = jnp.maximum(jnp.sum(valid), least).astype(each.dtype)
  return jnp.sum(jnp.where(valid, each, 0)) / count


def token_mean(params, batch):
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])


def where_mean(params, batch):
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return jnp.mean(each, where=batch["valid"])


def padding_mask(params, batch):
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return mean_where(each, ~batch["pad"])


def sample_weights(params, batch):
  return jnp.sum(per_row(params, batch) * batch["weight"]) / jnp.sum(batch["weight"])


def ignored_labels(params, batch):
  valid = batch["ignored"] != -100
  each = cross_entropy(params, batch["tokens"], jnp.where(valid, batch["ignored"], 0))
  return mean_where(each, valid, least=1)


def next_tokens(params, batch):
  labels = batch["ignored"][:, 1:]
  valid = labels >= 0
  each = cross_entropy(params, batch["tokens"][:, :-1], jnp.where(valid, labels, 0))
  return mean_where(each, valid)


def pad_id(params, batch):
  valid = batch["padded"] != 0
  each = cross_entropy(params, batch["tokens"], batch["padded"])
  return mean_where(each, valid)


def other_pad_id(params, batch):
  valid = batch["targets"] != 3
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return mean_where(each, valid)


def lengths(params, batch):
  valid = jnp.arange(TIMES)[None] < batch["lengths"][:, None]
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return jnp.sum(jnp.where(valid, each, 0)) / jnp.sum(batch["lengths"]).astype(each.dtype)


def rare_class(params, batch):
  """A mean over a class of which the batch has one row."""
  return mean_where(per_row(params, batch), batch["label"] == 2, least=1)


def class_weights(params, batch):
  weight = jnp.array([1.0, 2.0, 0.5, 3.0])[batch["label"]]
  each = cross_entropy(params, batch["x"], batch["label"])
  return jnp.sum(each * weight.astype(each.dtype)) / jnp.sum(weight).astype(each.dtype)


def focal(params, batch):
  """Positives and negatives, divided by how many positives there are (RetinaNet)."""
  positive = batch["targets"] > 1
  p = jax.nn.sigmoid(logits(params, batch["tokens"])[..., 0])
  p = jnp.where(positive, p, 1 - p)
  count = jnp.maximum(jnp.sum(positive), 1).astype(p.dtype)
  return jnp.sum(-((1 - p) ** 2) * jnp.log(p)) / count


def mean_of_row_means(params, batch):
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return jnp.mean(jnp.sum(each * batch["mask"], -1) / jnp.sum(batch["mask"], -1))


def over_batch_then_time(params, batch):
  """A mean over the rows that are valid at each time, and then over times."""
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  counts = jnp.sum(batch["mask"], 0)
  return jnp.mean(jnp.sum(each * batch["mask"], 0) / jnp.maximum(counts, 1))


def over_batch_then_time_of_totals(params, batch, totals):
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return jnp.sum(jnp.sum(each * batch["mask"], 0) / totals) / TIMES


def contrastive(params, batch):
  return clip(
    params,
    logits(params, batch["x"]),
    batch["x"] @ params["v"].astype(batch["x"].dtype),
  )


def clip(params, a, b):
  a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
  scores = params["scale"] * a @ b.T
  diagonal = jnp.diagonal(scores)
  return jnp.mean(jax.nn.logsumexp(scores, 0) + jax.nn.logsumexp(scores, 1) - 2 * diagonal)


def split_encoder(params, batch):
  """The fix of a contrastive loss: rows in microbatches, and the loss of all of them."""

  def encode(params, x):
    return logits(params, x), x @ params["v"].astype(x.dtype)

  run = microbatch(encode, reduction="concat", batch_argnums=1, microbatch_size=3)
  return clip(params, *run(params, batch["x"]))


def batch_norm(params, batch):
  return mean(params, {**batch, "x": standardised(batch["x"], jnp.mean(batch["x"], 0))})


def standardised(x, center):
  return x - jnp.broadcast_to(center, x.shape)


def running_statistics(params, batch, center):
  new = 0.9 * center + 0.1 * jnp.mean(batch["x"], 0).astype(center.dtype)
  return mean(params, {**batch, "x": standardised(batch["x"], center)}), (
    new,
    None,
  )


def old_statistics(params, batch, center):
  """The exact form: the old statistics in every microbatch, and the new ones as aux."""
  return mean(params, {**batch, "x": standardised(batch["x"], center)}), jnp.mean(batch["x"], 0)


def statistics_of_the_batch(params, batch, center):
  new = jnp.mean(batch["x"], 0).astype(center.dtype)
  return mean(params, {**batch, "x": standardised(batch["x"], new)}), (
    new,
    None,
  )


def zero_batch_norm(params, batch):
  """A residual branch whose scale starts at zero: its statistics show in one gradient alone."""
  residual = (params["scale"] - 1.5) * standardised(batch["x"], jnp.mean(batch["x"], 0))
  return mean(
    {**params, "scale": jnp.ones_like(params["scale"])},
    {**batch, "x": batch["x"] + residual},
  )


def dropout(params, batch, key):
  keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
  return mean(params, {**batch, "x": jnp.where(keep, batch["x"] * 2, 0)})


def noise_of_rows(params, batch, key):
  keys = jax.random.split(key, batch["x"].shape[0])
  noise = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,), batch["x"].dtype))(keys)
  return mean(params, {**batch, "x": batch["x"] + noise})


def drawn_tokens(params, batch, key):
  """A mean over the tokens that a drawn mask chooses."""
  drawn = jax.random.bernoulli(key, 0.15, batch["targets"].shape)
  each = cross_entropy(params, batch["tokens"], batch["targets"])
  return mean_where(each, drawn, least=1)


def mixup(params, batch, key):
  partner = jax.random.permutation(key, batch["x"].shape[0])
  return mean(params, jax.tree.map(lambda x: 0.3 * x[partner] + 0.7 * x, batch))


def hardest_half(params, batch):
  return jnp.mean(jax.lax.top_k(per_row(params, batch), len(batch["y"]) // 2)[0])


def by_a_switch(params, batch):
  """A factor that a mean of the data turns on: even halves of the given batch do not show it."""
  return mean(params, batch) * jnp.where(jnp.mean(batch["mask"]) > 0.9, 2.0, 1.0)


def halves(params, batch):
  """The first half of the rows counts more, by their places (rows of instances and of classes)."""
  first, second = jnp.split(per_row(params, batch), 2)
  return jnp.mean(first) + 0.1 * jnp.mean(second)


def lengths_but_one(params, batch):
  """A mean over the tokens that have a next one."""
  valid = jnp.arange(TIMES)[None] < batch["lengths"][:, None] - 1
  each = jnp.where(valid, cross_entropy(params, batch["tokens"], batch["targets"]), 0)
  return jnp.sum(each) / jnp.maximum(jnp.sum(batch["lengths"] - 1), 1).astype(each.dtype)


def masked_noise(params, batch, key):
  noise = jax.random.normal(key, batch["tokens"].shape, batch["tokens"].dtype)
  return token_mean(params, {**batch, "tokens": batch["tokens"] + 0.1 * noise})


def order_of_places(params, batch, key):
  """An order of what is within a row, drawn for each row, and sorted noise: rows do not meet."""
  noise = jnp.argsort(jax.random.uniform(key, batch["tokens"].shape[:2]), axis=1)
  tokens = jnp.take_along_axis(batch["tokens"], noise[..., None], 1)
  return mean(params, {**batch, "x": tokens[:, 0]})


def mixup_by_sort(params, batch, key):
  partner = jnp.argsort(jax.random.uniform(key, batch["y"].shape))
  return mean(params, jax.tree.map(lambda x: 0.3 * x[partner] + 0.7 * x, batch))


def rms_of_the_data(params, batch):
  """Which halves that are alike hide."""
  return mean(params, batch) / jnp.sqrt(jnp.mean(batch["x"] ** 2))


def rolled(params, batch, key):
  """Rows that meet their neighbours, in a loss that draws too."""
  x = 0.7 * batch["x"] + 0.3 * jnp.roll(batch["x"], 1, 0)
  return dropout(params, {**batch, "x": x}, key)


def named_and_closed_over_key(params, batch, key):
  return closed_over_key(params, batch) + dropout(params, batch, key)


def noise_of_pairs(params, batch, key):
  """Each row twice, one after the other, each with noise of its own."""
  twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
  return dropout(params, twice, key)


def closed_over_key(params, batch):
  return dropout(params, batch, KEY)


def numpy_noise(params, batch):
  noise = np.random.normal(size=batch["x"].shape)
  return mean(params, {**batch, "x": batch["x"] + noise.astype(batch["x"].dtype)})


def token_and_row_terms(params, batch):
  return token_mean(params, batch) + mean(params, batch)


def terms_of_totals(params, batch, totals):
  tokens = cross_entropy(params, batch["tokens"], batch["targets"]) * batch["mask"]
  return jnp.sum(tokens) / totals["tokens"] + jnp.sum(per_row(params, batch)) / totals["rows"]


def regularised(params, batch):
  return mean(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)


def regularised_sum(params, batch):
  return sum_of_rows(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)


def kl_batchmean(params, batch):
  p = jax.nn.softmax(batch["tokens"].sum(1) @ jnp.ones((FEATURES, CLASSES), batch["x"].dtype))
  log_q = jax.nn.log_softmax(logits(params, batch["x"]))
  return jnp.sum(p * (jnp.log(p) - log_q)) / batch["x"].shape[0]


def root_mean_square(params, batch):
  return jnp.sqrt(mean(params, batch))


def free_bits(params, batch):
  return mean(params, batch) + jnp.maximum(jnp.mean(logits(params, batch["x"]) ** 2), 0.01)


def capacity(params, batch):
  return mean(params, batch) + jnp.abs(jnp.mean(logits(params, batch["x"]) ** 2) - 50)


def free_bits_of_rows(params, batch):
  """Of each row, one after the other, and of the parameters."""
  each = jax.lax.map(lambda x: jnp.maximum(jnp.mean(logits(params, x) ** 2), 0.01), batch["x"])
  return jnp.mean(each) + jnp.maximum(jnp.sum(params["w"] ** 2), 0.01)


def order_for_a_log(params, batch, key):
  order = jax.random.permutation(key, len(batch["y"]))
  return mean(params, batch) + 0.0 * jax.random.uniform(key, (), batch["y"].dtype), order


def free_bits_by(bend):
  return lambda params, batch: (
    mean(params, batch) + bend(jnp.mean(logits(params, batch["x"]) ** 2, 0))
  )


def dice(params, batch):
  p = jax.nn.sigmoid(logits(params, batch["tokens"])[..., 0])
  return 1 - 2 * jnp.sum(p * batch["mask"]) / (jnp.sum(p) + jnp.sum(batch["mask"]))


def load_balance(params, batch):
  """A mixture of experts: the product of two means over rows."""
  p = jax.nn.softmax(logits(params, batch["x"]))
  chosen = jnp.mean(jax.nn.one_hot(jnp.argmax(p, -1), CLASSES, dtype=p.dtype), 0)
  return mean(params, batch) + 0.01 * CLASSES * jnp.sum(chosen * jnp.mean(p, 0))


def worst_row(params, batch):
  each = per_row(params, batch)
  return each[jnp.argmax(each)]


def groups(params, batch):
  """Each row beside the mean of its pair (GRPO)."""
  pairs = batch["y"].reshape(-1, 2)
  return mean(
    params,
    {**batch, "y": (pairs - jnp.mean(pairs, 1, keepdims=True)).reshape(-1)},
  )


def neighbours(params, batch):
  x = batch["x"]
  return mean(params, {**batch, "x": x - jnp.roll(x, 1, 0)})


def labels_apart(params, batch, y):
  return jnp.mean((logits(params, batch["x"])[:, :1] - y) ** 2)


def optax_labels(params, batch):
  out = logits(params, batch["x"])
  return optax.losses.softmax_cross_entropy_with_integer_labels(out, batch["label"]).mean()


def totals_of_times(batch):
  return jnp.maximum(jnp.sum(jnp.asarray(batch["mask"]), 0), 1)


def totals(batch):
  return {
    "tokens": jnp.sum(jnp.asarray(batch["mask"])),
    "rows": jnp.asarray(float(ROWS)),
  }


def targets(batch):
  return jnp.asarray(BATCH["y"])[:, None]


def count_of_mask(batch):
  return jnp.sum(batch["mask"])


XY, SUM = ("x", "y"), {"reduction": "sum"}
TOKENS = ("tokens", "targets", "mask")
SHARED = {"rng_argnums": ()}
DRAWS = "noise of a row depends on other rows"
NOISY = {"options": {"rng_argnums": 2}, "further": (KEY,), "not_checked": DRAWS}
WEIGHED_NOISE = NOISY | {"options": {"rng_argnums": 2, "weight_fn": count_of_mask}}
TOTALS = {"batch_argnums": 1, **SUM}
CENTER = np.zeros(FEATURES)
_ENCODED = Specimen(split_encoder, ("x",), options={"num_microbatches": 1})
_NAMED_KEY = Specimen(dropout, XY, **NOISY)
_TERMS = Specimen(terms_of_totals, (*XY, *TOKENS), options=TOTALS, further=(totals,))
_TIMES = Specimen(
  over_batch_then_time_of_totals,
  TOKENS,
  options=TOTALS,
  further=(totals_of_times,),
)
_OLD = Specimen(old_statistics, XY, options={"has_aux": True}, further=(CENTER,))
_PENALISED = Specimen(regularised, XY)


def weigh(text):
  return f"weight_fn=lambda batch: jnp.sum({text})"


ZOO = {
  "mean": Specimen(mean, XY),
  "sum": Specimen(sum_of_rows, XY, "sum", 'reduction="sum"'),
  "fixed denominator": Specimen(fixed_denominator, XY, "sum", 'reduction="sum"'),
  "mean, added up": Specimen(mean, XY, "weighted", 'reduction="mean"', options=SUM),
  "token mean": Specimen(token_mean, TOKENS, "weighted", weigh("batch['mask']")),
  "jnp.mean(where=)": Specimen(
    where_mean,
    ("tokens", "targets", "valid"),
    "weighted",
    weigh("batch['valid']"),
  ),
  "padding mask": Specimen(
    padding_mask,
    ("tokens", "targets", "pad"),
    "weighted",
    weigh("~batch['pad']"),
  ),
  "sample weights": Specimen(sample_weights, (*XY, "weight"), "weighted", weigh("batch['weight']")),
  "labels of -100": Specimen(
    ignored_labels,
    ("tokens", "ignored"),
    "weighted",
    weigh("batch['ignored'] != -100"),
  ),
  "next tokens": Specimen(
    next_tokens,
    ("tokens", "ignored"),
    "weighted",
    weigh("batch['ignored'][..., 1:] >= 0"),
  ),
  "pad id 0": Specimen(pad_id, ("tokens", "padded"), "weighted", weigh("batch['padded'] != 0")),
  "pad id 3": Specimen(
    other_pad_id,
    ("tokens", "targets"),
    "weighted",
    weigh("batch['targets'] != 3"),
  ),
  "lengths": Specimen(
    lengths,
    ("tokens", "targets", "lengths"),
    "weighted",
    weigh("batch['lengths']"),
  ),
  "rare class": Specimen(rare_class, (*XY, "label"), "weighted", weigh("batch['label'] == 2")),
  "focal": Specimen(focal, ("tokens", "targets"), "weighted", weigh("batch['targets'] > 1")),
  "mean of row means": Specimen(mean_of_row_means, TOKENS),
  "over batch, then time": Specimen(
    over_batch_then_time, TOKENS, "coupled", "totals", fixed=_TIMES
  ),
  "contrastive": Specimen(contrastive, ("x",), "coupled", "microbatch(encode", fixed=_ENCODED),
  "batch statistics": Specimen(batch_norm, XY, "coupled", "running statistics", _OLD),
  "batch statistics, carried too": Specimen(
    statistics_of_the_batch,
    XY,
    "coupled",
    "running",
    _OLD,
    {"carry_argnum": 2},
    (CENTER,),
  ),
  # The check gives every microbatch the old statistics.
  "running statistics, carried": Specimen(
    running_statistics, XY, options={"carry_argnum": 2}, further=(CENTER,)
  ),
  "batch statistics behind a zero": Specimen(
    zero_batch_norm, XY, "coupled", "running statistics", _OLD
  ),
  "dropout": _NAMED_KEY,
  "dropout, key not named": Specimen(dropout, XY, "random", "rng_argnums=2", further=(KEY,)),
  "dropout, key shared": Specimen(
    dropout,
    XY,
    "random",
    "rng_argnums=2",
    options=SHARED,
    further=(KEY,),
    not_checked=DRAWS,
  ),
  "dropout, raw key": Specimen(
    dropout,
    XY,
    "random",
    "rng_argnums=2",
    further=(jax.random.PRNGKey(0),),
    not_checked=DRAWS,
  ),
  "dropout, key closed over": Specimen(
    closed_over_key,
    XY,
    "random",
    "rng_argnums=2",
    fixed=_NAMED_KEY,
    not_checked=DRAWS,
  ),
  "noise of rows": Specimen(noise_of_rows, XY, **NOISY),
  # Rows meet in these two: the report says that it did not look.
  "tokens drawn": Specimen(drawn_tokens, TOKENS, **NOISY),
  "order for a log": Specimen(
    order_for_a_log,
    XY,
    not_checked=DRAWS,
    options={"rng_argnums": 2, "has_aux": True, "aux_reduction": "stack"},
    further=(KEY,),
  ),
  "order of places": Specimen(order_of_places, (*XY, "tokens"), **NOISY),
  "masked noise": Specimen(masked_noise, TOKENS, **WEIGHED_NOISE),
  "mixup": Specimen(mixup, XY, "coupled", '"x_other": batch["x"][order]', **NOISY),
  "mixup by sort": Specimen(mixup_by_sort, XY, "coupled", "draw the order", **NOISY),
  "rms of the data": Specimen(rms_of_the_data, XY, "coupled", "Several denominators"),
  "rolled": Specimen(rolled, XY, "coupled", "before the step, for the whole batch", **NOISY),
  "dropout, another key closed over": Specimen(
    named_and_closed_over_key, XY, "random", "rng_argnums=2", **NOISY
  ),
  "noise of pairs": Specimen(noise_of_pairs, XY, **NOISY),
  "NumPy's noise": Specimen(numpy_noise, XY, "random", "rng_argnums=2", fixed=_NAMED_KEY),
  "several terms": Specimen(
    token_and_row_terms,
    (*XY, *TOKENS),
    "coupled",
    'reduction="sum"',
    fixed=_TERMS,
  ),
  "regularised": Specimen(regularised, XY),
  "regularised sum": Specimen(regularised_sum, XY, "coupled", "mean over rows", fixed=_PENALISED),
  "KL, batchmean": Specimen(kl_batchmean, ("x", "tokens")),
  "root mean square": Specimen(root_mean_square, XY, "coupled", "A ratio, product or root"),
  "free bits": Specimen(free_bits, XY),
  "capacity": Specimen(capacity, XY),
  "free bits by where": Specimen(
    free_bits_by(lambda x: jnp.where(jnp.sum(x) > 0.01, jnp.sum(x), 0.01)),
    XY,
  ),
  "largest mean": Specimen(
    free_bits_by(lambda x: jnp.max(x + jnp.array([1e4, 0, 0, 0], x.dtype))),
    XY,
  ),
  "free bits by leaky relu": Specimen(
    free_bits_by(lambda x: jax.nn.leaky_relu(jnp.sum(x) - 0.01)),
    XY,
  ),
  "free bits of rows": Specimen(free_bits_of_rows, ("x",)),
  "dice": Specimen(dice, ("tokens", "mask"), "coupled", "A ratio, product or root"),
  "load balance": Specimen(load_balance, XY, "coupled", "A ratio, product or root"),
  "worst row": Specimen(worst_row, XY, "coupled", "sorted or selected"),
  "hardest half": Specimen(hardest_half, XY, "coupled", "sorted or selected"),
  "switched": Specimen(by_a_switch, (*XY, "mask"), "coupled", "A ratio, product or root"),
  "halves": Specimen(halves, XY, "coupled", "x.reshape(-1, group"),
  "lengths but one": Specimen(
    lengths_but_one,
    ("tokens", "targets", "lengths"),
    "weighted",
    "has_weight=True",
  ),
  "groups": Specimen(groups, XY, "coupled", "x.reshape(-1, group"),
  "neighbours": Specimen(neighbours, XY, "coupled", "before the step, for the whole batch"),
  "class weights": Specimen(class_weights, ("x", "label"), "weighted", "has_weight=True"),
  "labels apart": Specimen(
    labels_apart, ("x",), "unsplit", "batch_argnums=(1, 2)", further=(targets,)
  ),
  "labels apart, whole": Specimen(
    labels_apart,
    ("x",),
    "unsplit",
    "batch_argnums=(1, 2)",
    options={"batch_argnums": 1, "microbatch_size": 1},
    further=(targets,),
  ),
  "integer labels": Specimen(optax_labels, ("x", "label")),
}
