"""Kill a training process in the middle of a cycle, restart it, and end with the same bits.

A cycle is the microbatches between two optimizer steps. The model is a small byte-level language
model with dropout, on the data of train_lm.py. It is trained in two ways: on microbatches that
arrive one by one (`accumulate`), and on whole cycles (`make_train_step`). Orbax saves after every
call, in the background. The process is killed (SIGKILL) in every microbatch of a cycle, each time
while a checkpoint is being written. It resumes from the last complete checkpoint. Rows and random
keys are derived from the number of the call, so nothing else needs to be saved.

Run:      python examples/resume.py [--devices 1]
Expected: in both ways, parameters, optimizer state, losses, rows and keys equal those of an
          uninterrupted run to the bit. Nothing is left behind. 40 seconds on 2 CPU cores.
"""

import argparse
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
from pydoc_data import topics
import shutil
import signal
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import optax_accum

# bytes that the model sees, features, rows of a microbatch
LENGTH, WIDTH, ROWS = (
  16,
  32,
  16,
)
LIMIT = 240  # seconds that a process may take
TEXT = np.frombuffer(
  "\n\n".join(topics.topics.values()).encode(), np.uint8
).astype(np.int32)


def init_params():
  rng = np.random.default_rng(0)
  shapes = {
    "embed": (256, WIDTH),
    "hidden": (LENGTH * WIDTH, 64),
    "out": (64, 256),
  }
  return {
    k: rng.normal(0, 0.05, s).astype(np.float32) for k, s in shapes.items()
  }


def loss_fn(on_start, params, windows, key):
  jax.debug.callback(on_start)  # each device calls it in each microbatch
  seen = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
  hidden = jnp.tanh(seen @ params["hidden"])
  kept = jax.random.bernoulli(key, 0.9, hidden.shape)
  logits = jnp.where(kept, hidden, 0) @ params["out"]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, windows[:, -1]
  ).mean()


def make_step(way, loss_fn, cycle, mesh):
  """``init(params)``, and ``step(params, state, windows, key) -> (params, state, metrics)``."""
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
  if way == "whole-cycle":
    return optimizer.init, optax_accum.make_train_step(
      loss_fn, optimizer, num_microbatches=cycle, rng_argnums=2, mesh=mesh
    )
  axis = None if mesh is None else "data"
  tx = optax_accum.accumulate(optimizer, cycle, axis_name=axis)

  def step(params, state, windows, key):
    local = params
    if axis:  # each device has its own gradients and noise
      local = jax.lax.pcast(params, axis, to="varying")
      key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    loss, grads = jax.value_and_grad(loss_fn)(local, windows, key)
    params, state = tx.apply(grads, state, params)
    return params, state, {"loss": jax.lax.pmean(loss, axis) if axis else loss}

  init = tx.init
  if axis:
    specs = optax_accum.accumulate_specs(
      jax.eval_shape(init, init_params()), axis
    )
    init = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs)
    given, returned = (P(), specs, P(axis), P()), (P(), specs, P())
    step = jax.shard_map(step, mesh=mesh, in_specs=given, out_specs=returned)
  return init, jax.jit(step, donate_argnums=(0, 1))


def checksums(folder):
  files = sorted(path for path in folder.rglob("*") if path.is_file())
  return {
    str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
    for p in files
  }


def seal(folder, number):
  """Marks a checkpoint as complete, by an atomic write of the checksums of its files."""
  draft = folder / "draft"
  draft.write_text(json.dumps(checksums(folder / str(number))))
  os.replace(draft, folder / f"{number}.json")
  remove_all_but(number, folder)


def remove_all_but(number, folder):
  for path in folder.iterdir():
    if path.name not in (str(number), f"{number}.json"):
      shutil.rmtree(path) if path.is_dir() else path.unlink()


def last_sealed(folder):
  return max((int(path.stem) for path in folder.glob("*.json")), default=0)


def check_shapes(stored, like):
  """Raises an error that names the first leaf of a different shape. Orbax names only the shapes."""
  shapes = {x.name: x.shape for x in jax.tree.leaves(stored)}
  for keys, x in jax.tree.leaves_with_path(like):
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    if shapes.get(name, x.shape) != x.shape:
      raise ValueError(
        f"{name} has shape {shapes[name]} in the checkpoint, and here {x.shape}."
      )


def load(folder, number, like):
  """Loads a checkpoint in the types and shardings of `like`. Rejects it if any byte differs."""
  try:
    sealed = json.loads((folder / f"{number}.json").read_text())
  except ValueError:
    sealed = None
  if sealed != checksums(folder / str(number)):
    raise ValueError(
      f"{folder / str(number)} is not what was saved, so it is not used: delete it."
    )
  with ocp.StandardCheckpointer() as checkpointer:
    check_shapes(
      checkpointer.metadata(folder / str(number)).item_metadata.tree, like
    )
    return checkpointer.restore(folder / str(number), like)


