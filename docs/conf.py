"""Sphinx's configuration: the Markdown files of this folder, and API pages from docstrings, as pages of the site.

``make docs`` builds them into build/docs. Nothing in a page is loaded from the network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "_ext"))  # the extensions of this folder

import detrain_nb  # noqa: E402

project = "detrain_nb"
copyright = "the authors of detrain_nb, Apache-2.0"
version = release = re.sub(r"\+.*", "", detrain_nb.__version__)

extensions = ["myst_parser", "sphinx.ext.autodoc", "repository_links", "docstrings", "option_tables", "pages"]

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # they make one dash of the two of an option
html_static_path = ["_static"]
html_css_files = ["site.css"]

default_role = "code"  # a name in single backquotes, as some docstrings have it
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "exclude-members": "model_config"}  # of pydantic
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "detrain_nb"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": False, "top_of_page_buttons": []}
pygments_style = "a11y-high-contrast-light"  # of accessible-pygments, which furo brings
pygments_dark_style = "a11y-high-contrast-dark"
