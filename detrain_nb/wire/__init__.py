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
from .messages import ALIVE_GAP_S as ALIVE_GAP_S
from .messages import MAX_BODY_BYTES as MAX_BODY_BYTES
from .messages import MAX_DESCRIPTION_BYTES as MAX_DESCRIPTION_BYTES
from .messages import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from .messages import MAX_ORDER_HEADER_BYTES as MAX_ORDER_HEADER_BYTES
from .messages import PIECE_BYTES as PIECE_BYTES
from .messages import PROTOCOL as PROTOCOL
from .messages import SILENCE_LIMIT_S as SILENCE_LIMIT_S
from .messages import Acknowledge as Acknowledge
from .messages import Alive as Alive
from .messages import Attach as Attach
from .messages import Attached as Attached
from .messages import Begin as Begin
from .messages import Begun as Begun
from .messages import Broadcast as Broadcast
from .messages import CellDone as CellDone
from .messages import CellFailed as CellFailed
from .messages import ClearOutput as ClearOutput
from .messages import Collectives as Collectives
from .messages import Complete as Complete
from .messages import Completions as Completions
from .messages import Display as Display
from .messages import EndGeneration as EndGeneration
from .messages import EndSession as EndSession
from .messages import GenerationEnded as GenerationEnded
from .messages import GenerationReady as GenerationReady
from .messages import Inspect as Inspect
from .messages import Inspection as Inspection
from .messages import Interrupt as Interrupt
from .messages import Kept as Kept
from .messages import Launch as Launch
from .messages import LauncherEnded as LauncherEnded
from .messages import Locate as Locate
from .messages import Message as Message
from .messages import NewGeneration as NewGeneration
from .messages import Notice as Notice
from .messages import OpenStore as OpenStore
from .messages import OtherProtocol as OtherProtocol
from .messages import Output as Output
from .messages import Piece as Piece
from .messages import Position as Position
from .messages import Pull as Pull
from .messages import Push as Push
from .messages import RanCell as RanCell
from .messages import RankEnded as RankEnded
from .messages import RankUp as RankUp
from .messages import Received as Received
from .messages import Refused as Refused
from .messages import Renumber as Renumber
from .messages import Replace as Replace
from .messages import RequestDone as RequestDone
from .messages import RequestFailed as RequestFailed
from .messages import RunCell as RunCell
from .messages import StartedCold as StartedCold
from .messages import StoreOpened as StoreOpened
from .messages import Unfinished as Unfinished
from .messages import Value as Value
from .messages import WorkerUp as WorkerUp
