"""Eight CPU devices and strict promotion; warnings are errors (pyproject.toml)."""

from importlib import metadata
import os

# Code for the CPU is not optimised (the programs are), which compiles a third faster.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import hypothesis
import jax
import pytest

# Half the time to compile. Newer versions have one way to emit loops, and no such flag; libtpu,
# which reads the variable later, never had it.
flags = os.environ["XLA_FLAGS"]
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
  os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
jax.devices()
os.environ["XLA_FLAGS"] = flags

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run of CI; elsewhere others each time.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
  hypothesis.settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
  report = yield
  if report.failed and item.get_closest_marker("optax_bug"):
    advice = (
      "This test asserts what optax does wrong. If optax has mended that, accumulate is not at"
      ' fault: remove the test, and what we say of it (grep MultiSteps). -m "not optax_bug" goes on'
      " without these tests."
    )
    report.sections.append(("optax_bug", advice))
  return report
