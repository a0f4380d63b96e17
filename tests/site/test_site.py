"""The built site: links, pages, what ran, what it fetches, and what its search finds.

Run by name, after `sphinx-build -W -E -j auto docs docs/_build`; the suite alone does not build it.
"""

import functools
import inspect
import json
import pathlib
import re
from urllib.parse import unquote, urldefrag, urlsplit

from bs4 import BeautifulSoup
import pytest
from support.public import FUNCTIONS, PUBLIC

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SITE = DOCS / "_build"
PAGES = sorted(SITE.rglob("*.html"))
GUIDES = sorted(
  p.stem for p in (DOCS / "guides").glob("*.md") if p.stem != "index"
)
OTHERS = [
  "index",
  "losses",
  "when_not",
  "how_it_works",
  "performance",
  "reference/errors",
]
EXECUTED = [*OTHERS, *(f"guides/{name}" for name in GUIDES)]


@functools.cache
def soup(path):
  return BeautifulSoup(path.read_text(), "html.parser")


@functools.cache
def anchors(path):
  if not path.is_file():
    return set()
  named = [
    tag["name"] for tag in soup(path).find_all("a", attrs={"name": True})
  ]
  return {*named, *(tag["id"] for tag in soup(path).find_all(id=True))}


def references(page):
  """What a page refers to, as it is written, and the tag."""
  for tag in soup(page).find_all(True):
    for key in ("href", "xlink:href", "src", "data", "poster", "action"):
      if tag.get(key):
        yield tag, tag[key]
    for candidate in filter(None, tag.get("srcset", "").split(",")):
      yield tag, candidate.split()[0]


def outside(url):
  """Whether it leads to another site. A file or a server of this machine is no other site."""
  parts = urlsplit(url)
  web = parts.scheme in ("http", "https", "") and parts.hostname not in (
    None,
    "localhost",
  )
  return web or parts.scheme in ("mailto", "data")


def broken(page, root=SITE):
  """The references of a page to files and anchors that are not in the site."""
  found = []
  for _, url in references(page):
    path, anchor = urldefrag(url)
    if outside(url):
      continue
    target = (
      (page.parent / unquote(urlsplit(path).path)).resolve() if path else page
    )
    lacks = (
      anchor
      and target.suffix == ".html"
      and unquote(anchor) not in anchors(target)
    )
    elsewhere = not target.is_relative_to(
      page.parents[len(page.relative_to(root).parts) - 1]
    )
    if lacks or elsewhere or not target.is_file():
      found.append(url)
  return found


def test_there_is_a_site():
  assert len(PAGES) > 40, f"build it first: sphinx-build -W -j auto docs {SITE}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(SITE)))
def test_every_link_and_anchor_within_the_site_resolves(page):
  assert broken(page) == []


def test_a_broken_link_is_found(tmp_path):
  page = tmp_path / "page.html"
  (tmp_path.parent / "beside.html").write_text("")
  wrong = [
    "#no",
    "gone.svg",
    "../beside.html",
    "file:///etc/hosts",
    "http://localhost/x",
  ]
  links = "".join(f'<a href="{url}"></a>' for url in wrong)
  page.write_text(
    f'<a href="#here" id="here"></a><img srcset="a.png 2x">{links}'
  )
  assert sorted(broken(page, tmp_path)) == sorted([*wrong, "a.png"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(SITE)))
def test_a_page_fetches_nothing_from_elsewhere(page):
  """Links may lead outside. Scripts, styles, fonts and pictures are all in the site."""
  kept = {
    tag.name
    for tag, url in references(page)
    if outside(url) and not url.startswith("data:")
  }
  assert kept <= {"a"}
  assert not soup(page).find_all(["iframe", "object", "embed"])
  styles = [tag.get_text() for tag in soup(page).find_all("style")]
  styles += [tag["style"] for tag in soup(page).find_all(style=True)]
  assert fetched_by("\n".join(styles)) == []
  scripts = "\n".join(tag.get_text() for tag in soup(page).find_all("script"))
  assert not re.search(
    r"\bimport\b|\bfetch\(|XMLHttpRequest|require\(|//[\w-]+\.", scripts
  )


def fetched_by(style):
  return re.findall(
    r"(?i)(?:@import\s*|(?:url|set)\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)",
    style,
  )


def test_a_style_fetches_nothing_from_elsewhere():
  styles = list(SITE.rglob("*.css"))
  assert styles
  assert [url for path in styles for url in fetched_by(path.read_text())] == []
  assert fetched_by("@import 'https://x/y'; a {src: url(//z)}") == [
    "https://x/y",
    "//z",
  ]


