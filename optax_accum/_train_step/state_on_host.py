"""`state_on_host`: an optimizer whose state is in the host's memory between its steps."""

import warnings

import jax
import jax.numpy as jnp
import optax

from optax_accum import _validate, _versions
from optax_accum._arithmetic import dtypes

_KIND = "pinned_host"


def state_on_host(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Makes the state of `tx` wait in the host's memory between its steps, off the device.

  A step fetches it, updates it on the device, and sends it back. The steps are those of `tx`, to
  the bit.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_accum
    >>> tx = optax_accum.state_on_host(optax.adam(1e-3))
    >>> loss_fn = lambda params, batch: jnp.mean((batch @ params) ** 2)
    >>> step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=2)
    >>> params = jnp.ones(3)
    >>> opt_state = tx.init(params)
    >>> params, opt_state, metrics = step(params, opt_state, jnp.ones((8, 3)))
    >>> print(params, opt_state[0].count)
    [0.999 0.999 0.999] 1

  Args:
    tx: Any optax transformation whose state keeps its tree, shapes and dtypes: `optax.monitor` goes
      around this one.
      `accumulate` goes around it too, as in ``accumulate(state_on_host(adam), k)``: the state then
      moves once a cycle, and the accumulators never. Within it they would move in every call.

  Returns:
    A transformation with the state of `tx`. What ``init`` returns is in memory of the kind
    ``"pinned_host"``, sharded as on the device; scalars and random keys stay on the device.
    ``update`` returns each array to the memory that it came from. So a state that was restored to
    the device stays there, with a warning, and so do NumPy arrays: put it into the shardings of
    what ``init`` returns, ``jax.device_put(opt_state, jax.tree.map(lambda x: x.sharding if x.ndim
    else None, tx.init(params)))``. Over a mesh Orbax restores into these too. What it restores so
    on one device without a mesh has a type that does not say where it is, and a step refuses it.

  Raises:
    TypeError: `tx` is no optax transformation.
    ValueError: An update changes the tree of the state, a shape or a dtype, as float32 gradients of
      bfloat16 parameters do.
    NotImplementedError: From ``init``: devices have no such memory.

  Edge cases:
    - On a CPU both memories are one: there it can be tested, and saves nothing.
    - In the program that updates, XLA decides how much of the state is on the device at once: see
      the guide "State on the host". With ``begin``, ``add`` and ``finish`` only
      ``finish`` sees any of it.
    - A function of your own is safe if it takes ``(params, state, ...)``, donates both and returns
      ``(params, state, ...)``. Any other that donates the state, such as ``accumulate(tx,
      k).apply``, needs the shardings of all that it takes and returns. Without these JAX does not
      ask which memory an array is in: it may put parameters where the state was, and ends the
      process on CPUs, and when it compiles for TPUs. With gradients sharded as the parameters::

        p, s = jax.tree.map(lambda x: x.sharding, (params, state))
        apply = jax.jit(
          tx.apply, donate_argnums=(1, 2), in_shardings=(p, s, p), out_shardings=(p, s))

    - `jax.pmap` returns all arrays to the device.
  """
  _validate.transformation(tx, "tx")
  tx = optax.with_extra_args_support(tx)

  def init(params):
    _check_host_memory()
    return jax.tree.map(_to_host, tx.init(params))

  def update(updates, state, params=None, **extra_args):
    arrays = list(filter(_moves, jax.tree.leaves(state)))
    on_device = all(_memory(x) == jax.memory.Space.Device for x in arrays)
    known = _versions.TYPES_SAY_MEMORY and _KIND in _kinds()
    if arrays and on_device and known:
      warnings.warn(
        "No array of the optimizer state is in the host's memory, so state_on_host saves nothing."
        " Put it there: jax.device_put(opt_state, jax.tree.map(lambda x: x.sharding if x.ndim else"
        " None, tx.init(params))).",
        stacklevel=2,
      )
    # For each leaf the memory that it is in, to which its update returns.
    came_from = jax.tree.map(_memory, state)
    # Without a second argument `_moved` moves to the device.
    fetched = jax.tree.map(_moved, state)
    updates, new = tx.update(updates, fetched, params, **extra_args)
    # `came_from` fits only a state of the same tree.
    different = _validate.difference(
      "state", new, state, "type", _validate.type_of
    )
    if different:
      raise ValueError(
        f"After an update {different}: state_on_host returns each array to the memory it came from."
        " Put it around transformations whose state keeps its tree and its types."
      )
    return updates, jax.tree.map(_moved, new, came_from)

  return optax.GradientTransformationExtraArgs(init, update)


def _moves(x) -> bool:
  """Whether a leaf waits on the host: no scalar, and no key, whose type names no memory."""
  return jnp.ndim(x) > 0 and not dtypes.is_key(x)


def _to_host(x):
  """An array in the host's memory, if it waits there."""
  if not _moves(x):
    return x
  return _moved(x, jax.memory.Space.Host)


def _memory(x):
  """The memory that an array is in."""
  return jax.typeof(x).memory_space


def _moved(x, memory=jax.memory.Space.Device):
  """An array in such memory, sharded as it is."""
  if _memory(x) == memory:
    return x
  return jax.device_put(x, memory)


def _kinds() -> list[str]:
  """The kinds of memory that devices have."""
  return [memory.kind for memory in jax.devices()[0].addressable_memories()]


def _check_host_memory() -> None:
  """Checks that there is such memory. JAX 0.8 for CPU says so, and leaves all where it is."""
  if _KIND not in _kinds():
    raise NotImplementedError(
      f"state_on_host needs memory of the kind {_KIND!r}, and devices have {_kinds()}: leave"
      " state_on_host out here."
    )
