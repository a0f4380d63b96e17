"""Train an output layer of 32,768 words, without the logits of all 1,024 tokens at once.

A token is three letters of an alphabet of 32, so there are 32**3 tokens. The loss is the mean over
all tokens. Only the output layer (the head) and its cross-entropy run in microbatches. The backward
pass recomputes them.

Run:      python examples/large_vocabulary.py
Expected: held-out bits per letter fall from 5.01 to 3.26 in 50 steps. The gradients need 257 MiB of
          temp memory with all logits at once, and 9.1 with those of 32 tokens. Their relative
          difference is at most 4e-7. 30 seconds on 2 CPU cores.
"""

import argparse
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_lm import load_data, positive, temp_mib

import optax_accum

ALPHABET = " abcdefghijklmnopqrstuvwxyz.,()'"
VOCABULARY = len(ALPHABET) ** 3
CONTEXT, FEATURES, HIDDEN = 12, 64, 32  # letters seen before a token; sizes


def init_params(key):
  embed, mix, head = jax.random.split(key, 3)
  return {
    "embed": jax.random.normal(embed, (CONTEXT, len(ALPHABET), FEATURES))
    / math.sqrt(CONTEXT),
    "mix": jax.random.normal(mix, (FEATURES, HIDDEN)) / math.sqrt(FEATURES),
    "head": jax.random.normal(head, (HIDDEN, VOCABULARY)) / math.sqrt(HIDDEN),
  }


def head_loss(head, hidden, tokens):
  """The sum over tokens of the cross-entropy, whose logits are float32[tokens, VOCABULARY]."""
  return optax.softmax_cross_entropy_with_integer_labels(
    hidden @ head, tokens
  ).sum()


def make_loss_fn(head_loss):
  def loss_fn(params, batch):
    letters = params["embed"][jnp.arange(CONTEXT), batch["before"]]
    hidden = jnp.tanh(jax.nn.gelu(letters.sum(axis=1)) @ params["mix"])
    return head_loss(params["head"], hidden, batch["token"]) / len(hidden)

  return loss_fn


def letters_of(data):
  """Text as positions in the alphabet. Other characters become spaces."""
  text = "".join(map(chr, data)).lower()
  text = re.sub(f"[^{re.escape(ALPHABET)}]+", " ", text)
  return np.array([ALPHABET.index(c) for c in text], np.int32)


def windows(letters, starts):
  """The letters of each context, and the token of the three letters that follow."""
  at = letters[starts[:, None] + np.arange(CONTEXT + 3)]
  a, b, c = at[:, CONTEXT:].T
  return {
    "before": at[:, :CONTEXT],
    "token": (a * len(ALPHABET) + b) * len(ALPHABET) + c,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  flag = functools.partial(parser.add_argument, type=positive, metavar="N")
  flag("--steps", default=50, help="optimizer steps (default: 50)")
  flag(
    "--batch", default=1024, help="tokens of one optimizer step (default: 1024)"
  )
  flag(
    "--microbatch",
    default=32,
    help="tokens whose logits are computed at once (default: 32)",
  )
  args = parser.parse_args()
  # A step also stores the head's gradient, so small batches do not save 10 times the memory.
  if args.batch < max(256, 16 * args.microbatch):
    parser.error(
      f"--batch {args.batch} must be 256 or more, and 16 or more times --microbatch"
      f" {args.microbatch}, to need 10 times less memory"
    )
  train, held_out = (letters_of(part) for part in load_data())
  rng, tx = np.random.default_rng(0), optax.adam(1e-2)

  def draw(letters, tokens):
    return windows(
      letters, rng.integers(len(letters) - CONTEXT - 2, size=tokens)
    )

  head_loss_in_parts = optax_accum.microbatch(
    head_loss,
    reduction="sum",
    batch_argnums=(1, 2),
    microbatch_size=args.microbatch,
  )
  loss_fn = make_loss_fn(head_loss_in_parts)
  # The loss runs once, on all tokens. Only the head inside it runs in microbatches.
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1)
  evaluate, test = jax.jit(loss_fn), draw(held_out, 1024)
  params = init_params(jax.random.key(0))
  opt_state = tx.init(params)
  before = float(evaluate(params, test)) / math.log(2) / 3
  for _ in range(args.steps):
    params, opt_state, _ = step(params, opt_state, draw(train, args.batch))
  after = float(evaluate(params, test)) / math.log(2) / 3
  print(
    f"held-out bits per letter: {before:.2f} before, {after:.2f} after {args.steps} steps\n"
  )

  batch, temp, grads = draw(train, args.batch), {}, {}
  print(f"gradients of {args.batch} tokens     temp MiB")
  for name, fun in {
    "all logits at once": head_loss,
    "in microbatches": head_loss_in_parts,
  }.items():
    compiled = (
      jax.jit(jax.grad(make_loss_fn(fun))).lower(params, batch).compile()
    )
    temp[name], grads[name] = temp_mib(compiled), compiled(params, batch)
    print(f"{name:20}{temp[name]:18.1f}")
  whole = grads["all logits at once"]
  error = optax.tree.sub(grads["in microbatches"], whole)
  off = jax.tree.map(
    lambda x, y: float(jnp.linalg.norm(x) / jnp.linalg.norm(y)), error, whole
  )
  print(
    "relative error:",
    ", ".join(f"{x:.1e} in {name}" for name, x in off.items()),
  )

  assert max(off.values()) < 100 * jnp.finfo(jnp.float32).eps, off
  assert temp["all logits at once"] > 10 * temp["in microbatches"], temp
  assert after < before - 0.01 * min(args.steps, 100), (before, after)


if __name__ == "__main__":
  main()
