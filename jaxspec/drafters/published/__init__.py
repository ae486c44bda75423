"""Drafters that other software has trained, or is to use: a table of forms, and a file for each."""

from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.drafters.published.table import (
    FORMS,
    in_base,
    is_published,
    method_of_published,
    only_interpretation,
    read_published,
)
from jaxspec.drafters.published.writing import check_form, write_published

__all__ = [
    "FORMS",
    "Form",
    "Interpretation",
    "check_form",
    "in_base",
    "is_published",
    "method_of_published",
    "only_interpretation",
    "read_published",
    "write_published",
]
