"""What a call of a step takes on the host: ours beside the same function jitted, and by hand.

    python benchmarks/host_time.py [--arrays 50 500 2000] [--layers 250] [--rounds 60]
        [--save]

Arrays of two or four numbers, Adam, one microbatch: next to no arithmetic, so the time is that of
JAX's and flax's Python. A call is timed until it returns, not until it is computed.

The first table calls `make_train_step`'s step, and the very function that it has jitted, with the
same arguments, on one device and over a mesh of 8 (of CPUs, where there are no others). Every ratio
is taken twice, in a process each, by which of the two ran first. The second table has the same
steps written by hand; --layers 0 leaves it out. The two of a row take turns. In the first table
times are those of the fastest tenth, which tells more on a machine with other work; in the second
they are medians. A median ratio is that within a round.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

from flax import linen, nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import measure
import numpy as np
import optax
import paths  # noqa: F401
import results

import optax_accum
from optax_accum.flax import linen_train_step, nnx_train_step

WIDTH = 2


class Linen(linen.Module):
  layers: int

  @linen.compact
  def __call__(self, x):
    for _ in range(self.layers):
      x = x + 0.01 * linen.Dense(WIDTH)(x)
    return x


class Nnx(nnx.Module):
  def __init__(self, layers, rngs):
    self.layers = nnx.List(
      [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)]
    )

  def __call__(self, x):
    for layer in self.layers:
      x = x + 0.01 * layer(x)
    return x


def mean_square(y):
  return jnp.mean(y**2)


def stepping(step, *held):
  """A call that steps what the last one returned, and returns what it computed."""
  box = [jax.tree.map(jnp.copy, held)]

  def call():
    *box[0], out = step(*box[0])
    return out

  return call


def of_its_jitted(arrays, devices):
  """A step, and the function that it has jitted. Each gets another batch in every call."""
  mesh = jax.make_mesh((devices,), ("data",)) if devices > 1 else None

  def place(x, *spec):
    return jax.device_put(x, mesh and NamedSharding(mesh, P(*spec)))

  pair = {"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}
  params, tx = (
    place({f"layer_{i}": pair for i in range(arrays // 2)}),
    optax.adam(1e-3),
  )
  held = params, place(tx.init(params))
  batches = itertools.cycle(
    [place(jnp.full((8, WIDTH), float(i)), "data") for i in range(2)]
  )

  def loss_fn(params, x):
    return jnp.mean(x) * sum(map(jnp.sum, jax.tree.leaves(params)))

  ours = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1, mesh=mesh)
  jitted = ours._program.prepare(
    (*jax.tree.map(jnp.copy, held), next(batches)), {}
  ).jitted
  return [
    stepping(lambda *held, f=f: f(*held, next(batches)), *held)
    for f in (jitted, ours)
  ]


def of_parameters(layers, x):
  model, tx = Linen(layers), optax.adam(1e-3)
  params = model.init(jax.random.key(0), x)["params"]
  loss_fn = lambda params, x: mean_square(model.apply({"params": params}, x))  # noqa: E731

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def by_hand(params, opt_state):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  ours = optax_accum.make_train_step(loss_fn, tx, num_microbatches=1)
  held = params, tx.init(params)
  return stepping(by_hand, *held), stepping(lambda *held: ours(*held, x), *held)


def of_train_state(layers, x):
  model = Linen(layers)
  params = model.init(jax.random.key(0), x)["params"]
  state = train_state.TrainState.create(
    apply_fn=model.apply, params=params, tx=optax.adam(1e-3)
  )

  def loss_fn(variables, x, rngs=None):
    return mean_square(model.apply(variables, x))

  @functools.partial(jax.jit, donate_argnums=0)
  def by_hand(state):
    loss, grads = jax.value_and_grad(
      lambda params: loss_fn({"params": params}, x)
    )(state.params)
    return state.apply_gradients(grads=grads), loss

  ours = linen_train_step(loss_fn, num_microbatches=1)
  return stepping(by_hand, state), stepping(lambda state: ours(state, x), state)


def of_nnx(layers, x):
  loss_fn = lambda model, x: mean_square(model(x))  # noqa: E731

  @nnx.jit
  def by_hand(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss

  def held():
    model = Nnx(layers, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), x

  ours = nnx_train_step(loss_fn, num_microbatches=1)
  return functools.partial(by_hand, *held()), functools.partial(ours, *held())


def host_ms(calls, rounds):
  """Milliseconds until every call returned, in every round."""
  times = {name: [] for name in calls}
  for i in range(rounds + 3):
    for name in list(calls)[:: 1 if i % 2 else -1]:
      start = time.perf_counter()
      out = calls[name]()
      times[name].append(1e3 * (time.perf_counter() - start))
      jax.block_until_ready(out)
  return {name: each[3:] for name, each in times.items()}


def ratio_row(arrays, devices, first, rounds):
  """A step's host time beside that of its jitted function, one of which runs first."""
  calls = dict(
    zip(("jitted", "ours"), of_its_jitted(arrays, devices), strict=True)
  )
  times = host_ms({first: calls[first], **calls}, rounds)
  jitted, ours = (
    float(np.quantile(times[name], 0.1)) for name in ("jitted", "ours")
  )
  ratio = measure.ratio(times, "ours", "jitted")
  return arrays, devices, first, jitted, ours, ours / jitted, ratio


