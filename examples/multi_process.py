"""Train on several processes: each loads its own rows, and gradients are reduced once per step.

The data are handwritten digits: 128 rows per step on each device, in 16 microbatches of 8. The
processes exchange one sum of the gradients per step. Reducing in every microbatch would need 16.

Run:      python examples/multi_process.py
          It starts and stops two processes on this machine, with 2 CPU devices each. On a cluster,
          run this on each host:
          python examples/multi_process.py --coordinator HOST0:PORT --num-processes N --process-id I
Expected: after 3 steps, the relative error of the updates is 1e-6 in every process, compared with
          one process that takes the whole batch. A step that reduces in every microbatch takes 3 to
          5 times as long. 15 seconds on 2 CPU cores.
"""

import argparse
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_accum

MICROBATCHES = 16
ROWS = 128  # of a step, on each device
WIDTH = 4096
STEPS = 3
LIMIT = 240  # seconds that a process may take


def loss_fn(params, batch):
  logits = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def load(step: int, part: int, parts: int) -> dict[str, np.ndarray]:
  """One of the equal parts of a step's batch. In practice, read it from a file of this process."""
  digits = load_digits()
  drawn = np.random.default_rng(step).integers(len(digits.data), size=ROWS * jax.device_count())
  rows = drawn.reshape(parts, -1)[part]
  return {"x": (digits.data[rows] / 16).astype(np.float32), "y": digits.target[rows]}


def train(process: int, processes: int) -> None:
  """What each process runs after it has connected to the others."""
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))  # the devices of all processes
  by_rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
  own = [load(step, process, processes) for step in range(STEPS)]
  data = jax.tree.map(lambda x: jax.make_array_from_process_local_data(by_rows, x), own)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  rng = np.random.default_rng(0)
  shapes = {"hidden": (64, WIDTH), "out": (WIDTH, 10)}
  start = {k: rng.normal(0, s[0] ** -0.5, s).astype(np.float32) for k, s in shapes.items()}

  def run(step, data):
    state, norms, times = (start, tx.init(start)), [], []
    for batch in data:
      began = time.perf_counter()
      *state, metrics = step(*state, batch)
      norms.append(float(metrics["grad_norm"]))
      times.append(time.perf_counter() - began)
    return jax.device_get(state[0]), norms, np.median(times)

  # The same training in this process alone, with the rows of all processes.
  step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1)
  whole, whole_norms, _ = run(step, [load(step, 0, 1) for step in range(STEPS)])
  seconds = []
  for when in ("per_cycle", "per_microbatch"):
    step = optax_accum.make_train_step(
      loss_fn, tx, num_microbatches=MICROBATCHES, mesh=mesh, reduce_gradients=when
    )
    params, norms, _ = run(step, data)
    way, difference = optax.tree.sub(whole, start), optax.tree.sub(params, whole)
    relative = optax.tree.norm(difference) / optax.tree.norm(way)
    print(f"process {process}, {when}: relative error of the updates {relative:.1e}", flush=True)
    # The first steps of AdamW have full size even where a gradient is only rounding noise. AdamW
    # and clipping hide a wrong scale of the gradients, so their norms are compared too.
    assert relative < 1000 * jnp.finfo(jnp.float32).eps, relative
    np.testing.assert_allclose(norms, whole_norms, rtol=1e-5)
    seconds.append(run(step, data * 4)[2])
  if process == 0:
    once, every = seconds
    print(f"seconds a step: {once:.3f} per_cycle, {every:.3f} per_microbatch, {every / once:.1f} x")


def launch() -> None:
  """Runs this file in two processes until both are done or one fails. Stops both at the end."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_BIND_ADDRESS": address}
  command = [sys.executable, __file__, "--coordinator", address, "--num-processes", "2"]
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs `finally`
  children, codes = [], [None]
  try:
    for i in "01":
      children.append(subprocess.Popen([*command, "--process-id", i], env=environment))
    while None in codes and not any(codes):
      time.sleep(0.1)
      codes = [child.poll() for child in children]
  finally:
    for child in children:
      child.kill()
      child.wait()
  if any(codes):
    sys.exit(f"exit codes of the processes: {codes} (None: it was still running)")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--coordinator", metavar="HOST0:PORT", help="of process 0")
  parser.add_argument("--num-processes", type=int, metavar="N", help="on all hosts together")
  parser.add_argument("--process-id", type=int, metavar="I", help="of this one: 0 to N - 1")
  args = parser.parse_args()
  cluster = (args.coordinator, args.num_processes, args.process_id)
  if cluster == (None, None, None):
    return launch()
  if None in cluster:
    parser.error("give all of --coordinator, --num-processes and --process-id, or none")
  if not 0 <= args.process_id < args.num_processes:
    parser.error(f"--process-id {args.process_id} must be one of 0 to --num-processes - 1")

  faulthandler.dump_traceback_later(LIMIT, exit=True)  # ends a process that waits forever
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # so does Ctrl-C
  jax.config.update("jax_num_cpu_devices", 2)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_default_matmul_precision", "highest")  # accelerators may round more
  jax.distributed.initialize(*cluster, initialization_timeout=LIMIT)
  try:
    train(args.process_id, args.num_processes)
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # a normal exit would wait for the other processes, which wait for this one


if __name__ == "__main__":
  main()
