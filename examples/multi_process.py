"""Train on several processes: each is a replica, whose devices hold the parameters in shards.

The data are handwritten digits: 128 rows per step on each device, in 16 microbatches of 8. Within a
process the devices exchange parameters and gradients in every microbatch, layer by layer. The
processes exchange the sum of the gradients once per step, each device that of its shard.

Run:      python examples/multi_process.py
          It starts and stops two processes on this machine, with 2 CPU devices each. On a cluster,
          run this on each host:
          python examples/multi_process.py --coordinator HOST0:PORT --num-processes N --process-id I
Expected: after 3 steps, the relative error of the updates is 3e-6 in every process, compared with
          one device that takes the whole batch. Without `mesh=` the compiler reduces between the
          processes in every microbatch, and sends 16 times as much between them. On one machine,
          whose memory they share, a step then takes 0.7 to 1.8 times as long; over a network, bytes
          cost time. Half a minute on 2 CPU cores.
"""

import argparse
import faulthandler
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_accum

MICROBATCHES = 16
ROWS = 128  # of a step, on each device
LAYERS, WIDTH = 4, 256
STEPS = 3
LIMIT = 240  # seconds that a process may take

AXES = ("replica", "fsdp")
SPECS = {
  "in": jax.P(None, "fsdp"),
  "layers": jax.P(None, None, "fsdp"),
  "out": jax.P("fsdp"),
}
SHAPES = {
  "in": (64, WIDTH),
  "layers": (LAYERS, WIDTH, WIDTH),
  "out": (WIDTH, 10),
}


def loss_fn(rows, params, batch):
  @jax.checkpoint
  def layer(x, weight):
    # The rows stay on their devices, so it is the weight of this layer that is gathered.
    x = jax.lax.with_sharding_constraint(x, rows)
    return x + jnp.tanh(x @ weight), None

  x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
  return optax.softmax_cross_entropy_with_integer_labels(
    x @ params["out"], batch["y"]
  ).mean()


def load(step: int, part: int, parts: int) -> dict[str, np.ndarray]:
  """One of the equal parts of a step's batch. In practice, read it from a file of this process."""
  digits = load_digits()
  drawn = np.random.default_rng(step).integers(
    len(digits.data), size=ROWS * jax.device_count()
  )
  rows = drawn.reshape(parts, -1)[part]
  return {
    "x": (digits.data[rows] / 16).astype(np.float32),
    "y": digits.target[rows],
  }


def mesh_of(devices, replicas: int) -> Mesh:
  return Mesh(
    np.reshape(devices, (replicas, -1)), AXES, axis_types=(AxisType.Auto,) * 2
  )


def between_processes(report, mesh: Mesh) -> list:
  """The collectives that reduce over several processes, without those of metrics."""
  # How XLA writes that the devices of each process exchange: they are a row of the mesh.
  rows, columns = mesh.devices.shape
  listed = np.arange(mesh.size).reshape(rows, columns).tolist()
  groups = str(listed).replace(" ", "").translate(str.maketrans("[]", "{}"))
  within = f"=[{rows},{columns}]<=[{mesh.size}],", f"={groups},"
  found = report.at_least(1024).operations
  return [c for c in found if not any(x in c.attributes for x in within)]


