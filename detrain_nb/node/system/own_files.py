"""Where our own code is: what is found in stacks and tracebacks is told from the user's by it."""

from __future__ import annotations

import os

ON_NODE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the room of what runs on a node
PACKAGE = os.path.dirname(ON_NODE)
RUNS_CELLS = os.path.join(ON_NODE, "cell", "interpreter.py")
