"""Train on 1, 2, 4 and 8 devices, and in two processes of 4, and end with the same bits.

The model, the data and the optimizer are those of train_lm.py. With `virtual_devices=8` a step cuts
its rows and adds up as on 8 devices, whatever number runs it. Each run is a process of its own, and
writes its parameters, optimizer state and losses to a file. The files are compared byte for byte.
Then the rows of a step arrive in 3 calls. One run is stopped after each call: orbax saves what 8
devices added up, 2 devices add the second call, and 8 the third.

Run:      python examples/same_bits.py
Expected: five runs of 3 steps end with the same bits, and so do both runs of the 3 calls. Without
          `virtual_devices`, 2 and 8 devices end with different bits. 1 to 3 minutes on 2 CPU cores,
          most of them for compiling.
"""

import argparse
import hashlib
import multiprocessing
import os
import pathlib
import socket
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np
import orbax.checkpoint as ocp
from train_lm import (
  batches,
  load_data,
  make_loss_fn,
  make_optimizer,
  Transformer,
)

import optax_accum

VIRTUAL = 8
STEPS = 3
CALLS = 3  # of a step whose rows arrive one call after the other
ROWS, LENGTH = 64, 64  # rows of a call, and bytes in a row
MICROBATCH = 4  # rows on each device, real or virtual
MODEL = Transformer(layers=2, width=128)
LIMIT = 240  # seconds that a process may take

# XLA has a thread for each core or each CPU device, whichever are more, and cuts large products of
# matrices by their number. By NPROC it counts as many cores in every process, on any machine.
os.environ["NPROC"] = "8"


def connect(devices, process=0, address=None):
  """Prepares this process, which is alone or one of two. Returns all devices as a mesh."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", devices)
  if address is not None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      address, 2, process, coordinator_bind_address=address
    )
  return Mesh(np.array(jax.devices()), ("data",))


def make(mesh, start, virtual):
  """A step, and the parameters and optimizer state to start from, on all devices."""
  tx = make_optimizer(STEPS)
  step = optax_accum.make_train_step(
    make_loss_fn(MODEL),
    tx,
    microbatch_size=MICROBATCH * (virtual or mesh.size),
    mesh=mesh,
    virtual_devices=virtual,
  )
  params = jax.device_put(start, NamedSharding(mesh, jax.P()))
  return step, params, tx.init(params)


def load(mesh, calls):
  """The rows of each call. Of these, a process loads its part."""
  tokens, _ = load_data()
  by_rows = NamedSharding(mesh, jax.P("data"))
  for rows in batches(tokens, ROWS, LENGTH, calls):
    own = np.split(rows, jax.process_count())[jax.process_index()]
    yield jax.make_array_from_process_local_data(by_rows, own)


def train(file, start, virtual, devices, process=0, address=None):
  """Takes all steps, and writes what they end with to the file."""
  mesh = connect(devices, process, address)
  step, params, opt_state = make(mesh, start, virtual)
  losses = []
  for batch in load(mesh, STEPS):
    params, opt_state, metrics = step(params, opt_state, batch)
    losses.append(metrics["loss"])
  if process == 0:
    write(file, (params, opt_state, losses))
  if address is not None:
    jax.distributed.shutdown()  # waits for the other process


def add_up(file, start, devices, first, last):
  """Adds up the calls from `first` to `last`, from one checkpoint to the next."""
  mesh = connect(devices)
  step, params, opt_state = make(mesh, start, VIRTUAL)
  data = list(load(mesh, CALLS))
  cycle = step.begin(params)
  with ocp.StandardCheckpointer() as checkpointer:
    if first > 0:
      cycle = step.add.eval_shape(cycle, params, data[0])
      held = params, opt_state, cycle
      params, opt_state, cycle = checkpointer.restore(saved(file, first), held)
    for batch in data[first:last]:
      cycle = step.add(cycle, params, batch)
    if last < CALLS:
      checkpointer.save(saved(file, last), (params, opt_state, cycle))
      return
  write(file, step.finish(params, opt_state, cycle))


def saved(file, calls):
  """The checkpoint after so many calls."""
  return file.with_name(f"{file.name}_after_{calls}")


def write(file, tree):
  arrays = jax.device_get(jax.tree.leaves(tree))
  file.write_bytes(b"".join(x.tobytes() for x in arrays))


def run(function, *calls):
  """Runs the function in as many processes at a time as there are calls: tuples of arguments."""
  # The server has imported this file, and starts each process as a copy of itself.
  server = multiprocessing.get_context("forkserver")
  processes = [
    server.Process(target=function, args=args, daemon=True) for args in calls
  ]
  for process in processes:
    process.start()
  for process in processes:
    process.join(LIMIT)
    assert process.exitcode == 0, process.exitcode


def free_address():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def files_of(title, files):
  """Prints a hash of each file, by what ran, and returns their bytes."""
  print(title)
  found = [file.read_bytes() for file in files]
  for file, data in zip(files, found, strict=True):
    print(
      f"  {file.name:<32}{hashlib.sha256(data).hexdigest()[:16]}", flush=True
    )
  return found


def main() -> None:
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  jax.config.update("jax_platforms", "cpu")
  tokens = jnp.zeros((1, LENGTH), jnp.int32)
  start = jax.jit(MODEL.init)(jax.random.key(0), tokens)["params"]
  start = jax.device_get(start)
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)

    files = {n: folder / f"{n} devices" for n in (1, 2, 4, 8)}
    alone = [(file, start, VIRTUAL, n) for n, file in files.items()]
    both, address = folder / "2 processes of 4 devices", free_address()
    pair = [(both, start, VIRTUAL, 4, i, address) for i in (0, 1)]
    run(train, *alone, *pair)
    title = f"{STEPS} steps, virtual_devices={VIRTUAL}"
    same = files_of(title, [*files.values(), both])

    at_once, moved = folder / "on 8 devices", folder / "on 8, then 2, then 8"
    run(add_up, (at_once, start, 8, 0, CALLS), (moved, start, 8, 0, 1))
    run(add_up, (moved, start, 2, 1, 2))
    run(add_up, (moved, start, 8, 2, CALLS))
    title = f"a step of {CALLS} calls, virtual_devices={VIRTUAL}"
    in_calls = files_of(title, [at_once, moved])

    files = {n: folder / f"{n} devices, plain" for n in (2, 8)}
    run(train, *((file, start, None, n) for n, file in files.items()))
    title = f"{STEPS} steps, without virtual_devices"
    plain = files_of(title, list(files.values()))

  assert len(set(same)) == 1
  assert len(set(in_calls)) == 1
  assert len(set(plain)) == 2
  print(f"the same bits, in files of {len(same[0]):,} bytes")


if __name__ == "__main__":
  main()
