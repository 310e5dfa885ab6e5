"""What becomes of the models of the zoo where it is not "right": refused, with what a user reads, or a known fault."""

from __future__ import annotations

Outcomes = dict[str, dict[str, str]]

# By name and layout: a pattern of the reason.
REFUSED: Outcomes = {}

# What is wrong still, by name and layout: a pattern of the outcome. Whoever mends one takes its line away.
FAULTS: Outcomes = {}
