"""README is true: its snippets run, and its tables and figures are those of the code."""

import inspect
import json
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest
from support import trees
from support.pages import code_of

import optax_accum
from optax_accum.flax import linen_train_step, nnx_train_step

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = code_of(README)

# A figure, and the file, table, row and column that has it.
FIGURES = [
  ("1.00 of the time", ("whole_cycle", 0, "optax_accum, N=8", "time / scan")),
  ("33 P of temporary", ("whole_cycle", 0, "optax_accum, N=8", "temp, P")),
  ("253 P", ("whole_cycle", 0, "whole batch at once", "temp, P")),
  ("without it 2.48 P", ("memory_tpu", 0, "plain", "temp, P")),
  ("1.33 P on a TPU", ("memory_tpu", 0, "in_place", "temp, P")),
  ("(2.07 P)", ("memory_gpu", 0, "plain", "temp, P")),
  ("1.10 P on an H100", ("memory_gpu", 0, "in_place", "temp, P")),
  ("| 12 times that", ("streaming", 1, "apply", "MultiSteps / this")),
  (
    "1.2 times that of `apply`",
    ("streaming_gpu", 1, "apply", "MultiSteps / this"),
  ),
  ("13 P, the whole", ("whole_cycle_gpu", 0, "optax_accum, N=8", "temp, P")),
  ("batch 87 P.", ("whole_cycle_gpu", 0, "whole batch at once", "temp, P")),
  ("| 3.0 P |", ("streaming", 1, "MultiSteps", "temp, P")),
  ("| 0 P |", ("streaming", 1, "apply", "temp, P")),
  ("| 40 (26.3 MiB) |", ("collectives", 0, "optax.MultiSteps, scanned", "reductions in loops")),
  ("| 1 (3.3 MiB) |", ("collectives", 0, "optax_accum", "reductions outside")),
]

# README's code is for JAX as it comes
pytestmark = pytest.mark.usefixtures("usual_promotion")


def run(*snippets):
  names = {"__name__": "readme"}
  for snippet in snippets:
    exec(compile(snippet, "README.md", "exec"), names)
  return names


def fenced(language):
  return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_readme_is_short():
  assert len(README.splitlines()) <= 150


def test_all_code_is_known():
  found = re.findall(r"^```(\S+)", README, re.MULTILINE)
  assert set(found) == {"sh", "diff", "python", "text"}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_runs_alone(snippet):
  run(snippet)


def test_snippets_run_one_after_another():
  names = run(*SNIPPETS)
  assert names["metrics"]["loss"] < 2


def test_the_first_snippet_ends_with_a_check(capsys):
  assert SNIPPETS[0].rstrip().endswith("print(step.check(params, opt_state, batch))")
  run(SNIPPETS[0])
  assert "check_split: ok" in capsys.readouterr().out


def test_both_sides_of_the_diff_are_one_step():
  (diff,) = fenced("diff")
  lines = diff.splitlines()
  before, after = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
  start = run(SNIPPETS[0])
  rows = {"x": start["x"], "y": jnp.sin(start["x"]).sum(axis=1)}
  results = []
  for code in before, after:
    names = {**start, "optax": optax}
    exec(code, names)
    params = jnp.ones(16)
    results.append(names["step"](params, start["tx"].init(params), rows))
  (params, state, metrics), (new_params, new_state, new_metrics) = results
  assert not jnp.array_equal(params, jnp.ones(16))
  trees.assert_close((params, state), (new_params, new_state), 1e-5)
  assert float(metrics["loss"]) == pytest.approx(float(new_metrics["loss"]), rel=1e-5)


def test_what_a_masked_loss_prints_is_what_readme_says():
  start = run(SNIPPETS[0])

  def masked(params, batch):
    errors = (batch["x"] @ params - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()

  rows = jax.tree.map(lambda x: x[:8], start["batch"])
  rows["mask"] = jnp.array([1.0, 1, 1, 0, 1, 0, 1, 1])
  step = optax_accum.make_train_step(masked, start["tx"], num_microbatches=4)
  report = str(step.check(start["params"], start["opt_state"], rows))
  shown = fenced("text")[0].splitlines()
  assert report.splitlines()[: len(shown)] == shown


def options_table():
  """The cells by option, of the table whose columns are functions."""
  found = re.search(r"^\| option .*?(?=\n\n)", README, re.DOTALL | re.MULTILINE)
  header, _, *rows = found[0].splitlines()
  columns = [cell.strip() for cell in header.split("|")[2:-1]]
  for row in rows:
    first, *cells = (cell.strip() for cell in row.split("|")[1:-1])
    by_column = dict(zip(columns, cells, strict=True))
    for name in re.findall(r"`(\w+)`", first):
      yield name, by_column


def flax_takes(option):
  def loss_fn(variables, batch, rngs):
    return 0.0

  def loss_of(model, batch):
    return 0.0

  taken = set()
  for make, loss in (linen_train_step, loss_fn), (nnx_train_step, loss_of):
    try:
      make(loss, **{option: object()})
    except TypeError as error:
      unknown = re.search("takes no|has no option|unexpected keyword", str(error))
      taken.add(unknown is None)
    except ValueError:
      taken.add(True)
    else:
      taken.add(True)
  (found,) = taken  # both, or neither
  return found


def test_a_function_takes_the_options_that_the_table_says():
  table = list(options_table())
  assert len(table) >= 10
  for option, cells in table:
    for column, cell in cells.items():
      if column == "Flax steps":
        takes = flax_takes(option)
      else:
        takes = option in inspect.signature(getattr(optax_accum, column.strip("`"))).parameters
      assert takes == (cell == "yes"), (option, column)


def test_the_table_of_options_is_short():
  table = list(options_table())  # which keeps the rows, so that each has an id of its own
  assert len({id(cells) for _, cells in table}) <= 18


def test_the_oldest_versions_are_those_of_the_project():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  required = [*project["dependencies"], *project["optional-dependencies"]["flax"]]
  floors = dict(x.split(">=") for x in required if ">=" in x)
  text = " ".join(README.split())
  for package in ("jax", "optax", "flax"):
    name = {"jax": "JAX", "optax": "Optax", "flax": "Flax"}[package]
    assert f"{name} {floors[package]}" in text
  assert f"tested with JAX {floors['jax']} and JAX " in text


def test_the_versions_of_the_figures_are_told():
  told = re.search(r"of versions (.+?), with JAX (.+?)\. ", " ".join(README.split()))
  results = [
    json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for name in {where[0] for _, where in FIGURES}
  ]
  ours = {result["versions"]["optax_accum"] for result in results}
  jaxes = {result["versions"]["jax"].rpartition(".")[0] for result in results}
  assert set(re.findall(r"\d[\d.]*\d", " ".join(told.groups()))) == ours | jaxes


def recorded(name, table, first, column):
  found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["tables"][
    table
  ]
  (row,) = (r for r in found["rows"] if first in r)
  return row[found["columns"].index(column)]


@pytest.mark.parametrize(("claim", "where"), FIGURES)
def test_a_figure_is_what_a_benchmark_printed(claim, where):
  assert claim in " ".join(README.split())
  written = re.search(r"\d+(?:\.(\d+))?", claim)
  assert written[0] == f"{recorded(*where):.{len(written[1] or '')}f}"
