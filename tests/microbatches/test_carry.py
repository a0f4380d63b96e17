"""The threaded argument over devices: what each starts with, and what they become together."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices
from support.devices import make_mesh
from support.samples import more

import optax_accum
from optax_accum import count_collectives

TX = optax.sgd(0.1)
kinds = pytest.mark.parametrize("kind", [devices.AUTO, more(devices.EXPLICIT)])


HELD = np.float32(1), TX.init(None)


def make_step(fun, mesh=None, **options):
  """What takes a batch and a carry to the carry after a step."""
  options = {"num_microbatches": 1, "donate": False, "carry_argnum": 2, **options}
  step = optax_accum.make_train_step(fun, TX, mesh=mesh, **options)
  return lambda batch, carry: step(*HELD, batch, carry)[2]


def one_step(fun, batch, carry, mesh=None, **options):
  """The carry after a step."""
  return make_step(fun, mesh, **options)(batch, carry)


def tokens(batch):
  return jnp.sum(batch["valid"])


def statistics(p, batch, carry):
  count = jnp.sum(batch["valid"])
  mean = jnp.sum(batch["x"] * batch["valid"]) / count
  new = {"mean": 0.5 * carry["mean"] + 0.5 * mean, "seen": carry["seen"] + count.astype(jnp.int32)}
  return p * mean, (new, None)


@kinds
def test_floats_are_averaged_with_what_each_device_counted(kind):
  carry = {"mean": jnp.float32(2.0), "seen": jnp.int32(3)}
  options = {"weight_fn": tokens, "carry_reduction": {"mean": "mean", "seen": "sum"}}
  mesh = make_mesh(4, kind=kind)
  on_one_device = make_step(statistics, weight_fn=tokens)
  over_devices = make_step(statistics, mesh, **options)
  for valid in (np.ones(16), np.r_[np.ones(4), np.zeros(12)], np.r_[1, 1, np.zeros(6), np.ones(8)]):
    batch = {"x": np.arange(16, dtype=np.float32), "valid": valid.astype(np.float32)}
    whole, actual = on_one_device(batch, carry), over_devices(batch, carry)
    np.testing.assert_allclose(actual["mean"], whole["mean"], rtol=1e-6)
    assert int(actual["seen"]) == int(whole["seen"]) == 3 + valid.sum()
    counts = valid.reshape(4, 4).sum(1)
    if len(set(counts)) > 1:  # what a mean over devices would give
      parts = (batch["x"] * valid).reshape(4, 4).sum(1) / np.maximum(counts, 1)
      wrong = np.mean(np.where(counts > 0, 1 + 0.5 * parts, 2.0))
      assert abs(wrong - whole["mean"]) > 0.1


@pytest.mark.parametrize("kind", [devices.AUTO, devices.EXPLICIT])
def test_beside_tensor_parallelism_the_carry_comes_out_sharded_as_it_came(kind):
  mesh = make_mesh(2, 4, kind=kind)
  params = devices.put(jnp.ones((3, 8)), mesh, P(None, "model"))

  def fun(params, batch, carry):
    # over "model", as XLA would have the carry too
    activations = jnp.mean(batch @ params, 0)
    shift = jnp.mean(batch) if kind is devices.EXPLICIT else activations
    return jnp.sum(activations), ([carry[0] + shift, carry[1] + activations], None)

  carry = devices.put([jnp.zeros(8), jnp.zeros(8)], mesh, [P("data"), P("model")])
  options = {"num_microbatches": 2, "mesh": mesh, "donate": False}
  step = optax_accum.make_train_step(fun, TX, carry_argnum=2, **options)
  new = step(params, TX.init(params), jnp.ones((8, 3)), carry=carry)[2]
  assert [x.sharding for x in new] == [x.sharding for x in carry]


@kinds
def test_where_nothing_counted_the_carry_stays(kind):
  def each(p, batch, carry):
    losses, outs = zip(*(statistics(p, batch, c) for c in carry.values()), strict=True)
    return losses[0], (dict(zip(carry, [new for new, _ in outs], strict=True)), None)

  batch = {"x": np.ones(12, np.float32), "valid": np.zeros(12, np.float32)}
  # 0.1 + 0.1 + 0.1 is not 3 * 0.1
  carry = {"mean": jnp.float32(0.1), "seen": jnp.int32(3)}
  mesh = make_mesh(3, kind=kind)
  options = {"weight_fn": tokens, "carry_reduction": {"mean": "mean", "seen": "max"}}
  actual = [one_step(statistics, batch, carry, mesh, **options)]
  words = {"sum": "sum", "min": "min"}
  options = {"weight_fn": tokens, "carry_reduction": words}
  actual += one_step(each, batch, dict.fromkeys(words, carry), mesh, **options).values()
  for new in actual:
    assert (new["mean"], int(new["seen"])) == (carry["mean"], 3)


@pytest.mark.parametrize(("kind", "microbatches"), [(devices.AUTO, 2), (devices.EXPLICIT, 1)])
def test_a_carry_may_be_constants_python_numbers_and_of_every_dtype(kind, microbatches):
  def fun(p, x, carry):
    new = {
      "zeros": jnp.zeros(2),
      "half": carry["half"] * jnp.bfloat16(0.5),
      "complex": carry["complex"] + jnp.mean(x).astype(jnp.complex64),
      "flag": carry["flag"] | (jnp.max(x) > 14),
      "steps": carry["steps"] + 1,
      "small": jnp.minimum(carry["small"], jnp.min(x)),
    }
    return p * jnp.mean(x), (new, None)

  x = np.arange(16, dtype=np.float32)
  carry = {
    "zeros": np.ones(2, np.float32),
    "half": jnp.bfloat16(3.0),
    "complex": jnp.complex64(1j),
    "flag": jnp.array(False),
    "steps": 5,
    "small": jnp.float32(3.0),
  }
  words = {**dict.fromkeys(("zeros", "half", "complex"), "mean"), "flag": "max", "steps": "max"}
  new = one_step(
    fun,
    x,
    carry,
    make_mesh(8, kind=kind),
    num_microbatches=microbatches,
    carry_reduction={**words, "small": "min"},
  )
  np.testing.assert_array_equal(new["zeros"], np.zeros(2))
  assert (new["half"].dtype, float(new["half"])) == (jnp.bfloat16, 3 * 0.5**microbatches)
  np.testing.assert_allclose(new["complex"], 1j + 7.5 * microbatches, rtol=1e-6)
  assert (bool(new["flag"]), int(new["steps"]), float(new["small"])) == (True, 5 + microbatches, 0)


@kinds
def test_typed_keys_differ_between_devices_and_come_out_as_the_first_ones(kind):
  def fun(p, x, carry):
    key, sub = jax.random.split(carry["key"])
    many = jax.vmap(lambda key: jax.random.split(key)[0])(carry["many"])
    new = {"key": key, "many": many, "kept": carry["kept"]}
    aux = jax.random.uniform(sub), jax.random.uniform(carry["kept"])
    return p * jnp.mean(x), (new, aux)

  start = {
    "key": jax.random.key(0),
    "many": jax.random.split(jax.random.key(1), 3),
    "kept": jax.random.key(2),
  }
  step = optax_accum.make_train_step(
    fun,
    TX,
    num_microbatches=2,
    donate=False,
    carry_argnum=2,
    aux_reduction="stack",
    mesh=make_mesh(4, kind=kind),
  )
  _, _, carry, metrics = step(*HELD, np.ones(16, np.float32), start)
  noise, of_kept = map(np.asarray, metrics["aux"])
  assert len(set(noise.tolist())) == noise.size == 8
  # A key that is handed back draws the same in both microbatches of a device.
  assert len(set(of_kept.tolist())) == 4

  @jax.jit
  def first_device(start):
    fold_in, drawn = jax.random.fold_in, []
    held = {
      "key": fold_in(start["key"], 0),
      "many": jax.vmap(lambda k: fold_in(k, 0))(start["many"]),
      "kept": start["kept"],
    }
    for _ in range(2):
      _, (held, (noise, _)) = fun(1.0, jnp.ones(2), held)
      drawn.append(noise)
    return held, drawn

  first, drawn = first_device(start)
  assert noise[:2].tolist() == [float(x) for x in drawn]
  for name in start:
    np.testing.assert_array_equal(
      jax.random.key_data(carry[name]), jax.random.key_data(first[name])
    )


def test_a_carry_that_differs_over_another_axis_is_reduced_over_its_own_alone():
  cycle = optax_accum.microbatch_value_and_grad(
    lambda p, x, c: (p * jnp.mean(x), (c + jnp.sum(x), None)),
    num_microbatches=2,
    carry_argnum=2,
    carry_reduction="sum",
    axis_name="data",
  )
  specs = {"in_specs": (P(), P("data"), P("model")), "out_specs": P("model")}
  mapped = jax.shard_map(
    lambda p, x, c: cycle(p, x, c[0])[0][1][0][None], mesh=make_mesh(4, 2), **specs
  )
  args = (np.float32(1), np.arange(16, dtype=np.float32), np.array([10, 20], np.float32))
  compiled = jax.jit(mapped).lower(*args).compile()
  assert compiled(*args).tolist() == [130, 140]
  # The start is the same over "data", and needs no sum to be so in its type.
  assert count_collectives(compiled).outside["all-reduce"].operations == 1


def test_in_a_users_shard_map_and_in_pmap_a_carry_is_reduced_alike():
  def fun(p, x, c):
    return p * jnp.mean(x), ({"sum": c["sum"] + jnp.sum(x), "mean": jnp.mean(x)}, None)

  cycle = optax_accum.microbatch_value_and_grad(
    fun,
    num_microbatches=2,
    carry_argnum=2,
    carry_reduction={"sum": "sum", "mean": "mean"},
    axis_name="data",
  )
  x, p = np.arange(32, dtype=np.float32), np.float32(1)
  carry = {"sum": np.float32(100), "mean": np.float32(0)}

  def on_device(p, x, c):
    return cycle(p, x, c)[0][1][0]

  varying = {"sum": P("data"), "mean": P("data")}

  def with_a_varying_carry(p, x, c):
    new = on_device(p, x, jax.tree.map(jnp.squeeze, c))
    return jax.tree.map(jnp.atleast_1d, new)

  mesh = make_mesh(8)
  same = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
  # What varies by its type comes out so.
  mapped = jax.shard_map(
    with_a_varying_carry, mesh=mesh, in_specs=(P(), P("data"), varying), out_specs=varying
  )
  each = jax.tree.map(lambda c: np.full(8, c), carry)
  pmapped = jax.pmap(on_device, axis_name="data", in_axes=(None, 0, None))
  # The last microbatch of device d has the rows 4 d + 1 and 4 d + 3.
  expected = {"sum": 100 + 496.0, "mean": float(np.mean(4 * np.arange(8) + 2.0))}
  assert jax.tree.map(float, jax.jit(same)(p, x, carry)) == expected
  for per_device in (jax.jit(mapped)(p, x, each), pmapped(p, x.reshape(8, 4), carry)):
    assert jax.tree.map(lambda c: set(np.asarray(c).tolist()), per_device) == {
      name: {value} for name, value in expected.items()
    }


@kinds
def test_an_aux_may_depend_on_no_batch(kind):
  def fun(p, batch, lr):
    aux = {"lr": lr, "n": 1, "key": jax.random.key(7)}
    return p * jnp.sum(batch["x"] * batch["valid"]) / jnp.sum(batch["valid"]), aux

  batch = {"x": np.ones(16, np.float32), "valid": np.r_[np.ones(8), np.zeros(8)].astype(np.float32)}
  for options in ({}, {"weight_fn": tokens, "skip_nonfinite": True}):
    step = optax_accum.make_train_step(
      fun,
      TX,
      num_microbatches=2,
      donate=False,
      has_aux=True,
      aux_reduction="last",
      mesh=make_mesh(8, kind=kind),
      **options,
    )
    aux = step(*HELD, batch, np.float32(3))[2]["aux"]
    assert (float(aux["lr"]), int(aux["n"])) == (3.0, 1)
    np.testing.assert_array_equal(
      jax.random.key_data(aux["key"]), jax.random.key_data(jax.random.key(7))
    )


def test_words_that_cannot_be_kept_are_refused():
  def fun(p, x, c):
    new = jax.tree.map(lambda a: a + jnp.ones((), a.dtype), c)
    return p * jnp.mean(x), (new, None)

  def step(word, carry, **options):
    return one_step(
      fun, np.ones(8, np.float32), carry, make_mesh(2), carry_reduction=word, **options
    )

  with pytest.raises(
    ValueError, match=r"carry_reduction\['a'\]='last' must be one of 'mean', 'max', 'min', 'sum'"
  ):
    step({"a": "last"}, {"a": jnp.ones(())})
  with pytest.raises(
    ValueError, match=r"carry_reduction='sum' asks for a carry: give carry_argnum"
  ):
    optax_accum.make_train_step(fun, TX, num_microbatches=2, carry_reduction="sum")
  with pytest.raises(
    TypeError, match=r'argument 2\[\'n\'\] has dtype int32, which "mean" cannot keep'
  ):
    step("mean", {"n": jnp.int32(1)})
  with pytest.raises(TypeError, match="has dtype complex64, which has no 'max'"):
    step("max", {"z": jnp.complex64(1)})
  with pytest.raises(TypeError, match="has dtype bool, which has no sum"):
    step("sum", {"f": jnp.array(True)})
  with pytest.raises(ValueError, match=r"carry_reduction=.* is not a prefix tree"):
    step({"b": "sum"}, {"a": jnp.ones(())})


@pytest.mark.parametrize(
  "start", [jnp.int32(3), more(jnp.array(False)), jax.random.PRNGKey(0)], ids=str
)
def test_what_is_no_float_and_changes_needs_a_word_over_devices(start):
  def fun(p, x, carry):
    new = {**carry, "n": carry["n"] + jnp.ones((), start.dtype)}
    return p * jnp.mean(x), (new, None)

  x, carry = np.ones(8, np.float32), {"n": start, "same": start}
  message = rf"argument 2\['n'\] has dtype {start.dtype}.*tree.*\"sum\" for a count.*every leaf"
  options = {"num_microbatches": 1, "carry_argnum": 2}

  def make(**over):
    return optax_accum.make_train_step(fun, TX, **options, **over)

  over_devices = make(mesh=make_mesh(2))
  alone = make()
  params = jnp.float32(1)

  def add(step):
    return step.add(step.begin(params, carry), params, x)

  mapped = jax.pmap(
    optax_accum.microbatch_value_and_grad(fun, axis_name="i", **options),
    axis_name="i",
    in_axes=(None, 0, None),
  )
  for call in (
    lambda: one_step(fun, x, carry, make_mesh(2)),
    lambda: add(over_devices),
    lambda: mapped(params, x.reshape(2, 4), carry),
    lambda: alone.merge(add(alone), add(alone)),
  ):
    with pytest.raises(TypeError, match=message):
      call()
  words = {"n": "max", "same": "max"}
  for new in (
    one_step(fun, x, carry),
    one_step(fun, x, carry, make_mesh(2), carry_reduction=words),
  ):
    np.testing.assert_array_equal(new["n"], start + jnp.ones((), start.dtype))
    np.testing.assert_array_equal(new["same"], start)


@kinds
def test_what_the_loss_hands_back_is_not_combined(kind):
  def fun(p, x, carry):
    new = {**carry, "mean": carry["mean"] + jnp.mean(x)}
    return p * jnp.mean(x), (new, None)

  x = np.arange(16, dtype=np.float32)
  start = {
    "mean": jnp.float32(0.1),
    "float": jnp.full(8, 0.1),  # a mean over 8 devices is 0.10000001
    "int": jnp.int32(3),
    "flag": jnp.array(True),
    "key": jax.random.key(3),
  }
  before = {**start, "key": jax.random.key_data(start["key"])}
  mesh = make_mesh(8, kind=kind)
  options = {"num_microbatches": 2, "carry_argnum": 2, "donate": False}
  step = optax_accum.make_train_step(fun, TX, mesh=mesh, **options)
  whole = step(*HELD, x, start)[2]

  def cycle():
    return step.add(step.begin(HELD[0], start), HELD[0], x)

  added = step.finish(*HELD, cycle())[2]
  merged = step.finish(*HELD, step.merge(cycle(), cycle()))[2]
  for new in (whole, added, merged):
    np.testing.assert_allclose(new.pop("mean"), 0.1 + 15, rtol=1e-6)
    new["key"] = jax.random.key_data(new["key"])
    for name, kept in new.items():
      np.testing.assert_array_equal(kept, before[name])
  compiled = step.lower(*HELD, x, start).compile()
  # Of the carry the mean alone is sent, and so nothing of 8 floats.
  assert not count_collectives(compiled).at_least(32).operations


@pytest.mark.parametrize("dtype", [np.int32, more(np.uint32), more(np.float32)])
def test_counts_agree_in_one_call_in_a_cycle_and_in_a_merge(dtype):
  """17 of 33 rows, on one device and on 8; their maximum over devices would be 5 of 5."""
  rows = np.random.default_rng(0).permutation(48)
  batch = {"right": rows < 17, "valid": rows < 33}

  def fun(p, batch, carry):
    new = {name: count + batch[name].sum().astype(dtype) for name, count in carry.items()}
    return p * jnp.mean(batch["right"].astype(jnp.float32)), (new, None)

  def of(part):
    return {name: x[part] for name, x in batch.items()}

  params = jnp.float32(1)
  for mesh in (None, make_mesh(8)):
    step = optax_accum.make_train_step(
      fun, TX, num_microbatches=1, carry_argnum=2, carry_reduction="sum", mesh=mesh, donate=False
    )
    start = {"right": dtype(100), "valid": dtype(200)}

    def added(*parts, step=step, start=start):
      cycle = step.begin(params, start)
      for part in parts:
        cycle = step.add(cycle, params, of(part))
      return cycle

    parts = slice(0, 16), slice(16, 48)
    merged = step.merge(added(parts[0]), added(parts[1]))
    ends = [
      step(params, TX.init(params), batch, start),
      step.finish(params, TX.init(params), added(*parts)),
      step.finish(params, TX.init(params), merged),
    ]
    for _, _, new, _ in ends:
      assert (int(new["right"]), int(new["valid"])) == (117, 233)
      assert new["right"].dtype == dtype


@pytest.mark.parametrize("count", [None, 8])
@pytest.mark.parametrize("size", [16, 8])
def test_a_loss_may_write_into_what_it_gets(count, size):
  """A carry that is updated in place is a new one, and no microbatch sees what another wrote."""
  x = np.full(16, 3, np.float32)

  def fun(p, batch, carry, scale):
    scale["by"] = scale["by"] * 2
    carry["mean"] = carry["mean"] + jnp.mean(batch.pop("x"))
    carry["in"].append(carry["in"].pop() + 1)
    return p * carry["mean"] * scale["by"], (carry, None)

  start = {"mean": jnp.float32(1), "in": [jnp.int32(2)]}
  options = {"microbatch_size": size, "carry_argnum": 2, "donate": False}
  words = {"mean": "mean", "in": "max"}
  mesh = None if count is None else make_mesh(count)
  step = optax_accum.make_train_step(fun, TX, mesh=mesh, carry_reduction=words, **options)
  rest = {"x": x}, start, {"by": jnp.float32(3)}
  _, _, new, metrics = step(*HELD, *rest)
  number = 16 // size
  np.testing.assert_allclose(new["mean"], 1 + 3 * number, rtol=1e-6)
  assert int(new["in"][0]) == 2 + number
  # Each microbatch of one device reads what those before it made of the mean.
  of_each = 6 * (1 + 3 * np.arange(1, number + 1))
  np.testing.assert_allclose(metrics["loss"], np.mean(of_each), rtol=1e-6)
  assert (rest[0].keys(), float(start["mean"]), len(start["in"])) == ({"x"}, 1, 1)
