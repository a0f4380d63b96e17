"""What `gradient_noise_scale` says in training, with several decays, beside the noise scale itself.

    python benchmarks/noise_scale.py [--steps 250] [--rows 2048] [--save]

Two jobs are trained once each: the language model of examples/train_lm.py, and the residual layers
of the guide "Choosing the microbatch" on handwritten digits. Every decay is given the
terms of the same steps. Beside them stands the noise scale at these parameters, from the gradient
of each row: of all rows of the digits, and of --rows windows drawn from the text (an unbiased
estimate). The last table says by what factor each decay is off, above or below, over these steps.
12 minutes on 2 cores with other work, most of them for the gradients of rows of the language model.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paths  # noqa: F401
import results
from sklearn.datasets import load_digits
import tqdm
import train_lm

import optax_accum

DECAYS = (0.9, 0.97, 0.99)
EVERY = 25  # steps between looks at the gradients of rows


def language_model(steps, rows):
  """64 windows of 64 bytes a step, in 8 microbatches, and windows to look at."""
  tokens, _ = train_lm.load_data()
  model = train_lm.Transformer(layers=3, width=128)
  params = jax.jit(model.init)(
    jax.random.key(0), jnp.zeros((1, 64), jnp.int32)
  )["params"]
  starts = np.random.default_rng(1).integers(len(tokens) - 64, size=rows)
  data = tokens[starts[:, None] + np.arange(65)]
  batches = train_lm.batches(tokens, 64, 64, steps)
  return (
    train_lm.make_loss_fn(model),
    train_lm.make_optimizer(steps),
    params,
    batches,
    data,
  )


def digits(steps):
  """128 rows a step, in 8 microbatches, and all rows."""
  found = load_digits()
  data = {
    "x": (found.data / 16).astype(np.float32),
    "y": found.target.astype(np.int32),
  }
  layers, width = 8, 64
  up, down, out = jax.random.split(jax.random.key(0), 3)
  params = {
    "up": jax.random.normal(up, (layers, width, 4 * width)) / 8,
    "down": jax.random.normal(down, (layers, 4 * width, width)) / 64,
    "out": jax.random.normal(out, (width, 10)) / 8,
  }

  def loss_fn(params, batch):
    def layer(x, weights):
      return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    layers = {"up": params["up"], "down": params["down"]}
    logits = jax.lax.scan(layer, batch["x"], layers)[0] @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["y"]
    ).mean()

  def batches():
    rng = np.random.default_rng(0)
    for _ in range(steps):
      drawn = rng.integers(len(data["y"]), size=128)
      yield {name: x[drawn] for name, x in data.items()}

  return loss_fn, optax.adam(1e-4), params, batches(), data


def from_rows(loss_fn, all_rows):
  """``params -> noise scale``, from the gradient of each of these rows.

  `all_rows` says whether they are all that there are, or drawn from more.
  """

  def moments(params, rows):
    grad = jax.grad(
      lambda params, row: loss_fn(params, jax.tree.map(lambda x: x[None], row))
    )
    grads = jax.vmap(grad, (None, 0))(params, rows)
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    return mean, jnp.mean(
      jax.vmap(lambda g: optax.tree.norm(g, squared=True))(grads)
    )

  split = optax_accum.microbatch(
    moments, reduction="mean", batch_argnums=1, microbatch_size=32
  )

  @jax.jit
  def noise_scale(params, data):
    mean, of_rows = split(params, data)
    of_mean = optax.tree.norm(mean, squared=True)
    if not all_rows:  # their mean has noise too
      count = len(jax.tree.leaves(data)[0])
      of_mean = (count * of_mean - of_rows) / (count - 1)
    return (of_rows - of_mean) / of_mean

  return noise_scale


def run(table, name, job, all_rows):
  """Trains a job and adds its rows; returns what stands in them."""
  loss_fn, tx, params, batches, data = job
  step = optax_accum.make_train_step(
    loss_fn, tx, num_microbatches=8, noise_scale=True
  )
  estimates = [optax_accum.gradient_noise_scale(decay) for decay in DECAYS]
  updates, states = (
    [jax.jit(e.update) for e in estimates],
    [e.init() for e in estimates],
  )
  exact, opt_state, rows = from_rows(loss_fn, all_rows), tx.init(params), []
  for i, batch in enumerate(tqdm.tqdm([*batches], name, leave=False), 1):
    params, opt_state, metrics = step(params, opt_state, batch)
    told = [
      f(metrics["noise_scale"], s) for f, s in zip(updates, states, strict=True)
    ]
    states = [state for _, state in told]
    if i % EVERY == 0:
      rows.append(
        [float(exact(params, data)), *(float(scale) for scale, _ in told)]
      )
      table.add(name, i, float(metrics["loss"]), *rows[-1])
  return np.array(rows)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=250, help="of each job")
  parser.add_argument(
    "--rows", type=int, default=2048, help="windows of text to look at"
  )
  results.add_option(parser)
  args = parser.parse_args()
  decays = [f"decay {decay}" for decay in DECAYS]
  table = results.Table(
    "noise scale in training, rows, beside that of all rows",
    ["job", "step", "loss", "all rows", *decays],
    text=(16,),
  )
  jobs = {
    "digits": (digits(args.steps), True),
    "language model": (language_model(args.steps, args.rows), False),
  }
  found = {name: run(table, name, *job) for name, job in jobs.items()}
  off = results.Table(
    "by what factor it is off, above or below",
    ["job", "of the steps", *decays],
    text=(16, 14),
  )
  for name, rows in found.items():
    factors = np.exp(np.abs(np.log(rows[:, 1:] / rows[:, :1])))
    for which, quantile in (("median", 0.5), ("worst", 1.0)):
      off.add(name, which, *map(float, np.quantile(factors, quantile, axis=0)))
  results.save(args.save, "noise_scale", [table, off])


if __name__ == "__main__":
  main()
