"""`count_collectives`: what real programs run, for CPU and TPU, and forms they rarely print."""

import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from support import devices
from support.compiled import groups_of
from support.samples import more

from optax_accum import accumulate, accumulate_specs, make_train_step
from optax_accum import count_collectives as count

ROWS = P("data")
X = jax.ShapeDtypeStruct((64, 8), jnp.float32)
BYTES = 8 * 8 * 4  # of a device's part of X
WHOLE = 64 * 8 * 4


# How often a loop counts: XLA for TPU prints no trips.
PRINTED = {"cpu": None, "tpu": 1}
on_cpu_and_tpu = pytest.mark.parametrize("platform", ["cpu", "tpu"])


def compiled(fun, *args, platform="cpu", chips=8, in_specs=ROWS, out_specs=ROWS):
  """`fun` in a shard_map over the axis "data", compiled."""
  mesh = devices.make_mesh(chips, platform=platform)
  mapped = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
  args = devices.abstract(args, mesh, in_specs)
  return jax.jit(mapped).lower(*args).compile()


def reduced(x):
  return jnp.sin(lax.psum(x, "data"))


def repeated(fun, times, **kwargs):
  return lambda x: lax.scan(lambda c, _: (fun(c), None), x, length=times, **kwargs)[0]


@on_cpu_and_tpu
def test_what_is_in_a_loop_is_told_from_what_is_not(platform):
  report = count(compiled(reduced, X, platform=platform))
  assert report.outside == {"all-reduce": (1, BYTES)}
  assert report.inside == {}

  report = count(compiled(repeated(reduced, 5), X, platform=platform))
  times = PRINTED[platform] or 5
  assert report.outside == {}
  assert report.inside == {"all-reduce": (times, times * BYTES)}
  assert len(report.unknown_trip_counts) == (platform == "tpu")
  (operation,) = report.operations
  assert (operation.kind, operation.bytes, operation.executions) == ("all-reduce", BYTES, times)
  assert operation.shape == "f32[8,8]"
  assert operation.loop.startswith("while")
  assert re.search(r"jit\(.*while/body.*psum", operation.op_name)


@on_cpu_and_tpu
def test_nested_loops_multiply(platform):
  def fun(x):
    x = repeated(lambda x: repeated(reduced, 4)(jnp.cos(reduced(x))), 3)(x)
    return lax.psum(x, "data") + x

  report = count(compiled(fun, X, platform=platform))
  times = 2 * (PRINTED[platform] or 0) or 3 * 4 + 3
  assert report.inside == {"all-reduce": (times, times * BYTES)}
  assert report.outside == {"all-reduce": (1, BYTES)}


def counting(start, test, step):
  def fun(x):
    def body(c):
      return c[0] + step, reduced(c[1])

    return lax.while_loop(lambda c: test(c[0]), body, (jnp.int32(start), x))[1]

  return fun


@pytest.mark.parametrize(("fun", "times"), [
  (lambda x: lax.fori_loop(2, 11, lambda i, x: reduced(x) * i.astype(x.dtype), x), 9),
  (lambda x: lax.scan(lambda c, y: (reduced(c) * y, y), x, jnp.arange(6.0), reverse=True)[0], 6),
  (repeated(reduced, 6, unroll=2), 6),
  (repeated(reduced, 7, unroll=2), 7),
  (repeated(reduced, 3, unroll=True), 3),
  (repeated(jax.checkpoint(reduced), 3), 3),
  (repeated(reduced, 1), 1),
  (counting(0, lambda i: i < 10, 3), 4),
  (counting(0, lambda i: i <= 10, 5), 3),
  (counting(-4, lambda i: jnp.greater(10, i), 1), 14),
  (counting(7, lambda i: i > 0, -1), 7),
  (counting(7, lambda i: i >= 0, -2), 4),
  (counting(1, lambda i: i != 9, 2), 4),
])  # fmt: skip
def test_loops_that_the_program_fixes_are_counted(fun, times):
  report = count(compiled(fun, X))
  assert sum(c.executions for c in report.operations) == times
  assert report.unknown_trip_counts == ()


