"""The pairs of docs/migrating.md that need PyTorch, which is too large for the `test` extra."""

import optax
import pytest
from support import migrating
from support.migrating import Pair

TX = optax.sgd(0.5, momentum=0.9)

# a page's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


def linear(params, x):
  w, b = params
  return x @ w + b


def trained(names):
  """The parameters of the loop that ran: PyTorch's, once its loss has been called."""
  model, params = names["model"], names["params"]
  if "opt_state" in names:
    return [params["w"], params["b"]]
  return [model.weight.detach().numpy().T, model.bias.detach().numpy()]


def test_the_loop_of_pytorch_has_the_same_steps():
  _, after = migrating.PAGE.blocks("`optax.MultiSteps`")
  assert "optax.adam(0.01)" in after
  after = after.replace("optax.adam(0.01)", "optax.sgd(0.5, momentum=0.9)")
  pair = Pair("PyTorch", trained, linear, TX, after=after)
  migrating.assert_a_pair(pair, "uneven", "cut short")
