"""Add up microbatches as they arrive, on 8 devices that each hold an eighth of the model.

A generator packs documents (see packed_text.py) and yields 8 or 16 rows at a time. `step.add`
runs what arrived, and `step.finish` takes the optimizer step, so no one needs to know beforehand
how much will come. `add` sends parameters, but no gradient: each device has its own sums, which
`finish` scatters, once. The momentum, which only `finish` needs, waits in the host's memory. After a
call orbax saves all of it. A process is killed in the middle of a cycle (the calls of one optimizer
step), and another goes on from the last checkpoint.

Run:      python examples/as_they_arrive.py
Expected: the resumed run ends with the bits of one that was not interrupted. The step of a cycle is
          that of one call with all of its rows: the relative error is 3e-7. If all calls counted the
          same, it would be 0.04. 30 seconds on 2 CPU cores.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import pathlib
import signal
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
from packed_text import documents_of, init_params, lay_out, nats, pack
from train_lm import load_data

import optax_accum

CYCLES, CALLS = 3, 4  # CALLS: of a cycle
KILLED_AFTER = CALLS + 2  # calls
PACKED = argparse.Namespace(microbatch=8, length=64)  # rows, and bytes in one

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def arriving():
  """Batches of packed text, one after the other: each 1 or 2 microbatches."""
  documents = documents_of(load_data()[0], PACKED.length)
  counts = np.random.default_rng(1).integers(1, 3, CYCLES * CALLS)
  packings = pack(documents, counts, PACKED)
  for count, packing in zip(counts, packings, strict=True):
    yield lay_out(packing, count, PACKED, devices=8)


def loss_fn(params, batch):
  """The sum over bytes, and their number."""
  return jnp.sum(batch["weight"] * nats(params, batch)), batch["weight"].sum()


@functools.cache
def make():
  """A step, and parameters and moments, each of these sharded over its last dimension."""
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  # Adam would hide a wrong scale of the gradients.
  tx = optax_accum.state_on_host(optax.sgd(0.1, momentum=0.9))

  def sharded(x):
    over = P(*[None] * (x.ndim - 1), "data")
    return jax.device_put(x, NamedSharding(mesh, over))

  step = optax_accum.make_train_step(
    loss_fn, tx, microbatch_size=8, has_weight=True, mesh=mesh, donate=False
  )
  params = jax.tree.map(sharded, init_params(PACKED.length))
  return step, params, tx.init(params)


def train(folder, killed_after=None):
  """Trains from the last checkpoint on, and returns parameters, state and the last metrics."""
  step, params, opt_state = make()
  cycle = step.begin(params)
  done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
  with ocp.StandardCheckpointer() as checkpointer:
    for number, batch in enumerate(arriving(), start=1):
      if number == done:
        cycle = step.add.eval_shape(cycle, params, batch)
        held = params, opt_state, cycle
        params, opt_state, cycle = checkpointer.restore(
          folder / f"{number}", held
        )
      if number <= done:
        continue
      cycle = step.add(cycle, params, batch)
      if number % CALLS == 0:
        params, opt_state, metrics = step.finish(params, opt_state, cycle)
        print(f"call {number}: a step, loss {metrics['loss']:.4f}", flush=True)
        cycle = step.begin(params)
        continue
      checkpointer.save(folder / f"{number}", (params, opt_state, cycle))
      checkpointer.wait_until_finished()
      if number == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)
  return params, opt_state, metrics


def check_first_cycle():
  """Compares a cycle with one call of its rows, and with the mean of the calls' own steps."""
  step, params, opt_state = make()
  calls = list(itertools.islice(arriving(), CALLS))
  cycle, alone = step.begin(params), []
  for batch in calls:
    cycle = step.add(cycle, params, batch)
    only = step.add(step.begin(params), params, batch)
    alone.append(step.finish(params, opt_state, only)[0])
  batch = jax.tree.map(lambda *parts: np.concatenate(parts), *calls)
  exact, *_ = step(params, opt_state, batch)
  found, *_ = step.finish(params, opt_state, cycle)
  params, exact, found, alone = jax.device_get((params, exact, found, alone))
  wrong = jax.tree.map(lambda *each: sum(each) / CALLS, *alone)
  error, of_calls, size = (
    float(optax.tree.norm(optax.tree.sub(exact, x)))
    for x in (found, wrong, params)
  )
  print(f"relative error of a step: {error / size:.0e}")
  print(f"if all calls counted the same: {of_calls / size:.0e}\n")
  assert 1000 * error < of_calls


def check_sent():
  """Reads what `add` and `finish` send, in their compiled programs."""
  step, params, opt_state = make()
  batch = next(arriving())
  cycle = step.add.eval_shape(step.begin(params), params, batch)
  programs = {
    "add": step.add.lower(cycle, params, batch),
    "finish": step.finish.lower(params, opt_state, cycle),
  }
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  for name, wanted in ("add", "all-gather"), ("finish", "reduce-scatter"):
    report = optax_accum.count_collectives(programs[name].compile())
    large = report.at_least(1024).operations
    print(f"{name} sends, of {size:,} bytes of parameters:\n{report}\n")
    assert {(x.kind, x.executions) for x in large} == {(wanted, 1)}
    assert sum(x.bytes for x in large) == size


def main() -> None:
  check_sent()
  check_first_cycle()
  with tempfile.TemporaryDirectory() as name:
    unharmed, killed = (
      pathlib.Path(name, "unharmed"),
      pathlib.Path(name, "killed"),
    )
    expected = train(unharmed)
    process = multiprocessing.get_context("spawn").Process(
      target=train, args=(killed, KILLED_AFTER)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, process.exitcode
    print(
      f"killed after call {KILLED_AFTER}, {KILLED_AFTER % CALLS} of {CALLS} in its cycle"
    )
    found = train(killed)
  pairs = zip(
    *map(jax.tree.leaves, jax.device_get((found, expected))), strict=True
  )
  assert all(a.tobytes() == b.tobytes() for a, b in pairs)
  print("resumed: the same bits")


if __name__ == "__main__":
  main()
