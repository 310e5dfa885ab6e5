"""A job in a saved notebook: its state, the curve of its loss, its model, and why it failed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from ..jobs.job_status import JobStatus
from ..text import html_text, short_number
from .displays import Settled
from .job_picture import Json, phase_of

_SIGNS = {"succeeded": "✓", "failed": "✗", "stopped": "■", "running": "▶"}
_MOST_NUMBERS = 10  # of the curve, for where its picture is removed
_WIDTH, _HEIGHT = 480, 120


def settle_job(
    status: JobStatus,
    head: Json,
    *,
    progress: Json | None,
    curves: Json,
    failure: Json | None,
    model: Sequence[Json],
    advice: str,
) -> Settled:
    """Make the plain form from the parts for pages. ``advice``: how to show the job again."""
    phase = phase_of(status)
    title = f"{_SIGNS[phase]} job {head['id']}: {head['word']}"
    facts = [head["facts"]] if head["facts"] else []
    if progress:
        total = f" of {progress['total']:,}" if progress["total"] else ""
        facts.append(f"step {progress['step']:,}{total}")
    loss = curves.get("loss")
    if loss:
        facts.append(f"{loss['name']} {loss['warning'] if loss['is_bad'] else loss['last']}")
    facts += [f"model {file['node'] + ':' if file['node'] else ''}{file['name']}" for file in model[:3]]
    lines = [f"{title}, {', '.join(facts)}" if facts else title]
    parts = [f"<p><strong>{html.escape(lines[0])}</strong></p>"]
    if failure:
        cause = f"{failure['cause']}{failure['at']}."
        said = [cause, *([f"To do: {failure['todo']}"] if failure["todo"] else [])]
        last = [text for _, text in failure["lines"]]
        lines += [*said, *([f"{failure['whose']}:", *(f"  {line}" for line in last)] if last else [])]
        parts += [f"<p>{html.escape(each)}</p>" for each in said]
        if last:
            parts.append(f"<p>{html.escape(failure['whose'])}:</p>{html_text(chr(10).join(last))}")
    if loss:
        parts.append(_curve(loss))
    lines.append(advice)
    parts.append(f"<p>{html.escape(advice)}</p>")
    return Settled("\n".join(lines), "".join(parts))


def _curve(loss: dict[str, Any]) -> str:
    """Return a picture of the curve, and some of its numbers for where the picture is removed."""
    points = [(step, value) for step, value in loss["points"] if value is not None]
    if len(points) < 2:
        return ""
    width = -(-len(points) // _MOST_NUMBERS)
    some = [*points[::width], *([points[-1]] if (len(points) - 1) % width else [])]
    numbers = "".join(f"<td>{step:,}: {html.escape(short_number(value))}</td>" for step, value in some)
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    across, up = (_WIDTH - 8) / max(1, last - first), (_HEIGHT - 8) / ((high - low) or 1)
    drawn = " ".join(f"{4 + (step - first) * across:.1f},{4 + (high - value) * up:.1f}" for step, value in points)
    name = html.escape(loss["name"])
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}' role='img'>"
        f"<title>{name} from step {first:,} to {last:,}</title>"
        f"<polyline fill='none' stroke='#0072b2' stroke-width='1.5' points='{drawn}'/></svg>"
        f"<details><summary>{name} by step</summary><table><tr>{numbers}</tr></table></details>"
    )