@on_cpu_and_tpu
def test_loops_that_the_program_does_not_fix_count_once_and_are_named(platform):
  def fun(x):
    x, _ = lax.while_loop(
      lambda c: jnp.sum(c[0]) < c[1],
      lambda c: (settled(repeated(reduced, 3)(c[0])), c[1] - 1.0),
      (x, 9.0),
    )
    return lax.while_loop(lambda x: jnp.max(x) > 0.5, lambda x: x * 0.5, x)

  report = count(compiled(fun, X, platform=platform))
  times = 1 + (PRINTED[platform] or 3)
  assert report.inside == {"all-reduce": (times, times * BYTES)}
  outer, *inner = report.unknown_trip_counts  # the last loop has no collective
  assert len(inner) == (1 if platform == "cpu" else 2)
  for name in (outer, *inner):
    assert re.fullmatch(r"while[\w.]* \(jit\(.*while\)", name)
  found = {c.unknown_trip_counts for c in report.operations}
  assert found == {(outer, name) for name in inner} | ({(outer,)} if platform == "cpu" else set())


def settled(x):
  return lax.while_loop(lambda x: jnp.max(x) > 0.5, reduced, x)


@pytest.mark.parametrize(("fun", "differentiable", "times", "platform"), [
  (reduced, False, 1, "cpu"),
  (reduced, False, 1, "tpu"),
  (reduced, True, 1, "cpu"),
  (reduced, True, 1, "tpu"),
  (repeated(reduced, 3), False, 3, "cpu"),
  (settled, False, 1, "cpu"),
], ids=["cpu", "tpu", "cond-cpu", "cond-tpu", "loop", "unknown-loop"])  # fmt: skip
def test_what_ends_a_cycle_is_told_from_loops(fun, differentiable, times, platform):
  inner = optax.stateless(lambda updates, _: fun(updates))
  tx = accumulate(inner, 2, differentiable=differentiable)

  def call(emit, x):
    return tx.update(x, tx.init(x), flush=emit)[0]

  emit = jax.ShapeDtypeStruct((), jnp.bool_)
  report = count(compiled(call, emit, X, platform=platform, in_specs=(P(), ROWS)))
  assert report.at_cycle_end == {"all-reduce": (times, times * BYTES)}
  assert report.inside == report.outside == {}
  (operation,) = report.operations
  assert operation.at_cycle_end
  assert (operation.loop is None) == (fun is reduced)  # the conditional is none
  assert len(report.unknown_trip_counts) == (fun is settled)
  assert report.streaming
  report.assert_once_per_cycle(nbytes=4)


def test_every_branch_of_a_conditional_counts():
  def fun(emit, x):
    gather = lambda x: lax.all_gather(x, "data").sum(0)  # noqa: E731
    return lax.cond(emit, reduced, gather, x)

  emit = jax.ShapeDtypeStruct((), jnp.bool_)
  report = count(compiled(fun, emit, X, in_specs=(P(), ROWS)))
  assert report.outside == {"all-reduce": (1, BYTES), "all-gather": (1, WHOLE)}
  assert report.inside == {}


@on_cpu_and_tpu
@pytest.mark.parametrize(("kind", "nbytes", "fun"), [
  ("all-gather", 8 * 2**19, lambda x: lax.all_gather(x, "data", tiled=True)),
  # In large pieces: XLA for TPU turns small ones into all-reduces.
  ("reduce-scatter", 2**19, lambda x: lax.psum_scatter(x, "data", tiled=True)),
  ("all-to-all", 2**19, lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True)),
  ("collective-permute", 2**19, lambda x: lax.pshuffle(x, "data", [1, 2, 3, 4, 5, 6, 7, 0])),
  ("all-reduce", 2**19, lambda x: lax.pmax(x, "data")),
  ("all-reduce", 2**17, lambda x: lax.psum(x.astype(jnp.int8), "data")),
])  # fmt: skip
def test_each_kind_is_counted_with_its_bytes(kind, nbytes, fun, platform):
  x = jax.ShapeDtypeStruct((8 * 128, 1024), jnp.float32)
  report = count(compiled(lambda x: fun(x * 2.0), x, platform=platform))
  assert report.outside == {kind: (1, nbytes)}


