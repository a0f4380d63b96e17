"""Train a byte-level Transformer on a batch of 64 rows, in 8 microbatches of 8.

Run:      python examples/train_lm.py [--data FILE] [--bf16] [--remat] [--plot FILE]
Expected: held-out bits per byte fall from 8.64 to 2.41 in 250 steps (2 to 3 minutes on 2 CPU
          cores). Compared with the whole batch, one step of 8 microbatches has a relative error of
          2e-6, and no parameter differs by more than 3e-8. The temp memory of a step falls from 299
          MiB (1 microbatch) to 41.5 (8) and 23.5 (16). With remat, which recomputes activations in
          the backward pass, it falls from 101 to 16.3 and 10.8.
"""

import argparse
from collections.abc import Callable, Iterator
import functools
import math
import pathlib
from pydoc_data import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

import optax_accum

HEADS = 4
LEARNING_RATE = 5e-3


class Block(nn.Module):
  """Causal self-attention, then an MLP, each added to its input."""

  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, _):
    rows, length, width = x.shape
    # No biases: softmax cancels a key's bias, so its gradient is rounding noise, which AdamW
    # would scale up to full-sized steps.
    dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
    norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
    qkv = dense(3 * width)(norm()(x)).reshape(
      rows, length, 3, HEADS, width // HEADS
    )
    attended = jax.nn.dot_product_attention(
      *jnp.moveaxis(qkv, 2, 0), is_causal=True
    )
    x = x + dense(width)(attended.reshape(x.shape))
    return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x)))), None


class Transformer(nn.Module):
  """Bytes in, logits of the next byte out. Parameters are float32 whatever `dtype` is."""

  layers: int
  width: int
  dtype: jnp.dtype = jnp.float32  # of the computation
  remat: bool = False  # store only each layer's input; the backward pass recomputes the rest

  @nn.compact
  def __call__(self, tokens):
    positions = self.param(
      "positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width)
    )
    x = nn.Embed(256, self.width, dtype=self.dtype)(tokens) + positions.astype(
      self.dtype
    )
    # A scan over layers, not a Python loop. Without a loop in the program, XLA for CPU can merge
    # what remat recomputes with the original computation, and then stores the original.
    block = nn.remat(Block, prevent_cse=False) if self.remat else Block
    blocks = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=self.layers,
    )
    x, _ = blocks(self.dtype, name="blocks")(x, None)
    return nn.Dense(256, use_bias=False, dtype=self.dtype)(
      nn.RMSNorm(dtype=self.dtype)(x)
    )


def make_loss_fn(model: Transformer) -> Callable[..., jax.Array]:
  """The mean loss, in nats per byte, of predicting each byte of a window from those before it."""

  def loss_fn(params, windows):
    logits = model.apply({"params": params}, windows[:, :-1]).astype(
      jnp.float32
    )
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, windows[:, 1:]
    ).mean()

  return loss_fn