def hosts_in(script):
  """The hosts that a script names, outside of comments."""
  code = re.sub(
    r"/\*.*?\*/|(?:^|\s)//\s[^\n]*", "", script, flags=re.DOTALL | re.MULTILINE
  )
  return set(re.findall(r"(?:https?:|[\"'`])//([\w.-]+\.\w+)", code))


def test_a_script_names_no_other_host():
  scripts = list(SITE.rglob("*.js"))
  assert scripts
  named = set().union(*(hosts_in(path.read_text()) for path in scripts))
  assert named <= {"www.w3.org"}  # the name space of SVG
  script = "/* https://a.org */ f('//cdn.b.org/x');\n// https://c.org\nfetch(`https://d.org/y`)"
  assert hosts_in(script) == {"cdn.b.org", "d.org"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_a_page(name):
  module = ".flax" if "_flax" in PUBLIC[name].__module__ else ""
  path = f"optax_accum{module}.{name}"
  page = SITE / "reference" / "generated" / f"{path}.html"
  is_result = inspect.isclass(PUBLIC[name]) and not module
  assert page.is_file() != is_result  # the types of results have one page
  signature = soup(
    SITE / "reference" / "returned.html" if is_result else page
  ).find(id=path)
  assert signature is not None
  # to its source
  assert signature.find("a", class_="internal", string=None) is not None
  if not is_result:
    index = soup(SITE / "reference" / "index.html")
    assert (
      index.find("a", href=re.compile(f"generated/{re.escape(path)}.html"))
      is not None
    )


@pytest.mark.parametrize(
  "function", FUNCTIONS, ids=lambda function: function.__name__
)
def test_the_contents_of_a_page_list_the_parts_of_its_docstring(function):
  pages = SITE.glob(
    f"reference/generated/optax_accum*.{function.__name__}.html"
  )
  listed = [
    a.get_text() for path in pages for a in soup(path).select(".toc-tree a")
  ]
  parts = re.findall(
    r"^([A-Z][\w ]+):\n", inspect.cleandoc(function.__doc__), re.MULTILINE
  )
  assert listed == [
    function.__name__,
    *("Parameters" if x == "Args" else x for x in parts),
  ]


def test_every_example_is_on_its_page():
  page = soup(SITE / "examples.html").get_text()
  for path in DOCS.parent.glob("examples/*.py"):
    assert path.name in page
    assert "".join(path.read_text().split()) in "".join(page.split()), path.name


@pytest.mark.parametrize("name", EXECUTED)
def test_every_snippet_of_a_guide_was_run(name):
  source = (DOCS / f"{name}.md").read_text()
  cells = re.findall(r"^```\{code-cell\}", source, re.MULTILINE)
  assert cells
  assert other_fences(source) == []
  assert not re.search(r"skip-execution|raises-exception|remove-stderr", source)
  page = soup(SITE / f"{name}.html")
  assert len(page.select("div.cell")) == len(cells)
  assert page.select("div.cell_output")
  assert not page.select(".output.traceback, .stderr")


def test_guides_stand_in_four_groups():
  """Each once in the table of its group, and there are few enough to choose from."""
  tables = re.split(
    r"^## ", (DOCS / "guides" / "index.md").read_text(), flags=re.MULTILINE
  )[1:]
  groups = {
    table.partition("\n")[0]: re.findall(r"\]\((\w+)\.md\)", table)
    for table in tables
  }
  assert list(groups) == [
    "Start",
    "Your loss",
    "Your model",
    "Devices and memory",
  ]
  assert sorted(name for names in groups.values() for name in names) == GUIDES
  assert len(GUIDES) <= 14
  trees = re.findall(
    r":caption: Guides: (.*)\n\n([^`]*)```", (DOCS / "index.md").read_text()
  )
  listed = {
    name.capitalize(): re.findall(r"guides/(\w+)", tree) for name, tree in trees
  }
  listed["Start"].remove("index")
  assert listed == groups


@pytest.mark.parametrize("name", GUIDES)
def test_the_code_that_is_not_folded_is_no_longer_than_the_prose(name):
  source = (DOCS / "guides" / f"{name}.md").read_text()
  cells = re.findall(
    r"^```\{code-cell\}\n(.*?)^```$", source, re.MULTILINE | re.DOTALL
  )
  seen = [cell for cell in cells if "hide-" not in cell]
  prose = re.sub(
    r"\A---.*?^---$|^```.*?^```$", "", source, flags=re.MULTILINE | re.DOTALL
  )
  assert len(" ".join(seen).split()) <= len(prose.split())


def other_fences(source):
  """What opens a block of code that is neither run nor a shell's or plain text."""
  found = re.findall(
    r"^[ ]*(`{3,}|~{3,}|:{3,})[ ]*(\S.*)$", source, re.MULTILINE
  )
  allowed = r"\{code-cell\}.*|sh|text|\{(raw|toctree|admonition|container)\}.*"
  allowed += r"|\{dropdown\} `losses_setup.py`.*|\{literalinclude\} losses_setup.py"  # imported
  return [opening for _, opening in found if not re.fullmatch(allowed, opening)]


def test_a_snippet_that_is_not_run_is_found():
  fences = "```python\n```\n  ~~~ py\n~~~\n:::{code-block} x\n:::\n```{code-cell}\n```\n```sh\n```"
  assert other_fences(fences) == ["python", "py", "{code-block} x"]


def hits(word):
  """The pages that the site's search finds for a word, those with it in a title first."""
  text = (SITE / "searchindex.js").read_text()
  index = json.loads(
    re.fullmatch(r"Search\.setIndex\((.*)\)\s*", text, re.DOTALL)[1]
  )
  numbers = []
  for terms in (index["titleterms"], index["terms"]):
    found = terms.get(word, [])
    numbers += found if isinstance(found, list) else [found]
  return [index["docnames"][i] for i in numbers]


def test_the_search_finds_the_right_pages():
  assert {
    "guides/streaming",
    "reference/generated/optax_accum.accumulate",
  } <= set(hits("flush"))
  assert {"sharp_edges", "guides/troubleshooting"} <= set(hits("nan"))
  assert "reference/errors" in hits("disagre")  # as stemmed, of a message
  assert "faq" in hits("learn")[:2]  # learning rate, in a title
  assert "faq" in hits("rate")[:2]
  # it is in a title
  assert set(hits("nan")[:2]) == {
    "sharp_edges",
    "guides/troubleshooting",
  }
  assert "changelog" not in hits("flush")  # it has every word
  assert "reference/generated/optax_accum.make_train_step" in hits("aux_reduct")
  # Excerpts of the pages, from the element that Sphinx's search takes them from.
  options = (SITE / "_static" / "documentation_options.js").read_text()
  assert "SHOW_SEARCH_SUMMARY: true" in options
  assert all(
    soup(SITE / f"{name}.html").select_one('[role="main"]')
    for name in hits("flush")
  )


def test_the_table_of_ways_to_shard_fits_a_narrow_window():
  table = soup(SITE / "guides" / "sharded_state.html").find("table")
  _, *heads = (cell.get_text() for cell in table.find_all("th"))
  cells = [
    cell.get_text().strip()
    for row in table.select("tbody tr")
    for cell in row("td")[1:]
  ]
  assert len(heads) == 5
  assert max(map(len, [*heads, *cells])) <= 6


def test_the_start_page_has_the_diagram_before_code_and_ends_with_a_check():
  page = str(soup(SITE / "index.html"))
  assert page.index('id="decision-title"') < page.index('class="cell ')
  cells = re.findall(
    r"^```\{code-cell\}\n(.*?)^```$",
    (DOCS / "index.md").read_text(),
    re.M | re.S,
  )
  assert "print(step.check(" in cells[-1]
  assert "fix: weight_fn=" in soup(SITE / "index.html").get_text()


def test_sharp_edges_begin_with_those_that_raise_no_error():
  page = soup(SITE / "sharp_edges.html")
  sections = [
    tag for tag in page.find_all("section") if tag.find("h2", recursive=False)
  ]
  assert "no error" in sections[0].h2.get_text()
  silent = [
    " ".join(tag.get_text().split()) for tag in sections[0].find_all("section")
  ]
  assert len(silent) >= 8
  assert all(
    "Found " in text or "No check finds this." in text for text in silent
  )


def test_errors_are_messages_without_buttons():
  page = soup(SITE / "reference" / "errors.html").find("article")
  assert not page.find_all("details")
  assert len(page.select(".errors dt code")) > 40


def varying(table):
  """Whether each column of a table has more than one value, where it has rows to differ."""
  rows = [
    [cell.get_text() for cell in row.find_all("td")]
    for row in table.select("tbody tr")
  ]
  return len(rows) < 2 or all(
    len(set(column)) > 1 for column in zip(*rows, strict=True)
  )


def test_no_column_of_a_measurement_is_the_same_in_all_rows():
  tables = soup(SITE / "performance.html").find_all("table")
  assert len(tables) > 15
  assert all(varying(table) for table in tables)
  same = (
    "<tbody><tr><td>a</td><td>0</td></tr><tr><td>b</td><td>0</td></tr></tbody>"
  )
  assert not varying(BeautifulSoup(f"<table>{same}</table>", "html.parser"))
