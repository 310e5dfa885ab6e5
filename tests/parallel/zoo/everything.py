"""All models of the zoo, by name."""

from __future__ import annotations

from .decoders import DECODERS
from .encoders import ENCODERS
from .entry import Entry
from .own_flow import OWN_FLOW
from .own_parts import OWN_PARTS
from .pictures import PICTURES
from .senses import SENSES
from .ways import WAYS

OWN: dict[str, Entry] = {**OWN_FLOW, **OWN_PARTS}
OF_TRANSFORMERS: dict[str, Entry] = {**DECODERS, **ENCODERS, **PICTURES, **SENSES, **WAYS}
ENTRIES = {**OWN, **OF_TRANSFORMERS}