def make_optimizer(steps: int) -> optax.GradientTransformation:
  """Clipping and AdamW see one gradient a cycle, so the schedule counts optimizer steps."""
  schedule = optax.warmup_cosine_decay_schedule(
    LEARNING_RATE / 10, LEARNING_RATE, steps // 10, steps, LEARNING_RATE / 10
  )
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def load_data(
  path: pathlib.Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """The bytes to train on, and the held-out bytes, which are the last tenth."""
  if path is None:
    # Topics share paragraphs. Each paragraph is kept once, so that none is in both parts.
    paragraphs = "\n\n".join(topics.topics.values()).split("\n\n")
    data = "\n\n".join(dict.fromkeys(paragraphs)).encode()
  else:
    data = path.read_bytes()
  tokens = np.frombuffer(data, np.uint8).astype(np.int32)
  cut = len(tokens) - len(tokens) // 10
  return tokens[:cut], tokens[cut:]


def batches(
  tokens: np.ndarray, rows: int, length: int, steps: int
) -> Iterator[np.ndarray]:
  """Random windows of `length` bytes and the next byte: int32[rows, length + 1]."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    starts = rng.integers(len(tokens) - length, size=rows)
    yield tokens[starts[:, None] + np.arange(length + 1)]


def train(args, tx, params, tokens, count: int):
  """Takes all steps, each in `count` microbatches. Returns parameters, state and all losses."""
  loss_fn = make_loss_fn(
    Transformer(args.layers, args.width, args.dtype, args.remat)
  )
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=count)
  # Copy them, because a step updates its arguments in place, and the caller uses them again.
  params, losses = jax.tree.map(jnp.copy, params), []
  opt_state = tx.init(params)
  total = args.steps * args.batch * args.length
  with tqdm.tqdm(
    total=total, unit="tok", unit_scale=True, desc=microbatches(count)
  ) as bar:
    for batch in batches(tokens, args.batch, args.length, args.steps):
      params, opt_state, metrics = step(params, opt_state, batch)
      losses.append(float(metrics["loss"]))
      bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
      bar.update(args.batch * args.length)
  return params, opt_state, losses


def compile_steps(
  args, tx, state, batch
) -> dict[tuple[int, bool], jax.stages.Compiled]:
  """Compiles the step for each number of microbatches, with and without remat. Prints memory."""
  compiled = {}
  print(
    "\nmemory of one step as compiled, MiB    without remat        with remat"
  )
  print(
    "microbatches  rows of each                temp    peak      temp    peak"
  )
  counts = sorted({1, 2, 4, 8, 16, args.batch // args.microbatch})
  counts = [n for n in counts if args.batch % n == 0]
  with tqdm.tqdm(
    total=2 * len(counts), unit="program", desc="compiling", leave=False
  ) as bar:
    for count in counts:
      line = f"{count:12d}{args.batch // count:14d}      "
      for remat in (False, True):
        bar.set_postfix_str(
          f"{microbatches(count)}, {'with' if remat else 'without'} remat"
        )
        loss_fn = make_loss_fn(
          Transformer(args.layers, args.width, args.dtype, remat)
        )
        step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=count)
        compiled[count, remat] = step.lower(*state, batch).compile()
        memory = compiled[count, remat].memory_analysis()
        # Computed here, because XLA for CPU leaves temp out of the peak that it reports.
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
        peak = memory.temp_size_in_bytes + kept - memory.alias_size_in_bytes
        line += f"{temp_mib(compiled[count, remat]):10.1f}{peak / 2**20:8.1f}"
        bar.update()
      bar.write(line)
  temps = [
    [temp_mib(step) for key, step in compiled.items() if key[1] is r]
    for r in (False, True)
  ]
  if any(column != sorted(set(column), reverse=True) for column in temps):
    print(
      "temp stops falling where activations are smaller than the gradients that are added up"
    )
  return compiled


def temp_mib(compiled: jax.stages.Compiled) -> float:
  """What a step needs in addition to its arguments and results: activations and gradients."""
  return compiled.memory_analysis().temp_size_in_bytes / 2**20


def microbatches(count: int) -> str:
  return "1 microbatch" if count == 1 else f"{count} microbatches"


def draw(figure, losses, whole_losses, count, compiled) -> None:
  loss_axes, memory_axes = figure.subplots(1, 2)
  steps = range(1, len(losses) + 1)
  loss_axes.plot(steps, whole_losses, "k", label="the whole batch")
  # dots, so that both are visible
  loss_axes.plot(steps, losses, ".", label=microbatches(count))
  loss_axes.set(xlabel="optimizer step", ylabel="training loss, nats per byte")
  loss_axes.xaxis.get_major_locator().set_params(integer=True)
  loss_axes.legend()
  for remat, label in [(False, "without remat"), (True, "with remat")]:
    points = [
      (key[0], temp_mib(step))
      for key, step in compiled.items()
      if key[1] == remat
    ]
    memory_axes.semilogx(*zip(*points, strict=True), "o-", base=2, label=label)
  counts = sorted({key[0] for key in compiled})
  memory_axes.set_xticks(counts, counts)
  memory_axes.set(
    xlabel="microbatches", ylabel="temp memory of a step, MiB", ylim=(0, None)
  )
  memory_axes.legend()


def positive(text: str) -> int:
  try:
    number = int(text)
  except ValueError:
    number = 0
  if number < 1:
    raise argparse.ArgumentTypeError(
      f"must be a whole number, 1 or more, got {text}"
    )
  return number


def parse_args():
  """The settings, the data and, with --plot, the figure. Exits if a setting is invalid."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  flag = parser.add_argument
  flag(
    "--data",
    type=pathlib.Path,
    metavar="FILE",
    help="text to learn (default: Python's topics)",
  )
  for name, default, what in [
    ("--steps", 250, "optimizer steps"),
    ("--batch", 64, "rows of one optimizer step"),
    ("--microbatch", 8, "rows of one forward and backward pass"),
    ("--length", 64, "bytes in a row"),
    ("--layers", 3, "Transformer layers"),
    ("--width", 128, f"features, for {HEADS} heads"),
  ]:
    flag(
      name,
      type=positive,
      default=default,
      metavar="N",
      help=f"{what} (default: {default})",
    )
  flag(
    "--bf16",
    action="store_true",
    help="compute in bfloat16; parameters stay float32",
  )
  flag(
    "--remat",
    action="store_true",
    help="store only layer inputs: less memory, more time",
  )
  flag(
    "--plot",
    metavar="FILE",
    help="train the whole batch too, and draw both; needs matplotlib",
  )
  args = parser.parse_args()
  args.dtype = jnp.bfloat16 if args.bf16 else jnp.float32
  if args.batch % args.microbatch:
    parser.error(
      f"--batch {args.batch} is not a multiple of --microbatch {args.microbatch}"
    )
  if args.width % HEADS:
    parser.error(
      f"--width {args.width} is not a multiple of {HEADS}, the number of heads"
    )
  try:
    train, held_out = load_data(args.data)
  except OSError as error:
    parser.error(f"--data {args.data}: {error.strerror}")
  if len(held_out) <= args.length:
    size, need = len(train) + len(held_out), 10 * (args.length + 1)
    parser.error(
      f"--data holds {size} bytes; a tenth must hold a row, so --length {args.length} needs {need}"
    )
  figure = None
  if args.plot:
    try:
      from matplotlib.figure import Figure

      figure = Figure(figsize=(10, 4), layout="constrained")
      figure.savefig(args.plot)  # fails before training if it cannot be written
    except (ImportError, OSError, ValueError) as error:
      parser.error(f"--plot {args.plot}: {error}")
  return args, train, held_out, figure


def main() -> None:
  args, train_tokens, held_out, figure = parse_args()
  count = args.batch // args.microbatch
  model, tx = (
    Transformer(args.layers, args.width, args.dtype),
    make_optimizer(args.steps),
  )
  tokens = jnp.zeros((1, args.length), jnp.int32)
  start = jax.jit(model.init)(jax.random.key(0), tokens)["params"]

  windows = held_out[: len(held_out) // (args.length + 1) * (args.length + 1)]
  # enough rows, even of a large file
  windows = windows.reshape(-1, args.length + 1)[:1024]
  rows = min(args.microbatch, len(windows))
  evaluate = jax.jit(
    optax_accum.microbatch(
      make_loss_fn(model),
      reduction="mean",
      batch_argnums=1,
      microbatch_size=rows,
    )
  )
  params, opt_state, losses = train(args, tx, start, train_tokens, count)
  before, after = (
    float(evaluate(p, windows)) / math.log(2) for p in (start, params)
  )

  state = (params, opt_state)
  batch = next(batches(train_tokens, args.batch, args.length, 1))
  compiled = compile_steps(args, tx, state, batch)
  # Start from the trained state, because AdamW's first step has full size even where a gradient is
  # only rounding noise. Pass copies, because a step updates its arguments in place.
  stepped, whole = (
    compiled[n, args.remat](*jax.tree.map(jnp.copy, state), batch)[0]
    for n in (count, 1)
  )
  difference, step_taken = (
    optax.tree.sub(stepped, whole),
    optax.tree.sub(whole, params),
  )
  largest = optax.tree.norm(difference, ord="inf")
  relative = optax.tree.norm(difference) / optax.tree.norm(step_taken)
  print(
    f"\none step of {microbatches(count)} and one of the whole batch: parameters differ"
  )
  print(f"by at most {largest:.1e}; relative error of the step {relative:.1e}")
  print(
    f"held-out bits per byte: {before:.3f} before, {after:.3f} after step {args.steps}"
  )
  if figure:
    whole_losses = train(args, tx, start, train_tokens, 1)[2]
    draw(figure, losses, whole_losses, count, compiled)
    figure.savefig(args.plot)
  # Gradients are rounded like the computation, and updated parameters like float32. If one of 8
  # microbatches were left out, the error would be 0.03 or more.
  assert (
    relative < 2 * jnp.finfo(args.dtype).eps + 100 * jnp.finfo(jnp.float32).eps
  ), relative


if __name__ == "__main__":
  main()
