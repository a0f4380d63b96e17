"""A user's training file: every public name of optax_accum, annotated for `mypy --strict`.

python user_ok.py          # trains on made up data, on the CPU or whatever is there
mypy --strict user_ok.py
pyright user_ok.py
"""

from typing import Any, assert_type, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from optax_accum import (
  accumulate,
  accumulate_specs,
  AccumulateState,
  AccumulateTransformation,
  check_split,
  CollectiveReport,
  count_collectives,
  has_updated,
  make_train_step,
  microbatch,
  microbatch_value_and_grad,
  MicrobatchStats,
  SplitReport,
  TrainStep,
)
from optax_accum.flax import linen_train_step, nnx_train_step

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]

ROWS, FEATURES, CLASSES = 64, 12, 4
# JAX (to 0.10 at least) does not annotate the constructor of PartitionSpec.
ALL, BY_ROWS = P(), P("data")  # type: ignore[no-untyped-call]


def init_params(key: jax.Array) -> Params:
  return {"w": 0.1 * jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}


def make_batch(key: jax.Array, rows: int = ROWS) -> Batch:
  x = jax.random.normal(key, (rows, FEATURES))
  return {"x": x, "label": jnp.argmax(x[:, :CLASSES], axis=-1), "mask": jnp.ones(rows)}


def predict(params: Params, batch: Batch) -> jax.Array:
  return batch["x"] @ params["w"] + params["b"]


def loss_fn(params: Params, batch: Batch) -> jax.Array:
  logits = jax.nn.log_softmax(predict(params, batch))
  each = -jnp.take_along_axis(logits, batch["label"][:, None], axis=-1)[:, 0]
  return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])


