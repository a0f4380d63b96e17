"""Long tables of cases that are alike: README's test command runs a sample, `.ci/run` the rest."""

import pytest


def more(*case):
  """A case that is like others, which run in its place: it is marked, and runs by ``-m more``."""
  return pytest.param(*case, marks=pytest.mark.more)


def first_of_each(cases, kind):
  """All of the cases, marked but for the first of each kind."""
  seen = set()
  for case in cases:
    parts = case if isinstance(case, tuple) else (case,)
    yield more(*parts) if kind(case) in seen else case
    seen.add(kind(case))


def alone_and_over_a_mesh(cases, kind):
  """All of the cases on one device, and the first of each kind over a mesh too.

  Of both, README's test command runs the first of each kind on one device.
  """
  seen = set()
  for case in cases:
    parts = case if isinstance(case, tuple) else (case,)
    if kind(case) in seen:
      yield more(*parts, False)
    else:
      yield (*parts, False)
      yield more(*parts, True)
    seen.add(kind(case))