def train(way, devices, steps, cycle, folder, killed_in=None):
  """Trains from the last complete checkpoint to the end, or to the microbatch `killed_in`."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  folder.mkdir(exist_ok=True)
  calls, rows = (
    (steps * cycle, ROWS) if way == "streaming" else (steps, ROWS * cycle)
  )
  begin = last_sealed(folder)
  remove_all_but(begin, folder)
  started = itertools.count(begin * devices * steps * cycle // calls)

  def on_start():
    if next(started) // devices == killed_in:
      os.kill(os.getpid(), signal.SIGKILL)

  mesh = (
    jax.sharding.Mesh(jax.devices()[:devices], ("data",))
    if devices > 1
    else None
  )
  init, step = make_step(way, functools.partial(loss_fn, on_start), cycle, mesh)
  everywhere = (
    jax.devices()[0] if mesh is None else jax.sharding.NamedSharding(mesh, P())
  )
  params = jax.device_put(init_params(), everywhere)
  records = {  # to compare two runs
    "losses": np.zeros(calls, np.float32),
    "rows": np.zeros((calls, rows), np.int32),
    "keys": np.zeros((calls, 2), np.uint32),
  }
  held = {"params": params, "state": jax.jit(init)(params), "records": records}
  if begin:
    held = load(
      folder, begin, jax.tree.map(ocp.utils.to_shape_dtype_struct, held)
    )

  params, state, records = held["params"], held["state"], held["records"]
  with ocp.StandardCheckpointer() as checkpointer:
    for number in range(begin, calls):
      starts = np.random.default_rng(number).integers(
        len(TEXT) - LENGTH, size=rows
      )
      windows = TEXT[starts[:, None] + np.arange(LENGTH + 1)]
      key = jax.random.fold_in(jax.random.key(0), number)
      params, state, metrics = step(params, state, windows, key)
      loss = float(metrics["loss"])
      if number > begin:  # the previous checkpoint was written during this step
        checkpointer.wait_until_finished()
        seal(folder, number)
      records["losses"][number], records["rows"][number] = loss, starts
      records["keys"][number] = jax.random.key_data(key)
      # Host arrays are written faster. With several processes, orbax needs the arrays themselves.
      held = jax.device_get(
        {"params": params, "state": state, "records": records}
      )
      checkpointer.save(folder / str(number + 1), held)
  if begin < calls:
    seal(folder, calls)
  return held


def same_bits(a, b):
  pairs = zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True)
  return all(
    x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs
  )


def kill_and_resume(way, args, folder):
  """Trains in this process and in processes that are killed, and compares the results."""
  settings = way, args.devices, args.steps, args.cycle
  expected = train(*settings, folder / "unharmed")
  # The server has imported this file, and starts each process as a copy of itself.
  server = multiprocessing.get_context("forkserver")
  first = args.steps // 2 * args.cycle
  for killed_in in [*range(first, first + args.cycle), None]:
    begin = last_sealed(folder / "killed")
    process = server.Process(
      target=train, args=(*settings, folder / "killed", killed_in)
    )
    process.daemon = True
    process.start()
    process.join(LIMIT)
    assert process.exitcode == (0 if killed_in is None else -signal.SIGKILL), (
      process.exitcode
    )
    end = (
      "done"
      if killed_in is None
      else f"killed in microbatch {killed_in % args.cycle + 1}"
    )
    print(f"{way}, from call {begin} on: {end}", flush=True)

  actual = train(*settings, folder / "killed")  # has only to load the result
  for name, tree in expected.items():
    assert same_bits(actual[name], tree), f"{name} differ"
  losses = expected["records"]["losses"]
  # different rows and a different key in every call
  assert len(set(losses)) == len(losses)
  print(
    f"{way}: the same bits, {len(losses)} losses from {losses[0]:.4f} to {losses[-1]:.4f}"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  flag = parser.add_argument
  flag(
    "--devices",
    type=int,
    default=8,
    choices=[1, 2, 4, 8],
    help="CPU devices (default: 8)",
  )
  for name, what in [
    ("--steps", "optimizer steps"),
    ("--cycle", "microbatches of each"),
  ]:
    flag(
      name,
      type=int,
      default=4,
      metavar="N",
      help=f"{what}, 2 or more (default: 4)",
    )
  args = parser.parse_args()
  for name in ("steps", "cycle"):
    if getattr(args, name) < 2:
      parser.error(f"--{name} {getattr(args, name)} must be 2 or more")
  # removes the folder
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
  for way in ("streaming", "whole-cycle"):
    with tempfile.TemporaryDirectory() as folder:
      kill_and_resume(way, args, pathlib.Path(folder))


if __name__ == "__main__":
  main()
