"""Messages between session, agent, worker and interpreter: a JSON header plus, for some, one raw buffer.

messages.py says which there are, frames.py how they lie in bytes, link.py sends them; json_text.py reads
what is in them.
"""

from __future__ import annotations

from .frames import Frame as Frame
from .frames import FrameReader as FrameReader
from .frames import to_frame as to_frame
from .json_text import MAX_BUNDLE_BYTES as MAX_BUNDLE_BYTES
from .json_text import MAX_BUNDLE_VALUES as MAX_BUNDLE_VALUES
from .json_text import SIZES as SIZES
from .json_text import Json as Json
from .json_text import count_values as count_values
from .json_text import json_body as json_body
from .json_text import parse_bundle as parse_bundle
from .json_text import parse_json as parse_json
from .json_text import read_text as read_text
from .link import Link as Link
from .link import LinkClosed as LinkClosed
from .messages import *  # noqa: F403  all of them, and what bounds them
