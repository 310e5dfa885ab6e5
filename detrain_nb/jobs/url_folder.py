"""Source folder at a URL: its files, from the named server only, and from a limited number of folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..copying.json_lines import MOST_DEPTH, clean
from ..errors import DetrainError, SpecError
from ..storage import Location, locate

__all__ = ["open_folder", "walk_files"]


@contextlib.contextmanager
def open_folder(url: str) -> Iterator[Location]:
    """Yield the folder at a URL; at https, follow no redirect to another server: only this machine may reach that one.

    Raises: SpecError.
    """
    top = locate(url)
    if not top.path.startswith(("http://", "https://")):
        yield top
        return
    from fsspec.implementations.http import aiohttp  # which opens such a URL, if it is installed

    refused: list[str] = []

    async def look(_session: object, _context: object, asked: aiohttp.TraceRequestRedirectParams) -> None:
        headers = asked.response.headers
        to = headers.get("Location") or headers.get("URI") or ""  # as aiohttp reads it
        origin = asked.url.join(type(asked.url)(to)).origin()
        if origin not in (asked.url.origin(), asked.url.origin().with_scheme("https").with_port(443)):
            refused.append(clean(str(origin))[:200])
            raise PermissionError(refused[0])  # fsspec turns it into a missing file

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(look)
    try:
        files = type(top.files)(client_kwargs={"trace_configs": [trace]}, skip_instance_cache=True)
        yield Location(top.name, top.path, files)
    except DetrainError as exc:
        if refused:
            raise SpecError(f"{top.name} redirects to another server, {refused[0]}: give the URL there") from exc
        raise


def walk_files(top: Location, *, most_folders: int) -> Iterator[str]:
    """Yield the paths of all files below ``top``. Raises: SpecError when folders are too many or too deep."""
    for number, (above, _, found) in enumerate(top.files.walk(top.path, detail=True)):
        if number >= most_folders or above.count("/") - top.path.count("/") > MOST_DEPTH:
            raise SpecError(
                f"{top.name} has more than {most_folders} folders, or more than {MOST_DEPTH} levels of them"
            )
        yield from sorted(info["name"] for info in found.values())