def ratios(arrays, rounds):
  """All ratios, each in a process of its own: what ran before changes the times."""
  table = results.Table(
    "host time of a call, Adam: make_train_step beside the function that it has jitted",
    [
      "arrays",
      "devices",
      "first",
      "jitted, ms",
      "ours, ms",
      "ours / jitted",
      "median ratio",
    ],
    text=(8,),
  )
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
  env = {**os.environ, "XLA_FLAGS": flags}
  for each in itertools.product((1, 8), arrays, ("jitted", "ours")):
    one = ",".join(map(str, each))
    command = [sys.executable, __file__, "--one", one, "--rounds", str(rounds)]
    table.add(
      *json.loads(
        subprocess.run(
          command, env=env, check=True, stdout=subprocess.PIPE
        ).stdout
      )
    )
  return table


def by_hand(layers, rounds):
  """Steps beside the same steps written by hand."""
  x = jnp.ones((8, WIDTH))
  rows = {
    "make_train_step": (of_parameters, "jax.jit"),
    "linen_train_step": (of_train_state, "jax.jit of apply_gradients"),
    "nnx_train_step": (of_nnx, "nnx.jit"),
  }
  table = results.Table(
    f"host time of a call, {2 * layers} arrays, Adam: steps beside the same written by hand",
    ["step", "by hand", "ours, ms", "by hand, ms", "ours / by hand"],
    text=(18, 28),
  )
  for name, (make, peer) in rows.items():
    times = host_ms(
      dict(zip((peer, name), make(layers, x), strict=True)), rounds
    )
    ours, hand = (statistics.median(times[key]) for key in (name, peer))
    table.add(name, peer, ours, hand, measure.ratio(times, name, peer))
  return table


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--arrays", type=int, nargs="*", default=[50, 500, 2000], help="parameters"
  )
  parser.add_argument(
    "--layers", type=int, default=250, help="two arrays each; 0: no such table"
  )
  parser.add_argument("--rounds", type=int, default=60)
  parser.add_argument(
    "--one", help="devices,arrays,first: that row of the first table, as JSON"
  )
  results.add_option(parser)
  args = parser.parse_args()
  if args.one:
    devices, arrays, first = args.one.split(",")
    print(json.dumps(ratio_row(int(arrays), int(devices), first, args.rounds)))
    return
  tables = [ratios(args.arrays, args.rounds)]
  if args.layers:
    tables.append(by_hand(args.layers, args.rounds))
  results.save(args.save, "host_time", tables)


if __name__ == "__main__":
  main()
