"""Internals of a session that tests inspect or patch; the tests reach them only through this module."""

from __future__ import annotations

from detrain_nb import Session
from detrain_nb.session.link.rank_link import RankLink
from detrain_nb.session.running.core import Core
from detrain_nb.session.state.session_state import SessionState


def core_of(session: Session) -> Core:
    return session._core


def state_of(session: Session) -> SessionState:
    return core_of(session).state


def link_of(session: Session) -> RankLink:
    return core_of(session).link