def loss_and_logits(params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
  logits = predict(params, batch)
  correct = jnp.sum(jnp.argmax(logits, axis=-1) == batch["label"])
  return loss_fn(params, batch), {"logits": logits, "correct": correct}


def noisy_loss(params: Params, batch: Batch, key: jax.Array, *, rate: float = 0.1) -> jax.Array:
  keep = jax.random.bernoulli(key, 1 - rate, batch["x"].shape)
  return loss_fn(params, {**batch, "x": jnp.where(keep, batch["x"], 0.0)})


def loss_with_statistics(
  params: Params, batch: Batch, mean: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
  loss = loss_fn(params, {**batch, "x": batch["x"] - mean})
  return loss, (0.9 * mean + 0.1 * jnp.mean(batch["x"], axis=0), {"loss": loss})


def valid_tokens(batch: Batch) -> jax.Array:
  return jnp.sum(batch["mask"])


def train(params: Params, batch: Batch) -> Params:
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
  step = make_train_step(loss_fn, tx, num_microbatches=8, weight_fn=valid_tokens)
  opt_state = tx.init(params)

  # Memory before anything runs, from shapes alone.
  shapes = jax.eval_shape(lambda: (params, opt_state, batch))
  compiled = step.lower(*shapes).compile()
  report = count_collectives(compiled)
  assert_type(report, CollectiveReport)
  report.assert_once_per_cycle(nbytes=4096)
  reductions = report.inside.get("all-reduce") or report.at_cycle_end.get("all-reduce")
  print(report, reductions.bytes if reductions else 0, compiled.memory_analysis())
  step.trace(params, opt_state, batch)
  step.eval_shape(params, opt_state, batch)

  for _ in range(3):
    params, opt_state, metrics = step(params, opt_state, batch)
    print(f"loss {float(metrics['loss']):.4f}, skipped {int(metrics['skipped_microbatches'])}")
  cycle, other = (step.add(step.begin(params), params, batch) for _ in range(2))
  params, opt_state, metrics = step.finish(params, opt_state, step.merge(cycle, other))
  stepped = step(params, opt_state, batch)
  assert_type(stepped[0], Params)
  return stepped[0]


def splits_well(params: Params, batch: Batch) -> bool:
  report = check_split(loss_fn, params, batch, weight_fn=valid_tokens)
  assert_type(report, SplitReport)
  print(report, report.verdict, [leaf.name for leaf in report.leaves if not leaf.agrees])
  return report.ok


def build_step(tx: optax.GradientTransformation) -> TrainStep[Params, [Batch]]:
  """A step that is passed on keeps what it can be called with."""
  return make_train_step(
    loss_and_logits,
    tx,
    has_aux=True,
    microbatch_size=20,
    aux_reduction={"logits": "concat", "correct": "sum"},
    skip_nonfinite=True,
    weight_fn=valid_tokens,
    donate=False,
  )


def run(step: TrainStep, params: Params, opt_state: optax.OptState, batch: Batch) -> Params:
  """A step of whatever parameters and arguments."""
  params, opt_state, metrics = step(params, opt_state, batch)
  print(metrics["loss"])
  return params


def train_with_noise(params: Params, batch: Batch, key: jax.Array) -> Params:
  tx = optax.sgd(0.1)
  step = make_train_step(noisy_loss, tx, num_microbatches=4, rng_argnums=2)
  params, _, metrics = step(params, tx.init(params), batch, key)
  step = make_train_step(
    noisy_loss, tx, num_microbatches=4, batch_argnums=(1,), rng_argnums=("key",)
  )
  params, _, metrics = step(params, tx.init(params), batch, key=key, rate=0.2)
  loss: jax.Array = metrics["loss"]
  print(f"with noise {float(loss):.4f}")
  return params


def train_with_statistics(params: Params, batch: Batch) -> Params:
  tx, mean = optax.sgd(0.1), jnp.zeros(FEATURES)
  step = make_train_step(loss_with_statistics, tx, num_microbatches=4, carry_argnum=2)
  opt_state = tx.init(params)
  params, opt_state, mean, metrics = step(params, opt_state, batch, mean)
  print(f"with statistics {float(metrics['loss']):.4f}, mean {mean.shape}")
  return params


def steps_of_flax() -> None:
  def flax_loss(*args: Any) -> jax.Array:
    return jnp.zeros(())

  linen_train_step(
    flax_loss,
    num_microbatches=8,
    weight_fn=valid_tokens,
    aux_reduction={"logits": "concat"},
    has_aux=True,
    mesh=jax.make_mesh((jax.device_count(),), ("data",)),
  )
  nnx_train_step(flax_loss, microbatch_size=8, donate=False)


def train_on_a_mesh(params: Params, batch: Batch) -> Params:
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  tx = optax.sgd(0.1)
  step = make_train_step(
    loss_fn,
    tx,
    num_microbatches=2,
    mesh=mesh,
    data_axis=("data",),
    donate=False,
  )
  sharded, _, metrics = step(params, tx.init(params), batch=batch)
  print(f"on {jax.device_count()} devices {float(metrics['loss']):.4f}")
  return sharded


def gradients(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
  value_and_grad = microbatch_value_and_grad(loss_fn, num_microbatches=8)
  loss, grads = value_and_grad(params, batch)
  return loss, grads


def gradients_and_skips(params: Params, batch: Batch) -> tuple[Params, MicrobatchStats]:
  careful = microbatch_value_and_grad(
    loss_and_logits, has_aux=True, num_microbatches=8, aux_reduction="last", skip_nonfinite=True
  )
  (loss, aux), grads, stats = careful(params, batch)
  print(f"loss {float(loss):.4f}, {sorted(aux)}, skipped {int(stats.skipped_microbatches)}")
  return grads, stats


def evaluate(params: Params, batch: Batch) -> dict[str, jax.Array]:
  def outputs(params: Params, batch: Batch) -> dict[str, jax.Array]:
    return {"loss": loss_fn(params, batch), "logits": predict(params, batch)}

  in_parts = microbatch(
    outputs, reduction={"loss": "mean", "logits": "concat"}, batch_argnums=1, microbatch_size=24
  )
  out = in_parts(params, batch)
  assert_type(out, dict[str, jax.Array])
  encode = microbatch(predict, reduction="concat", batch_argnums=1, num_microbatches=4)
  by_name = microbatch(predict, reduction="concat", batch_argnums="batch", num_microbatches=4)
  assert_type(by_name(params, batch=batch), jax.Array)
  assert_type(encode(params, batch), jax.Array)
  assert_type(encode(params, batch=batch), jax.Array)
  return out


def stream(params: Params, batches: list[Batch]) -> Params:
  tx = accumulate(optax.adamw(1e-2), every_k=4, reduction="mean", skip_fn=optax.skip_not_finite)
  assert_type(tx, AccumulateTransformation)
  state = tx.init(params)
  for i, batch in enumerate(batches):
    grads: Params = jax.grad(loss_fn)(params, batch)
    last = i == len(batches) - 1
    applied = tx.apply(grads, state, params, weight=valid_tokens(batch), flush=last)
    assert_type(applied, tuple[Params, AccumulateState])
    params, state = applied
    assert_type(has_updated(state), jax.Array)
    print(f"mini step {int(state.mini_step)}, updated {bool(has_updated(state))}")
  return params


def stream_in_a_chain(params: Params, batch: Batch) -> Params:
  tx = optax.chain(accumulate(optax.sgd(0.1), every_k=2), optax.scale(1.0))
  state = tx.init(params)
  grads = jax.grad(loss_fn)(params, batch)
  updates, state = tx.update(grads, state, params)
  assert_type(has_updated(state), jax.Array)
  return cast(Params, optax.apply_updates(params, updates))  # for pyright: optax forgets the type


def stream_over_devices(params: Params, batch: Batch) -> Params:
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  tx = accumulate(optax.sgd(0.1), every_k=2, axis_name="data")
  specs: Any = accumulate_specs(jax.eval_shape(tx.init, params), "data")

  def local_step(
    params: Params, state: AccumulateState, batch: Batch
  ) -> tuple[Params, AccumulateState]:
    grads = jax.grad(loss_fn)(jax.lax.pcast(params, "data", to="varying"), batch)
    return tx.apply(grads, state, params, weight=valid_tokens(batch))

  init = jax.shard_map(tx.init, mesh=mesh, in_specs=ALL, out_specs=specs)
  step = jax.jit(
    jax.shard_map(local_step, mesh=mesh, in_specs=(ALL, specs, BY_ROWS), out_specs=(ALL, specs))
  )
  state = init(params)
  for _ in range(2):
    params, state = step(params, state, batch)
  return params


def main() -> None:
  params = init_params(jax.random.key(0))
  batch = make_batch(jax.random.key(1))
  batches = [make_batch(jax.random.key(i), 8) for i in range(6)]

  assert splits_well(params, make_batch(jax.random.key(2), 8))
  params = train(params, batch)
  tx = optax.sgd(0.1)
  out = build_step(tx)(params, tx.init(params), batch)
  assert_type(out[0], Params)
  params = train_with_noise(out[0], batch, jax.random.key(2))
  params = train_with_statistics(params, batch)
  steps_of_flax()
  print(train_on_a_mesh(params, batch)["w"].sharding)
  print(gradients(params, batch)[0], gradients_and_skips(params, batch)[1])
  print(stream_over_devices(stream_in_a_chain(params, batch), batch)["b"])
  params = stream(params, batches)
  print({name: x.shape for name, x in evaluate(params, batch).items()})


if __name__ == "__main__":
  main()
