"""Further losses of the page of losses, most of which need a statistic of the whole batch.

Each is compared with the whole batch, and with a mistake: a loss that computes the statistic itself.

    cd docs && XLA_FLAGS=--xla_force_host_platform_device_count=8 python losses_more.py
"""

import functools

import jax
import jax.numpy as jnp
from losses_setup import (
  compare,
  compare_after,
  cross_entropy,
  hidden,
  images,
  label,
  LENGTH,
  model,
  nats,
  of_pixels,
  pixels,
  ROWS,
  split,
  teacher,
  text,
  triplets,
  vaes,
)
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

answers = {**text[1], "old": nats(teacher, text[1])}


def tokens(batch):
  return batch["mask"].sum()


def encode(params, x):
  x = model(params, x)
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# Selected tokens


def excess(params, batch):
  return jnp.where(
    batch["mask"] > 0, nats(params, batch) - batch["old"], -jnp.inf
  )


def top(params, batch):
  number = jnp.int32(0.6 * tokens(batch))
  return jnp.sort(excess(params, batch), axis=None)[-number] - 1e-9, number


def selected(params, batch, top):
  least, number = top
  return (
    jnp.sum(nats(params, batch), where=excess(params, batch) > least) / number
  )


compare_after(top, (text[0], answers), selected, reduction="sum")


# Importance weights


def ratios(params, batch):
  return jnp.exp(
    jnp.mean(
      batch["old"] - nats(params, batch), axis=1, where=batch["mask"] > 0
    )
  )


def reweighted(params, batch, total):
  weight = jax.lax.stop_gradient(ratios(params, batch)) / total
  return weight @ jnp.sum(nats(params, batch) * batch["mask"], axis=1)


def total(params, batch):
  return ratios(params, batch).sum()


compare_after(total, (text[0], answers), reweighted, reduction="sum")


# Class frequencies


def frequencies(params, batch):
  return jnp.bincount(batch["y"], length=10) / len(batch["y"])


def balanced(params, batch, frequencies):
  return jnp.mean(
    cross_entropy(model(params, batch["x"]), batch["y"])
    / frequencies[batch["y"]]
  )


compare_after(frequencies, images, balanced)


# Focal loss


def positives(params, batch):
  return jnp.maximum(batch["found"].sum(), 1)


def focal(params, batch, positives):
  each = optax.sigmoid_focal_loss(
    model(params, batch["x"]), batch["found"], gamma=2
  )
  return jnp.sum(each) / positives


found = (pixels > 0.5) & (label == 0)[:, None]  # the strokes of zeros
data = of_pixels, {"x": pixels, "found": found.astype(float)}
compare_after(positives, data, focal, reduction="sum")


# Triplets that are active


def hinges(params, batch):
  anchor, near, far = (
    encode(params, batch[k]) for k in ("anchor", "near", "far")
  )
  return jax.nn.relu(
    jnp.sum((anchor - near) ** 2 - (anchor - far) ** 2, axis=-1) + 0.1
  )


def active(params, batch):
  return jnp.maximum(jnp.sum(hinges(params, batch) > 0), 1)


def mean(params, batch, active):
  return hinges(params, batch).sum() / active


compare_after(active, triplets, mean, reduction="sum")


# VAE, with free bits


def kl(params, batch):
  mean, log_std = jnp.split(model(params["encoder"], batch["x"]), 2, axis=-1)
  code = mean + jnp.exp(log_std) * batch["noise"]
  return (mean**2 + jnp.exp(2 * log_std) - 1) / 2 - log_std, code


def above(params, batch):
  return kl(params, batch)[0].mean(axis=0) > 0.6


def vae(params, batch, above):
  of_rows, code = kl(params, batch)
  error = jnp.sum((model(params["decoder"], code) - batch["x"]) ** 2, axis=-1)
  return jnp.mean(error) + jnp.sum(jnp.where(above, of_rows.mean(axis=0), 0.6))


compare_after(above, vaes, vae)


# Distillation


def distilled(params, batch, teacher):
  logits = (hidden(p, batch) @ p["out"] for p in (params, teacher))
  kl = optax.losses.kl_divergence_with_log_targets(
    *map(jax.nn.log_softmax, logits)
  )
  return jnp.sum(kl * batch["mask"]) / jnp.sum(batch["mask"])


compare(
  text, distilled, teacher, weight_fn=tokens, mistake=split(distilled, teacher)
)


# Regularizers


def ridge(params, batch, rows, share=True):
  each = cross_entropy(model(params, batch["x"]), batch["y"])
  part = len(each) / rows if share else 1
  return jnp.sum(each) / rows + part * 0.01 * optax.tree.norm(
    params, squared=True
  )


mistake = split(functools.partial(ridge, share=False), ROWS, reduction="sum")
compare(images, ridge, ROWS, reduction="sum", mistake=mistake)


# Masked language models


def token_mean(params, batch):
  return jnp.sum(nats(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


rng = np.random.default_rng(0)
chosen = text[1]["mask"] * (rng.random((ROWS, LENGTH)) < 0.15)
masked = {
  **text[1],
  "token": np.where(chosen, 0, text[1]["token"]),
  "mask": chosen,
}
compare(
  (text[0], masked), token_mean, weight_fn=tokens, mistake=split(token_mean)
)


# Class weights


of_class = jnp.linspace(0.1, 2, 10)


def weighted(params, batch):
  each = cross_entropy(model(params, batch["x"]), batch["y"])
  return jnp.sum(each * of_class[batch["y"]]) / jnp.sum(of_class[batch["y"]])


def of_labels(batch):
  return of_class[batch["y"]].sum()


compare(images, weighted, weight_fn=of_labels, mistake=split(weighted))
