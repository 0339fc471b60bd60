"""The documentation as a site: `make docs`; its reference is written from the code before."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reference  # noqa: E402 - beside this file

from vfl.core.version import VERSION  # noqa: E402

project, release = "vfl", VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["results/*.csv"]
myst_heading_anchors = 4  # as GitHub names them, so that links work there too
highlight_language = "none"
smartquotes = False  # what is shown is copied
html_theme = "furo"  # its fonts are the reader's own: nothing is fetched when a page is read
html_title = f"vfl {VERSION}"
html_copy_source = False
html_show_copyright = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

reference.write(HERE / "reference")
