"""The doctor: can these nodes train together, how fast, and what must be fixed.

A failing host does not stop the others.

report = examine("nodes.toml", bandwidth=True, speed=True)
write_nodes("nodes.toml", report.measured_nodes())
"""

from .doctor import Fixed, examine, fix
from .report import Cell, Link, Problem, Report, Row

__all__ = ["Cell", "Fixed", "Link", "Problem", "Report", "Row", "examine", "fix"]
