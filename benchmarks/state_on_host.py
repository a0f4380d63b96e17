"""Device memory with the optimizer's state on the device, and in the host's memory.

    python benchmarks/state_on_host.py --platform tpu|gpu [--target-config FILE]

The model, the optimizer and the compilers are those of memory.py. Memory is what arguments and
temporary buffers need on the device, in units of P, the parameters' bytes. "unhidden" is compiled
without the scheduler that starts transfers early, as a flag of XLA has it; "slices" updates one layer after another, which
is right for optimizers that are element-wise alone, and no part of the library. JAX knows no kinds
of memory of a GPU that is not there, so for one the state is moved by hand as state_on_host does.
"""

import argparse
import pathlib

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import layers
import memory
import numpy as np
import optax
import results

from optax_accum import make_train_step, state_on_host

UNHIDDEN = {"xla_tpu_enable_latency_hiding_scheduler": False}


def moved_by_hand(tx):
  def put(tree, memory):
    return jax.tree.map(
      lambda x: jax.device_put(x, memory) if x.ndim else x, tree
    )

  def run(updates, state, params, **_):
    state = put(state, jax.memory.Space.Device)
    updates, state = tx.update(updates, state, params)
    return updates, put(state, jax.memory.Space.Host)

  return optax.GradientTransformationExtraArgs(tx.init, run)


def update(tx):
  def run(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return run


def update_in_slices(tx):
  """As `update`, of parameters with an axis of layers, one layer after another."""

  def run(params, state, grads):
    adam, *others = state
    count = adam.count

    def one(_, given):
      params, mu, nu, grads = given
      state = adam._replace(count=count, mu=mu, nu=nu), *others
      params, (new, *_) = update(tx)(params, state, grads)
      return None, (params, new.mu, new.nu)

    done = {}
    for name in params:
      given = tuple(
        {name: tree[name]} for tree in (params, adam.mu, adam.nu, grads)
      )
      if name == "embedding":
        _, done[name] = one(None, given)
      else:
        _, done[name] = lax.scan(one, None, given)
    params, mu, nu = ({k: v[i][k] for k, v in done.items()} for i in range(3))
    return params, (adam._replace(count=count + 1, mu=mu, nu=nu), *others)

  return run


def programs(tx, params, state, tokens):
  """Name and a function that lowers, of each program."""
  loss_fn = layers.make_loss_fn("rematerialised")
  split = {"num_microbatches": memory.MICROBATCHES}
  step = make_train_step(loss_fn, tx, **split)
  yield "a step", lambda: step.lower(params, state, tokens)
  held = make_train_step(loss_fn, tx, in_place=True, **split)
  yield "a step, in place", lambda: held.lower(params, state, tokens)
  for name, of in (("update", update), ("update in slices", update_in_slices)):
    jitted = jax.jit(of(tx), donate_argnums=(0, 1, 2))
    yield name, lambda jitted=jitted: jitted.lower(params, state, params)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--platform", choices=("tpu", "gpu"), required=True)
  parser.add_argument(
    "--target-config", type=pathlib.Path, help="of a GPU, as XLA writes it"
  )
  results.add_option(parser)
  args = parser.parse_args()
  target = memory.device(args.platform, args.target_config)
  # Of other shardings of shapes JAX forgets the kind of memory.
  one = NamedSharding(
    Mesh(np.array([target]), ("data",), axis_types=(AxisType.Auto,)),
    PartitionSpec(),
  )

  def on_device(tree):
    return jax.tree.map(lambda x: x.update(sharding=one), tree)

  def on_host(x):
    kind = "pinned_host" if x.ndim else "device"
    return x.update(sharding=one.with_memory_kind(kind))

  sizes = memory.LARGE
  like = on_device(layers.shapes(sizes["layers"], sizes["width"], 4096))
  shape = sizes["rows"], sizes["length"]
  tokens = on_device(jax.ShapeDtypeStruct(shape, jnp.int32))
  adam = optax.adamw(1e-3)
  state = on_device(jax.eval_shape(adam.init, like))
  unit = sum(4 * x.size for x in jax.tree.leaves(like))
  where = target.device_kind.replace("TPU v5 lite", "TPU v5e")
  where += ", compiled without one"
  table = results.Table(
    f"{where}: {unit / 2**20:.0f} MiB of parameters (P), AdamW",
    ["program", "state", "memory, P", "unhidden, P"],
    text=(20, 10),
  )

  def used(lowered, **options):
    found = lowered.compile(**options).memory_analysis()
    return (found.argument_size_in_bytes + found.temp_size_in_bytes) / unit

  hosted = state_on_host(adam), jax.tree.map(on_host, state)
  if args.platform == "gpu":
    hosted = moved_by_hand(adam), state
  for place, (tx, given) in {"device": (adam, state), "host": hosted}.items():
    for name, lower in programs(tx, like, given, tokens):
      unhidden = None
      if args.platform == "tpu":
        unhidden = used(lower(), compiler_options=UNHIDDEN)
      table.add(name, place, used(lower()), unhidden)
  results.save(args.save, f"state_on_host_{args.platform}", [table], where)


if __name__ == "__main__":
  main()
