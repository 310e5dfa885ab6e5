"""Messages between session, agent, worker and interpreter: a JSON header plus, for some, one raw buffer.

messages.py says which there are, frames.py how they lie in bytes, link.py sends them; json_text.py reads
what is in them.
"""

# ruff: noqa: F403  this is all that stands in them without an underscore

from __future__ import annotations

from .frames import *
from .json_text import *
from .link import *
from .messages import *
