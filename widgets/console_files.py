"""Export of a pipeline from the console to a file of another tool, and import from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..formats import IMPORTERS, Imported, import_file, import_text, write_export
from ..pipelines import MyPipelines, SpecFile, describe_targets, export_typed, review_export
from ..plan.targets import TARGETS
from ..session.output.safe_output import one_line
from ..spec import PipelineSpec
from ..storage import locate
from .actions import Refused, action, flag, one_of, optional, table_of, text
from .nodes_editor import NodesEditor, given_path, path_text

__all__ = ["FilesEditor"]

_MOST_TEXT = 1_000_000  # of a file that is pasted
_MOST_LEFT_OUT = 200  # lines shown
_MOST_CHARS = 1000
_TARGET, _OPTIONS, _DIGEST = one_of(*TARGETS), table_of(text(most=10_000)), text(most=100)


class FilesEditor(NodesEditor):
    """Export and import. A subclass defines the methods that raise, and adds `describe_file` to its form."""

    pipelines: MyPipelines

    def __init__(self) -> None:
        self._left_out: dict[Path, list[str]] = {}  # by import, until dismissed
        self._exported: dict[Path, dict[str, Any]] = {}  # the format chosen last, and the options typed for each
        super().__init__()

    def seen_spec(self, digest: str | None) -> tuple[PipelineSpec, str]:
        """Return the open form's spec and digest. Raises: Refused if the form has errors or another digest."""
        raise NotImplementedError

    def opened_path(self) -> Path:
        """Return the path of the open form's file. Raises: Refused when no form is open."""
        raise NotImplementedError

    def show_file(self, opened: SpecFile) -> None:
        """Open the form of a file."""
        raise NotImplementedError

    def describe_formats(self) -> dict[str, Any]:
        """Return the constant parts of the state: the formats for export and import."""
        kinds = [{"name": name, "about": importer.about} for name, importer in IMPORTERS.items()]
        return {"targets": describe_targets(), "kinds": kinds}

    # ---- export

    @action(to=_TARGET, options=_OPTIONS)
    def export(self, to: str, options: dict[str, str]) -> dict[str, Any]:
        """Return the text of the exported file; a page passes ``digest`` on to `save_export`."""
        spec, digest = self.seen_spec(None)
        with self._guard:
            before = self._exported.get(path := self.opened_path(), {"options": {}})
            self._exported[path] = {"to": to, "options": {**before["options"], to: options}}
        return {**review_export(spec, to, options), "digest": digest}

    @action(to=_TARGET, options=_OPTIONS, path=path_text, digest=_DIGEST, anyway=flag)
    def save_export(self, to: str, options: dict[str, str], path: str, digest: str, anyway: bool) -> dict[str, str]:
        """Write the export that the page shows. An existing file is kept, and ``ask`` says so, unless ``anyway``."""
        spec, _ = self.seen_spec(digest)
        written, place = export_typed(spec, to, options), locate(given_path(path))
        if Path(place.name).is_dir():
            raise Refused(f"{one_line(place.name)} is a folder: give a file name in it")
        if not anyway and place.exists():
            return {"ask": f"{one_line(place.name)} already exists."}
        write_export(written, given_path(path))
        return {"said": f"{one_line(place.name)} was written."}

    # ---- import

    @action(path=path_text, text=text(most=_MOST_TEXT), kind=text(most=40))
    def import_pipeline(self, path: str, text: str, kind: str) -> None:
        """Make a pipeline of the file at a path or URL, or of ``text`` with ``path`` as its name. Raises: SpecError."""
        name = Path(path.strip()).name
        found = import_text(text, name=name, kind=kind) if text.strip() else import_file(given_path(path), kind=kind)
        made = self.pipelines.add(found.to_dict(), name=name.lstrip(".").partition(".")[0])
        with self._guard:
            self._left_out[made.path] = _describe_left_out(found)
        self.show_file(made)

    @action(line=optional(text(most=2 * _MOST_CHARS)))
    def dismiss(self, line: str | None) -> None:
        """Dismiss one line about what an import left out; None dismisses all."""
        with self._guard:
            left = self._left_out.get(path := self.opened_path(), [])
            self._left_out[path] = [each for each in left if line is not None and each != line]
        self._tell_form()

    def describe_file(self, path: Path) -> dict[str, Any]:
        """Return what a form begins with: undismissed lines of its import, and the options typed for its exports."""
        return {"left_out": self._left_out.get(path, []), "exported": self._exported.get(path)}

    def forget_file(self, path: Path) -> None:
        """Forget the state of a deleted file."""
        self._left_out.pop(path, None)
        self._exported.pop(path, None)


def _describe_left_out(found: Imported) -> list[str]:
    lines = list(dict.fromkeys(one_line(line, most_chars=_MOST_CHARS) for line in found.left_out))
    more = [f"and {len(lines) - _MOST_LEFT_OUT:,} more"] if len(lines) > _MOST_LEFT_OUT else []
    return [*lines[:_MOST_LEFT_OUT], *more]
