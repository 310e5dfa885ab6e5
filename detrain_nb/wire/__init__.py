"""Messages between session, agent, worker and interpreter: a JSON header plus, for some, one raw buffer.

messages.py defines them, frames.py encodes them as bytes, link.py sends them; json_text.py parses their contents.
"""

# ruff: noqa: F403  imports every name of these modules that has no underscore

from __future__ import annotations

from .frames import *
from .json_text import *
from .link import *
from .messages import *
