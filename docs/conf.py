"""How Sphinx builds the documentation: `make docs`."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # autodoc imports the package

project = "jaxspec"
author = "The jaxspec authors"
copyright = "the jaxspec authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "results/**"]
html_theme = "furo"
html_title = "jaxspec"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_use_ivar = True
add_module_names = False
