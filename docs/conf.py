"""How Sphinx builds the site: `sphinx-build -W -E -j auto docs docs/_build`.

Pages are plain Markdown, which reads as well in the repository. What only the site has is added here:
the navigation, and a link from each of our names in code to its page. Nothing runs: tests run the code
of pages.
"""

import inspect
import pathlib
import sys

from docutils import nodes
from sphinx import addnodes

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import optax_accum
import optax_accum.flax

project, author = "optax_accum", "optax_accum authors"
copyright = f"2026, {author}"
release = version = optax_accum.__version__

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

# By caption, as the sidebar has them.
NAVIGATION = {
  "Start": [
    "faq",
    "migrating",
    "guides/logging",
    "guides/as_they_arrive",
    "guides/checkpoints",
    "guides/batch_size",
    "when_not",
  ],
  "Your loss": ["losses", "guides/check", "guides/contrastive"],
  "Your model": [
    "guides/flax_linen",
    "guides/nnx_equinox_haiku",
    "guides/half_precision",
  ],
  "Devices and memory": [
    "guides/choosing",
    "guides/devices",
    "guides/sharded_state",
    "guides/state_on_host",
  ],
  "More": [
    "sharp_edges",
    "guides/troubleshooting",
    "examples",
    "performance",
    "how_it_works",
    "glossary",
    "reference/index",
    "changelog",
    "contributing",
  ],
}

myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Docstrings. A name in single backticks is a link where this site has a page for it.
default_role = "py:obj"
add_module_names = False
autodoc_typehints = (
  "none"  # the signature has the names, the docstring says what they take
)
autodoc_member_order = "bysource"
autosummary_generate = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = [
  "The loss",
  "What is carried",
  "Over a mesh",
  "The optimizer",
  "A reduction of your own",
  "Differentiation",
  "Calls",
  "Edge cases",
  # The options of a function that has many, those that most people need first.
  ("Randomness and carried state", "params_style"),
  ("Robustness and monitoring", "params_style"),
  ("Several devices", "params_style"),
  ("Expert options", "params_style"),
]
napoleon_use_rtype, napoleon_use_ivar = False, True
python_maximum_signature_line_length = 80

# A link to a name of ours that leads nowhere ends the build. Arguments, fields and names of other
# packages have no page here: they are code.
nitpicky = True
nitpick_ignore_regex = [
  ("py:.*", r"(?!optax_accum\.).*"),
  ("py:.*", r"optax_accum\.(?!flax\.)\w+\..*"),
]

html_theme = "furo"
html_title = "optax_accum"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style, pygments_dark_style = "a11y-light", "github-dark"


def add_navigation(app, docname, source):
  """The trees that the sidebar shows: of the start page, and of the reference."""
  trees = {"index": NAVIGATION, "reference/index": {"": REFERENCE}}
  for caption, pages in trees.get(docname, {}).items():
    lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages]
    if not caption:
      lines.remove(":caption: ")
    source[0] += "\n\n" + "\n".join([*lines, "```"])


REFERENCE = ["functions", "returned", "errors"]


def link_names(app, doctree):
  """A name of ours in code leads to its page."""
  if app.env.docname.startswith("reference/functions"):
    return
  for literal in list(doctree.findall(nodes.literal)):
    target = PAGES.get(literal.astext())
    inside = (nodes.reference, nodes.title, addnodes.pending_xref)
    linked = any(isinstance(literal.parent, kind) for kind in inside)
    if target is None or linked:
      continue
    options = {"refdomain": "py", "reftype": "obj", "reftarget": target}
    link = addnodes.pending_xref("", refdoc=app.env.docname, **options)
    literal.replace_self(link)
    link += literal


PAGES = {
  name: f"{module.__name__}.{name}"
  for module in (optax_accum, optax_accum.flax)
  for name, value in inspect.getmembers(module)
  if inspect.isfunction(value) and not name.startswith("_")
}


def skip_fields(app, what, name, value, skip, options):
  """The fields of a named tuple are in its docstring, in better words than Python has for them."""
  return skip or type(value).__name__ == "_tuplegetter"


def link_of(app, env, node, contnode):
  """A name in single backticks leads to its page from a page of the other module too."""
  domain, target = env.domains["py"], node.get("reftarget", "")
  for module in ("optax_accum", "optax_accum.flax"):
    name = f"{module}.{target}"
    if name in domain.objects:
      return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", name, node, contnode
      )
  return None


def as_sections(app, doctree):
  """The parts of a function's docstring become sections, which the page's contents list."""
  for function in list(doctree.findall(addnodes.desc)):
    if function["objtype"] != "function":
      continue
    for signature in function.findall(addnodes.desc_signature):
      signature["_toc_name"] = ""  # the page has its name already
    content, sections = function[-1], []
    for node in list(content):
      is_fields = isinstance(node, nodes.field_list)
      for part in node.children if is_fields else [node]:
        if isinstance(part, (nodes.field, nodes.rubric)):
          title = part[0].astext() if is_fields else part.astext()
          sections.append(
            nodes.section(
              "", nodes.title("", title), ids=[nodes.make_id(title)]
            )
          )
          part = part[1].children if is_fields else []
        if sections:
          sections[-1] += part
      if sections:
        content.remove(node)
    place = function.parent.index(function) + 1
    function.parent[place:place] = sections


def setup(app):
  app.connect("source-read", add_navigation)
  app.connect("doctree-read", link_names)
  # before the contents are collected
  app.connect("doctree-read", as_sections, priority=100)
  app.connect("autodoc-skip-member", skip_fields)
  app.connect("missing-reference", link_of)