def embedding_step(where):
  """The gradient of an embedding, over six microbatches, reduced in the loop or after it."""

  def loss_fn(table, ids):
    return jnp.mean(jnp.sum(table[ids], axis=-1) ** 2)

  def step(table, ids):
    def body(total, ids):
      loss_and_grad = jax.value_and_grad(loss_fn)(table, ids)
      if where == "inside":
        loss_and_grad = lax.pmean(loss_and_grad, "data")
      return jax.tree.map(jnp.add, total, loss_and_grad), None

    zeros = (jnp.zeros(()), jnp.zeros_like(table))
    total, _ = lax.scan(body, zeros, ids.reshape(6, -1))
    return lax.pmean(total, "data") if where == "outside" else total

  return step


@pytest.mark.parametrize(("platform", "chips"), [("cpu", 8), more("tpu", 8), ("tpu", 64)])
def test_a_reduction_of_every_microbatch_is_told_from_one_of_the_cycle(platform, chips):
  table = jax.ShapeDtypeStruct((100, 16), jnp.float32)
  ids = jax.ShapeDtypeStruct((64 * 12,), jnp.int32)
  reports = {}
  for where in ("inside", "outside"):
    program = compiled(
      embedding_step(where),
      table,
      ids,
      platform=platform,
      chips=chips,
      in_specs=(P(), ROWS),
      out_specs=P(),
    )
    reports[where] = count(program).at_least(100)
  nbytes = 100 * 16 * 4 + 4  # the loss travels with the gradient
  assert reports["outside"].outside == {"all-reduce": (1, nbytes)}
  assert reports["outside"].inside == {}
  assert reports["inside"].outside == {}
  times = PRINTED[platform] or 6
  assert reports["inside"].inside == {"all-reduce": (times, times * nbytes)}


PARAMS = {"w": np.zeros((32, 16), np.float32)}
GRADIENT = 32 * 16 * 4


def mean_loss(params, batch):
  return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)


def of_rows(params, batch):
  """The gradient of a device's own rows."""
  own = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
  return jax.grad(mean_loss)(own, batch)


def of_all(params, batch):
  return lax.pmean(of_rows(params, batch), "data")


def streaming(gradient, axis_name=None, in_a_scan=False, platform="cpu"):
  """The report on a call of `accumulate` in a shard_map, or on a scan of four."""
  mesh = devices.make_mesh(8, platform=platform)
  tx = accumulate(optax.sgd(0.1), 4, axis_name=axis_name)
  specs = accumulate_specs(jax.eval_shape(tx.init, PARAMS), "data") if axis_name else P()

  def call(held, batch):
    params, state = held
    return tx.apply(gradient(params, batch), state, params), lax.pmean(jnp.mean(batch), "data")

  def calls(held, batch):
    batches = batch.reshape(4, -1, 32) if in_a_scan else batch
    return lax.scan(call, held, batches) if in_a_scan else call(held, batches)

  specs = (P(), specs)
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs[1])
  held = PARAMS, jax.eval_shape(init, PARAMS)
  args = devices.abstract((held, np.zeros((64, 32), np.float32)), mesh, (specs, ROWS))
  mapped = jax.shard_map(calls, mesh=mesh, in_specs=(specs, ROWS), out_specs=(specs, P()))
  return count(jax.jit(mapped).lower(*args).compile())


