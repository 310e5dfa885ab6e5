"""My Pipelines: spec files next to the notebook, and the form that edits one; for views and for plain Python.

from detrain_nb.pipelines import MyPipelines

mine = MyPipelines()
mine.entries()
mine.run("train")
"""

from __future__ import annotations

from .draft_form import FieldConflict
from .entries import Entries, Entry, LastJob
from .examples import EXAMPLES, Example
from .form import SpecForm
from .form_export import describe_targets, export_typed, review_export
from .form_review import review_spec
from .my_pipelines import MyPipelines
from .recent import RecentFiles
from .spec_file import SpecFile, read_spec_file, write_spec_file
from .trash import Deleted

__all__ = [
    "EXAMPLES",
    "Deleted",
    "Entries",
    "Entry",
    "Example",
    "FieldConflict",
    "LastJob",
    "MyPipelines",
    "RecentFiles",
    "SpecFile",
    "SpecForm",
    "describe_targets",
    "export_typed",
    "read_spec_file",
    "review_export",
    "review_spec",
    "write_spec_file",
]
