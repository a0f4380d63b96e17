"""What a process allocates for a planned step is within the limit of the plan."""

import pathlib
import subprocess
import sys

import pytest
from support import planned

from optax_accum import plan_microbatches

pytestmark = pytest.mark.usefixtures("usual_promotion")  # as users compile

# rows: 130 MB between the two; the program's code and threads are little to that
LARGE = 2**19
ALLOCATION = """
import sys
import jax, jax.numpy as jnp
from support.planned import build_mlp, mlp_args

def status(name):
  lines = open("/proc/self/status").read().splitlines()
  return 1024 * int(next(x for x in lines if x.startswith(name)).split()[1])

args = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), mlp_args(64, int(sys.argv[1])))
held = sum(x.nbytes for x in jax.tree.leaves(args))
for count in map(int, sys.argv[2:]):
  compiled = build_mlp(count).lower(*args).compile()
  given = *jax.tree.map(jnp.copy, args[:2]), args[2]
  jax.block_until_ready(given)
  before = status("VmRSS")
  open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
  jax.block_until_ready(compiled(*given))
  print(held + status("VmHWM") - before)
  del given
"""


def test_what_is_allocated_is_within_the_limit():
  args, rows = planned.mlp_args(64, LARGE), LARGE
  steps = planned.Compilations(planned.mlp_loss, args)
  limit = (steps.memory(8) + steps.memory(4)) // 2
  plan = plan_microbatches(steps.build_step, args, batch_size=rows, memory_limit=limit)
  assert plan.num_microbatches == 8
  command = [sys.executable, "-c", ALLOCATION, str(LARGE), "8", "4"]
  here = pathlib.Path(__file__).parents[1]
  run = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, text=True, check=True)
  allocated = dict(zip((8, 4), map(int, run.stdout.split()), strict=True))
  assert allocated[8] <= limit < allocated[4], (plan, allocated)
