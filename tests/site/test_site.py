"""The built site: links, pages, what it fetches, and what its search finds.

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


@functools.cache
def soup(path):
  return BeautifulSoup(path.read_text(), "html.parser")


@functools.cache
def anchors(path):
  if not path.is_file():
    return set()
  named = [tag["name"] for tag in soup(path).find_all("a", attrs={"name": True})]
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
  web = parts.scheme in ("http", "https", "") and parts.hostname not in (None, "localhost")
  return web or parts.scheme in ("mailto", "data")


def broken(page, root=SITE):
  """The references of a page to files and anchors that are not in the site."""
  found = []
  for _, url in references(page):
    path, anchor = urldefrag(url)
    if outside(url):
      continue
    target = (page.parent / unquote(urlsplit(path).path)).resolve() if path else page
    lacks = anchor and target.suffix == ".html" and unquote(anchor) not in anchors(target)
    elsewhere = not target.is_relative_to(page.parents[len(page.relative_to(root).parts) - 1])
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
  wrong = ["#no", "gone.svg", "../beside.html", "file:///etc/hosts", "http://localhost/x"]
  links = "".join(f'<a href="{url}"></a>' for url in wrong)
  page.write_text(f'<a href="#here" id="here"></a><img srcset="a.png 2x">{links}')
  assert sorted(broken(page, tmp_path)) == sorted([*wrong, "a.png"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(SITE)))
def test_a_page_fetches_nothing_from_elsewhere(page):
  """Links may lead outside. Scripts, styles, fonts and pictures are all in the site."""
  kept = {tag.name for tag, url in references(page) if outside(url) and not url.startswith("data:")}
  assert kept <= {"a"}
  assert not soup(page).find_all(["iframe", "object", "embed"])
  styles = [tag.get_text() for tag in soup(page).find_all("style")]
  styles += [tag["style"] for tag in soup(page).find_all(style=True)]
  assert fetched_by("\n".join(styles)) == []
  scripts = "\n".join(tag.get_text() for tag in soup(page).find_all("script"))
  assert not re.search(r"\bimport\b|\bfetch\(|XMLHttpRequest|require\(|//[\w-]+\.", scripts)


def fetched_by(style):
  return re.findall(r"(?i)(?:@import\s*|(?:url|set)\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)", style)


def test_a_style_fetches_nothing_from_elsewhere():
  styles = list(SITE.rglob("*.css"))
  assert styles
  assert [url for path in styles for url in fetched_by(path.read_text())] == []
  assert fetched_by("@import 'https://x/y'; a {src: url(//z)}") == ["https://x/y", "//z"]


def hosts_in(script):
  """The hosts that a script names, outside of comments."""
  code = re.sub(r"/\*.*?\*/|(?:^|\s)//\s[^\n]*", "", script, flags=re.DOTALL | re.MULTILINE)
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
  signature = soup(SITE / "reference" / "returned.html" if is_result else page).find(id=path)
  assert signature is not None
  # to its source
  assert signature.find("a", class_="internal", string=None) is not None
  if not is_result:
    index = soup(SITE / "reference" / "functions.html")
    assert index.find("a", href=re.compile(f"generated/{re.escape(path)}.html")) is not None


def test_a_name_in_code_leads_to_its_page():
  page = soup(SITE / "index.html")
  links = page.select("article a.reference.internal code")
  assert "make_train_step" in [link.get_text() for link in links]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_contents_of_a_page_list_the_parts_of_its_docstring(function):
  pages = SITE.glob(f"reference/generated/optax_accum*.{function.__name__}.html")
  listed = [a.get_text() for path in pages for a in soup(path).select(".toc-tree a")]
  parts = re.findall(r"^([A-Z][\w ]+):\n", inspect.cleandoc(function.__doc__), re.MULTILINE)
  assert listed == [function.__name__, *("Parameters" if x == "Args" else x for x in parts)]


def hits(word):
  """The pages that the site's search finds for a word, those with it in a title first."""
  text = (SITE / "searchindex.js").read_text()
  index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)\s*", text, re.DOTALL)[1])
  numbers = []
  for terms in (index["titleterms"], index["terms"]):
    found = terms.get(word, [])
    numbers += found if isinstance(found, list) else [found]
  return [index["docnames"][i] for i in numbers]


def test_the_search_finds_the_right_pages():
  assert {"guides/as_they_arrive", "reference/generated/optax_accum.accumulate"} <= set(
    hits("flush")
  )
  assert "guides/troubleshooting" in hits("nan")[:1]  # in a title
  assert "reference/errors" in hits("disagre")  # as stemmed, of a message
  assert "faq" in hits("learn")[:2]  # learning rate, in a title
  assert "faq" in hits("rate")[:2]
  assert "guides/logging" in hits("ema")[:3]
  assert {"losses"} <= set(hits("grpo")[:2]) & set(hits("ppo")[:2])
  for word in ("teacher", "dataload", "stream"):
    assert hits(word), word
  assert "changelog" not in hits("flush")  # it has every word
  assert "reference/generated/optax_accum.make_train_step" in hits("aux_reduct")
  # Excerpts of the pages, from the element that Sphinx's search takes them from.
  options = (SITE / "_static" / "documentation_options.js").read_text()
  assert "SHOW_SEARCH_SUMMARY: true" in options
  assert all(soup(SITE / f"{name}.html").select_one('[role="main"]') for name in hits("flush"))


def test_the_table_of_ways_to_shard_fits_a_narrow_window():
  table = soup(SITE / "guides" / "sharded_state.html").find("table")
  _, *heads = (cell.get_text() for cell in table.find_all("th"))
  cells = [cell.get_text().strip() for row in table.select("tbody tr") for cell in row("td")[1:]]
  assert len(heads) == 5
  assert max(map(len, [*heads, *cells])) <= 6


def test_the_start_page_has_the_diagram_before_code_and_a_check():
  page = str(soup(SITE / "index.html"))
  assert page.index("decision.svg") < page.index("highlight-python")
  assert "step.check(" in soup(SITE / "index.html").get_text()


def varying(table):
  """Whether each column of a table has more than one value, where it has rows to differ."""
  rows = [[cell.get_text() for cell in row.find_all("td")] for row in table.select("tbody tr")]
  return len(rows) < 2 or all(len(set(column)) > 1 for column in zip(*rows, strict=True))


def test_no_column_of_a_measurement_is_the_same_in_all_rows():
  tables = soup(SITE / "performance.html").find_all("table")
  assert len(tables) == 4
  assert all(varying(table) for table in tables)
  same = "<tbody><tr><td>a</td><td>0</td></tr><tr><td>b</td><td>0</td></tr></tbody>"
  assert not varying(BeautifulSoup(f"<table>{same}</table>", "html.parser"))
