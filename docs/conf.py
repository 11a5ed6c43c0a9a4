"""Settings of the manual: `make docs` builds docs/, the notebooks and the pages beside the code they describe."""

import sys
from importlib import metadata
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
import reference


project, author = "leanformer", "The leanformer contributors"
release = metadata.version("leanformer")
copyright = author

# The root of the repository is the source folder, so that links between pages are links between files.
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/_generated/*.md", "notebooks/*.ipynb", "launch/*.md", "CONTRIBUTING.md"]
include_patterns += ["CHANGELOG.md", "study/README.md", "study/LOG.md", "study/data/README.md"]
include_patterns += ["study/heads/PLAN.md", "study/heads/PLAN2.md", "study/heads/LAYERS.md"]
exclude_patterns = [".*", "runs", "docs/_build", "leanformer", "tests", "tools", "configs"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

nb_execution_mode = "off"  # the stored outputs are shown
nb_mime_priority_overrides = [("html", "text/html", 5)]
myst_heading_anchors = 3
default_role = "code"  # docstrings have single backticks
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"leanformer {release}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_favicon = "_static/favicon.svg"
html_theme_options = {
    "source_repository": "https://github.com/leanformer/leanformer",
    "source_branch": "main",
    "footer_icons": [{"name": "GitHub", "url": "https://github.com/leanformer/leanformer", "html": "Repository"}],
}
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
html_copy_source = False
smartquotes = False  # -- is part of a flag


def setup(app):
    """Write the generated pages before the build reads its sources."""
    app.connect("config-inited", lambda *_: reference.write(Path(__file__).parent / "_generated"))
