"""The location of our own code, by which stacks and tracebacks distinguish it from the user's."""

from __future__ import annotations

import os

ON_NODE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of code that runs on a node
PACKAGE = os.path.dirname(ON_NODE)
RUNS_CELLS = os.path.join(ON_NODE, "cell", "interpreter.py")
