"""Pictures are not older than the results of the benchmarks, and these say how they were made."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs" / "_static").glob("*.svg"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def drawn_on(svg):
  """The second, as matplotlib notes it: of the clock of where it was drawn, so draw in UTC."""
  return re.search(r"<dc:date>(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2})", svg)[1]


def older(svg, results):
  return [r["command"] for r in results if r["date"] > drawn_on(svg)]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.name)
def test_no_picture_is_older_than_a_result(picture):
  assert older(picture.read_text(), [json.loads(path.read_text()) for path in RESULTS]) == []


def test_an_older_picture_is_found():
  svg = "<dc:date>2026-01-31T09:00:00.1</dc:date>"
  times = ("2026-01-31T08:59:59+00:00", "2026-01-31T09:00:30+00:00", "2026-02-01T00:00:00+00:00")
  assert older(svg, [{"command": time, "date": time} for time in times]) == list(times[1:])


def test_there_are_pictures_and_results():
  assert PICTURES
  assert len(RESULTS) >= 5


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_a_result_says_how_it_was_made(path):
  result = json.loads(path.read_text())
  assert {"command", "date", "machine", "versions", "tables"} == set(result)
  assert result["command"].startswith("python benchmarks/")
  assert {"cpu", "cores", "device"} <= set(result["machine"])
  assert {"python", "jax", "jaxlib", "optax", "optax_accum"} <= set(result["versions"])
  for table in result["tables"]:
    assert table["rows"]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