@pytest.mark.parametrize(
  ("in_a_scan", "platform"), [(False, "cpu"), (False, "tpu"), (True, "cpu"), (True, "tpu")]
)
def test_a_gradient_that_is_summed_at_the_end_of_a_cycle_passes(in_a_scan, platform):
  report = streaming(of_rows, "data", in_a_scan, platform)
  times = PRINTED[platform] or (4 if in_a_scan else 1)
  assert report.at_cycle_end == {"all-reduce": (times, times * GRADIENT)}
  assert report.streaming == (not in_a_scan)
  report.assert_once_per_cycle()
  with pytest.raises(AssertionError, match="all-reduce"):  # the metric
    report.assert_once_per_cycle(nbytes=4)


@pytest.mark.parametrize(("in_a_scan", "times"), [(False, 1), (True, 4)])
def test_a_gradient_that_is_summed_in_every_microbatch_is_caught(in_a_scan, times):
  report = streaming(of_all, in_a_scan=in_a_scan)
  found = rf"(?s)In every microbatch .*\n  {times} a call: all-reduce .*f32\[32,16\].* from jit\("
  with pytest.raises(AssertionError, match=found + r".*psum.*mesh=.*to=\"varying\""):
    report.assert_once_per_cycle()
  # the metric may travel along
  report.assert_once_per_cycle(nbytes=GRADIENT + 5)


def test_gradients_that_the_compiler_sums_in_every_call_are_caught():
  mesh = devices.make_mesh(8)
  tx = accumulate(optax.sgd(0.1), 4)

  def call(params, state, batch):
    return tx.apply(jax.grad(mean_loss)(params, batch), state, params)

  args = PARAMS, jax.eval_shape(tx.init, PARAMS), np.zeros((64, 32), np.float32)
  args = devices.abstract(args, mesh, (P(), P(), ROWS))
  report = count(jax.jit(call).lower(*args).compile())
  assert report.at_cycle_end == {}
  with pytest.raises(AssertionError, match="all-reduce"):
    report.assert_once_per_cycle()
  assert "a call is one microbatch" in str(report)
  assert report.at_least(4).streaming


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_step_of_the_optimizer_runs_once_a_cycle(accumulates):
  """It has a loop, in which the devices exchange parts of what they hold."""
  tx = optax.stateless(lambda g, _: jax.tree.map(repeated(lambda x: jnp.tanh(x @ x.T @ x), 3), g))
  tx = optax.chain(accumulate(tx, 2)) if accumulates else tx
  mesh = devices.make_mesh(8)
  weigh = (lambda x: jnp.sum(x[:, 0])) if accumulates else None
  step = make_train_step(mean_loss, tx, num_microbatches=4, mesh=mesh, weight_fn=weigh)
  args = PARAMS, jax.eval_shape(tx.init, PARAMS), np.zeros((64, 32), np.float32)
  args = devices.abstract(args, mesh, ({"w": P(None, "data")}, P(), ROWS))
  report = count(step.lower(*args).compile())
  assert report.at_cycle_end == {"all-reduce": (3, 3 * 32 * 32 * 4)}
  # where `accumulate` takes a whole cycle in a call
  assert not report.streaming
  assert report.inside == {}
  report.assert_once_per_cycle()


def test_small_collectives_can_be_left_out():
  report = count(compiled(lambda x: x * lax.psum(jnp.sum(reduced(x)), "data"), X))
  assert report.outside == {"all-reduce": (2, BYTES + 4)}
  assert report.at_least(4) == report
  assert report.at_least(5).outside == {"all-reduce": (1, BYTES)}
  assert report.at_least(BYTES).outside == {"all-reduce": (1, BYTES)}
  assert report.at_least(BYTES + 1).operations == ()


def test_a_program_of_one_device_has_none():
  report = count(jax.jit(jnp.sin).lower(1.0).compile())
  assert (report.operations, report.inside, report.outside) == ((), {}, {})
  assert str(report) == "no collectives"