def train(process: int, processes: int) -> None:
  """What each process runs after it has connected to the others."""
  mesh = mesh_of(jax.devices(), processes)  # a row for each process
  by_rows = NamedSharding(mesh, jax.P(AXES))
  own = [load(step, process, processes) for step in range(STEPS)]
  data = jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(by_rows, x), own
  )
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  rng = np.random.default_rng(0)
  start = {
    k: rng.normal(0, s[-2] ** -0.5, s).astype(np.float32)
    for k, s in SHAPES.items()
  }

  def state_on(mesh):
    shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    params = jax.device_put(start, shardings)
    return params, tx.init(params)

  def run(step, mesh, data):
    state, norms, times = state_on(mesh), [], []
    for batch in data:
      began = time.perf_counter()
      *state, metrics = step(*state, batch)
      norms.append(float(metrics["grad_norm"]))
      times.append(time.perf_counter() - began)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, jax.P()))
    return jax.device_get(gather(state[0])), norms, np.median(times)

  # The same training on one device of this process, with the rows of all processes.
  alone = mesh_of(jax.local_devices()[:1], 1)
  make_step = functools.partial(
    optax_accum.make_train_step, tx=tx, data_axis="replica"
  )
  # With `mesh=` a loss has the rows of a replica. Without, it has those of all devices.
  own, every = (functools.partial(loss_fn, x) for x in (jax.P("fsdp"), by_rows))
  step = make_step(own, num_microbatches=1, mesh=alone)
  whole, whole_norms, _ = run(
    step, alone, [load(step, 0, 1) for step in range(STEPS)]
  )
  shard = sum(x.nbytes for x in start.values()) // mesh.shape["fsdp"]
  steps = {}
  for when, times, loss, options in (
    ("a step", 1, own, {"mesh": mesh}),
    ("a microbatch", MICROBATCHES, every, {}),
  ):
    step = make_step(loss, num_microbatches=MICROBATCHES, **options)
    steps[when] = step
    lowered = step.lower(*state_on(mesh), data[0])
    report = optax_accum.count_collectives(lowered.compile())
    if times == 1:
      (summed,) = between_processes(report, mesh)
      assert (summed.executions, summed.loop) == (1, None), summed
      # the loss goes with the gradients
      assert 0 <= summed.bytes - shard < 1024, summed
    else:
      assert report.inside["all-reduce"].bytes >= times * shard, report
    params, norms, _ = run(step, mesh, data)
    way, difference = (
      optax.tree.sub(whole, start),
      optax.tree.sub(params, whole),
    )
    relative = optax.tree.norm(difference) / optax.tree.norm(way)
    print(
      f"process {process}, reduced once {when}: relative error of the updates {relative:.1e}",
      flush=True,
    )
    # The first steps of AdamW have full size even where a gradient is only rounding noise. AdamW
    # and clipping hide a wrong scale of the gradients, so their norms are compared too.
    assert relative < 1000 * jnp.finfo(jnp.float32).eps, relative
    np.testing.assert_allclose(norms, whole_norms, rtol=1e-5)
  rounds = [
    [run(step, mesh, data)[2] for step in steps.values()] for _ in range(2)
  ]
  if process == 0:
    once, often = np.median(rounds, 0)
    ratio = np.median([b / a for a, b in rounds])
    print(
      f"seconds a step: {once:.3f}, and {often:.3f} without mesh=, {ratio:.1f} x"
    )


def launch() -> None:
  """Runs this file in two processes until both are done or one fails. Stops both at the end."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_COORDINATOR_BIND_ADDRESS": address,
  }
  command = [
    sys.executable,
    __file__,
    "--coordinator",
    address,
    "--num-processes",
    "2",
  ]
  # runs `finally`
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
  children, codes = [], [None]
  try:
    for i in "01":
      children.append(
        subprocess.Popen([*command, "--process-id", i], env=environment)
      )
    while None in codes and not any(codes):
      time.sleep(0.1)
      codes = [child.poll() for child in children]
  finally:
    for child in children:
      child.kill()
      child.wait()
  if any(codes):
    sys.exit(
      f"exit codes of the processes: {codes} (None: it was still running)"
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--coordinator", metavar="HOST0:PORT", help="of process 0"
  )
  parser.add_argument(
    "--num-processes", type=int, metavar="N", help="on all hosts together"
  )
  parser.add_argument(
    "--process-id", type=int, metavar="I", help="of this one: 0 to N - 1"
  )
  args = parser.parse_args()
  cluster = (args.coordinator, args.num_processes, args.process_id)
  if cluster == (None, None, None):
    return launch()
  if None in cluster:
    parser.error(
      "give all of --coordinator, --num-processes and --process-id, or none"
    )
  if not 0 <= args.process_id < args.num_processes:
    parser.error(
      f"--process-id {args.process_id} must be one of 0 to --num-processes - 1"
    )

  # ends a process that waits forever
  faulthandler.dump_traceback_later(LIMIT, exit=True)
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # so does Ctrl-C
  jax.config.update("jax_num_cpu_devices", 2)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # accelerators may round more
  jax.config.update("jax_default_matmul_precision", "highest")
  jax.distributed.initialize(*cluster, initialization_timeout=LIMIT)
  try:
    train(args.process_id, args.num_processes)
  except BaseException:
    traceback.print_exc()
    # a normal exit would wait for the other processes, which wait for this one
    os._exit(1)


if __name__ == "__main__":
  main()
