"""How Sphinx builds these pages: `sphinx-build -W docs site`."""

from __future__ import annotations

import aiodaft

project = "aiodaft"
author = "the aiodaft authors"
project_copyright = "the aiodaft authors"
version = release = aiodaft.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["site"]
html_theme = "furo"
html_title = f"aiodaft {version}"

# Headings get the anchors that they have on GitHub, so that links work at both places.
myst_heading_anchors = 4

# GitHub draws such blocks, too.
myst_fence_as_directive = ["mermaid"]

# Docstrings name code in single backticks.
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_use_ivar = True
# Attributes have the name of the type `bytes`, which types of others then seem to mean.
suppress_warnings = ["ref.python"]
