"""Eight CPU devices and strict promotion; warnings are errors (pyproject.toml)."""

import collections
import gc
import os
import zlib

from support import fast_compile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + f" --xla_force_host_platform_device_count=8 {fast_compile.FLAGS}"
)

import hypothesis
import jax
import pytest

# libtpu, which reads the variable later, never had this flag.
flags = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = f"{flags} {fast_compile.EMITTERS}"
jax.devices()
os.environ["XLA_FLAGS"] = flags

# What is imported stays, and programs mostly do: to look at all of it takes a tenth of the time.
gc.freeze()
gc.set_threshold(100_000)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run of CI; elsewhere others each time.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
  hypothesis.settings.load_profile("ci")


# Before 0.10 a backward pass cannot add to references; test_in_place_errors.py asserts which can.
version = tuple(map(int, jax.__version__.split(".")[:2]))
collect_ignore = ["microbatches/test_in_place.py"] if version < (0, 10) else []


@pytest.fixture
def usual_promotion():
  """JAX as it comes, for flax, optax and what a page shows."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


# A case of each test of these runs on all versions.
SMOKE = {f"test_{name}.py" for name in (
  "accumulate", "carry", "donation", "flax_linen", "flax_nnx", "mesh", "settings", "train_step",
)}  # fmt: skip


def pytest_addoption(parser):
  text = "the I-th of N shares of the tests, a case of each, and of those of the smoke set"
  parser.addoption("--share", metavar="I/N", help=text)


@pytest.hookimpl(trylast=True)  # behind -m, of whose cases one is kept
def pytest_collection_modifyitems(config, items):
  """`.ci/run` has further versions run a case of each test of the smoke set, and of a share."""
  if config.getoption("--share") is None:
    return
  share, shares = map(int, config.getoption("--share").split("/"))
  assert 1 <= share <= shares, config.getoption("--share")
  cases = collections.defaultdict(list)
  for item in items:
    cases[item.path.name, item.nodeid.partition("[")[0]].append(item)

  def number(name):
    """By no pattern, or one share would have one value of a parameter alone."""
    return zlib.crc32(name.encode())

  kept = {
    id(each[(number(test) + share) % len(each)])
    for (file, test), each in cases.items()
    if file in SMOKE or number(test) % shares == share - 1
  }
  config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
  items[:] = [item for item in items if id(item) in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
  report = yield
  if report.failed and item.get_closest_marker("optax_bug"):
    advice = (
      "This test asserts what optax does wrong. If optax has fixed that, accumulate is not at"
      ' fault: remove the test, and what we say of it (grep MultiSteps). -m "not optax_bug" goes on'
      " without these tests."
    )
    report.sections.append(("optax_bug", advice))
  return report