def module(entry, before=""):
  return f"HloModule m\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{entry}\n}}\n"


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


@pytest.mark.parametrize(("written", "groups"), [
  ("{{0,4},{1,5}}", ((0, 4), (1, 5))),
  ("{}", ()),
  ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
  ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
  ("mesh['replica'=2,'fsdp'=4] {'replica'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
  ("mesh['replica'=2,'fsdp'=4] {'fsdp'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
  ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
  ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
  ("mesh['a'=8] {'a':(1)2}", ()),  # a part of an axis, as pre-size and size
  ("mesh['a'=4], device_ids=(0,2,1,3) {'a'}", ()),
])  # fmt: skip
def test_the_devices_that_exchange_are_named(written, groups):
  line = f"ROOT %r = f32[4] all-reduce(%p), replica_groups={written}, to_apply=%add"
  (found,) = count(module(f"  %p = f32[4] parameter(0)\n  {line}", ADD)).operations
  assert groups_of(found) == groups


@pytest.mark.parametrize(
  ("entry", "expected"),
  [
    # Asynchronous forms: a start and its done are one.
    (
      "  %s = f32[4]{0:T(128)} all-reduce-start(%p), to_apply=%add\n"
      "  ROOT %d = f32[4]{0:T(128)} all-reduce-done(%s)",
      {"all-reduce": (1, 16)},
    ),
    (
      "  %s = (f32[4]{0}, f32[8]{0}) all-reduce-start(%p, %q), to_apply=%add\n"
      "  ROOT %d = (f32[4]{0}, f32[8]{0}) all-reduce-done(%s)",
      {"all-reduce": (1, 48)},
    ),
    (
      "  %s = (f32[4]{0}, f32[8,4]{1,0}) all-gather-start(%p), dimensions={0}\n"
      "  ROOT %d = f32[8,4]{1,0} all-gather-done(%s)",
      {"all-gather": (1, 128)},
    ),
    (
      "  %s = ((f32[4]{0}, s8[2]{0}), (f32[32]{0}, s8[16]{0})) all-gather-start(%p, %q)\n"
      "  ROOT %d = (f32[32]{0}, s8[16]{0}) all-gather-done(%s)",
      {"all-gather": (1, 144)},
    ),
    (
      "  %s = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)\n"
      "  ROOT %d = f32[4]{0} collective-permute-done(%s)",
      {"collective-permute": (1, 16)},
    ),
    (
      "  %p = f32[64]{0} parameter(0)\n"
      "  %s = ((f32[64]{0}), f32[8]{0}, u32[]) reduce-scatter-start(%p), to_apply=%add\n"
      "  ROOT %d = f32[8]{0} reduce-scatter-done(%s)",
      {"reduce-scatter": (1, 256)},
    ),
    (
      "  %s = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(%p), calls=%wrapped\n"
      "  %u = ((f32[4]{0}), f32[4]{0}, s32[]) async-update(%s), calls=%wrapped\n"
      "  ROOT %d = f32[4]{0} async-done(%u), calls=%wrapped",
      {"all-to-all": (1, 16)},
    ),
    # Several arrays in one operation; comments among them.
    (
      "  ROOT %r = (f32[4]{0}, bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=2*/f32[]{:T(128)})"
      " all-reduce(%p, %q, /*index=2*/%r), channel_id=1, to_apply=%add",
      {"all-reduce": (1, 16 + 12 + 4)},
    ),
    # Dtypes of less than a byte, dynamic dimensions, no elements.
    ("  ROOT %r = s4[3,3]{1,0:T(8,128)(8,1)E(4)} all-gather(%p)", {"all-gather": (1, 5)}),
    ("  ROOT %r = u2[4]{0} collective-broadcast(%p)", {"collective-broadcast": (1, 1)}),
    ("  ROOT %r = f4e2m1fn[16]{0} all-gather(%p)", {"all-gather": (1, 8)}),
    ("  ROOT %r = f8e4m3fn[16]{0} all-gather(%p)", {"all-gather": (1, 16)}),
    ("  ROOT %r = pred[16]{0} all-gather(%p)", {"all-gather": (1, 16)}),
    ("  ROOT %r = c64[2]{0} all-reduce(%p), to_apply=%add", {"all-reduce": (1, 16)}),
    ("  ROOT %r = f64[<=8,2]{1,0} ragged-all-to-all(%p)", {"ragged-all-to-all": (1, 128)}),
    ("  ROOT %r = f32[0,5]{1,0} all-gather(%p)", {"all-gather": (1, 0)}),
    # What may run it: both spellings of a conditional, calls, custom calls. Not a reducer.
    ("  ROOT %r = f32[4]{0} conditional(%i, %p, %p), branch_computations={%wrapped, %wrapped}",
      {"all-to-all": (2, 32)}),
    ("  ROOT %r = f32[4]{0} conditional(%i, %p, %p), true_computation=%wrapped, false_computation=%add",
      {"all-to-all": (1, 16)}),
    ("  ROOT %r = f32[4]{0} call(%p), to_apply=%wrapped", {"all-to-all": (1, 16)}),
    (
      "  %s = ((f32[4]{0}), f32[4]{0}, u32[]) call-start(%p), to_apply=%wrapped\n"
      "  ROOT %d = f32[4]{0} call-done(%s)",
      {"all-to-all": (1, 16)},
    ),
    ("  ROOT %r = f32[4]{0} map(%p), to_apply=%wrapped", {}),
    ('  ROOT %r = f32[4]{0} custom-call(%p), custom_call_target="T", called_computations={%wrapped}',
      {"all-to-all": (1, 16)}),
    # Text that only looks like it.
    ('  ROOT %r = f32[4]{0} add(%p, %p), metadata={op_name="x = f32[4] all-reduce("}', {}),
    ('  ROOT %r = f32[4]{0} custom-call(%p), backend_config="calls=%wrapped"', {}),
    ("  %all-reduce.1 = f32[4]{0} get-tuple-element(%p), index=0", {}),
    # Without percent signs.
    (
      "  p = f32[64]{0} parameter(0)\n"
      "  ROOT r = f32[8]{0} reduce-scatter(p), dimensions={0}, to_apply=add",
      {"reduce-scatter": (1, 256)},
    ),
  ],
)  # fmt: skip
def test_each_form_of_the_text_is_read(entry, expected):
  wrapped = """
%wrapped (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %t = f32[4]{0} all-to-all(%x), replica_groups=mesh['data'=8] {'data'}, dimensions={0}
}, execution_thread="parallel"
"""
  report = count(module(entry, ADD + wrapped))
  assert report.outside == expected
  assert report.inside == {}
  assert report.unknown_trip_counts == ()


def test_an_asynchronous_collective_that_is_spread_over_fusions_counts_once():
  part = """
%{name} (x: f32[4]) -> f32[32] {{
  %x = f32[4]{{0}} parameter(0)
  %g.{name} = f32[32]{{0}} all-gather(%x), channel_id=1, dimensions={{0}}, \
backend_config={{"async_collective_fusion_config":{{"flag_start":"2","flag_end":"8"}}}}
  ROOT %c = f32[32]{{0}} custom-call(%g.{name}){target}
}}
"""
  parts = "".join(
    part.format(name=name, target=f', custom_call_target="{target}"' if target else "")
    for name, target in [("a", "AsyncCollectiveStart"), ("b", ""), ("c", "AsyncCollectiveDone")]
  )
  entry = (
    "  %p = f32[4]{0} parameter(0)\n"
    "  %s = f32[32]{0} fusion(%p), kind=kCustom, calls=%a\n"
    "  %t = f32[32]{0} fusion(%p), kind=kOutput, calls=%b\n"
    "  ROOT %d = f32[32]{0} fusion(%p), kind=kCustom, calls=%c"
  )
  assert count(module(entry, parts)).outside == {"all-gather": (1, 128)}


def test_a_fusion_of_an_all_reduce_may_be_a_reduce_scatter():
  fused = """
%all-reduce-scatter.1 (x: f32[64]) -> f32[8] {
  %x = f32[64]{0} parameter(0)
  %r = f32[64]{0} all-reduce(%x), channel_id=1, to_apply=%add
  %i = s32[] constant(0)
  ROOT %s = f32[8]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={8}
}
"""
  entry = (
    "  %p = f32[64]{0} parameter(0)\n"
    "  ROOT %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1,"
    ' metadata={op_name="jit(f)/scatter"}'
  )
  report = count(module(entry, ADD + fused))
  assert report.outside == {"reduce-scatter": (1, 256)}
  assert report.operations[0].op_name == "jit(f)/scatter"


LOOP = """
%condition (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]{{0}}) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%c), index=1
  %t = f32[4]{{0}} all-to-all(%x), dimensions={{0}}
  ROOT %test = pred[] compare(%i, %limit), direction=LT
}}
%body (c: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %c = (s32[], f32[4]{{0}}) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%c), index=1
  %r = f32[4]{{0}} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %next = (s32[], f32[4]{{0}}) tuple(%moved, %r)
}}
"""
KNOWN = ', backend_config={{"known_trip_count":{{"n":"{}"}}}}'


@pytest.mark.parametrize(("annotation", "inside", "unknown"), [
  (KNOWN.format(5), {"all-reduce": (5, 80), "all-to-all": (6, 96)}, ()),
  (KNOWN.format(0), {"all-reduce": (0, 0), "all-to-all": (1, 16)}, ()),
  ("", {"all-reduce": (1, 16), "all-to-all": (1, 16)}, ("loop ()",)),
], ids=["five", "none", "not printed"])  # fmt: skip
def test_the_condition_of_a_loop_runs_once_more_than_its_body(annotation, inside, unknown):
  entry = (
    "  %p = f32[4]{0} parameter(0)\n"
    "  %carry = (s32[], f32[4]{0}) tuple(%start, %p)\n"
    "  %loop = (s32[], f32[4]{0}) while(%carry), condition=%condition, body=%body"
    f"{annotation}\n"
    "  ROOT %x = f32[4]{0} get-tuple-element(%loop), index=1"
  )
  report = count(module(entry, ADD + LOOP.format()))
  assert report.inside == inside
  assert report.outside == {}
  assert {c.loop for c in report.operations} == {"loop"}
  assert report.unknown_trip_counts == unknown


def test_the_report_prints_as_a_table():
  def fun(x):
    x = repeated(reduced, 3)(x)
    x = lax.while_loop(lambda x: jnp.sum(x) < 9.0, reduced, x)
    tx = accumulate(optax.stateless(lambda updates, _: reduced(updates)), 2)
    x = tx.update(x, tx.init(x), flush=x[0, 0] > 0.0)[0]
    return lax.all_gather(x, "data", tiled=True)

  report = count(compiled(fun, X))
  (name,) = report.unknown_trip_counts
  assert str(report) == (
    "per device and call             inside loops      at a cycle's end               outside\n"
    "                          ops          bytes    ops          bytes    ops          bytes\n"
    "all-reduce                  4          1,024      1            256      0              0\n"
    "all-gather                  0              0      0              0      1          2,048\n"
    f"counted once, a loop whose trips XLA does not print: {name}\n"
    "a call is one microbatch of accumulate, so what is outside runs in every one"
  )


def test_programs_that_are_not_compiled_are_refused():
  lowered = jax.jit(jnp.sin).lower(1.0)
  for program in (lowered, lowered.as_text(), ""):
    message = (
      rf"compiled={re.escape(repr(program)[:80])} is no optimized .* pass jax\.jit\(f\)\.lower"
    )
    with pytest.raises(ValueError, match=message):
      count(program)
