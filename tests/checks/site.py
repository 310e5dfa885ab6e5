"""Find what the pages of the documentation site must not have: broken links, and anything loaded from the network.

`make docs` runs this on the folder that Sphinx has built.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that a browser loads without a click, by element; of `link` only these kinds are loaded.
LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "input": ("src",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "video": ("src", "poster"),
}
LOADED_LINKS = {"apple-touch-icon", "icon", "manifest", "modulepreload", "preload", "stylesheet"}
IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?(?P<url>[^'\")\s;]+)")


@dataclass
class Page:
    """One page: its anchors, the targets of its links, and what a browser loads with it."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


def main(folder: Path) -> int:
    faults = list(find_faults(folder))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def find_faults(folder: Path) -> Iterator[str]:
    """Yield a line for each broken link, and for each thing that would be loaded from the network."""
    pages = {path: read_page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        yield f"{folder}: has no page"
    for path, page in pages.items():
        name = path.relative_to(folder)
        for url in page.loaded:
            if is_remote(url):
                yield f"{name}: loads {url} from the network"
        for url in [*page.links, *page.loaded]:
            if why := _explain_broken(url, path, pages):
                yield f"{name}: {url}: {why}"
    for path in sorted(folder.rglob("*.css")):
        for found in IN_STYLE.finditer(path.read_text("utf-8")):
            if is_remote(found["url"]):
                yield f"{path.relative_to(folder)}: loads {found['url']} from the network"


def read_page(html: str) -> Page:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.page


def is_remote(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme in {"http", "https", "ftp", "ws", "wss"}


def _explain_broken(url: str, path: Path, pages: dict[Path, Page]) -> str:
    """Return why a link of the page at ``path`` is broken; empty if it is not, or if it leaves the site."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    page = next((page for known, page in pages.items() if known.resolve() == target), None)
    if parts.fragment and page is not None and unquote(parts.fragment) not in page.anchors:
        return "there is no such anchor"
    return ""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.page.anchors |= {given[name] for name in ("id", "name") if name in given and (name == "id" or tag == "a")}
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        if tag == "link" and LOADED_LINKS & set(given.get("rel", "").split()):
            self.page.loaded.append(given.get("href", ""))
        for name in LOADED.get(tag, ()):
            if name in given:
                self.page.loaded += _read_urls(name, given[name])
        self.page.loaded += [found["url"] for found in IN_STYLE.finditer(given.get("style", ""))]
        self._is_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.page.loaded += [found["url"] for found in IN_STYLE.finditer(data)]


def _read_urls(name: str, value: str) -> list[str]:
    if name == "srcset":
        return [part.split()[0] for part in value.split(",") if part.strip()]
    return [value]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
