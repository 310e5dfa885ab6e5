"""The form of a pipeline without a page: its input, the faults that the spec finds, and the last valid spec.

from detrain_nb.pipelines import SpecForm

form = SpecForm({"name": "train"})
form.edit("source.script", "train.py")
form.errors, form.spec
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import DetrainError, SpecError
from ..spec import Finding, PipelineSpec
from ..spec.checking import check_source
from ..spec.findings import findings_of
from .draft import document_of
from .draft_form import DraftForm

__all__ = ["SpecForm"]


class SpecForm(DraftForm):
    """A draft of a pipeline, edited field by field. The spec decides what is valid; no input is lost.

    ``content``: a spec or a document to begin with. Paths of fields are written as in the errors of a spec, such as
    ``training.steps`` and ``nodes[0].host``. Several threads may use a form.
    """

    def __init__(self, content: PipelineSpec | Mapping[str, Any] | None = None) -> None:
        self._spec: PipelineSpec | None = None
        super().__init__(document_of({} if content is None else content))

    @property
    def spec(self) -> PipelineSpec | None:
        """The last valid spec; None before the first. Setting it loads that spec into the form."""
        return self._spec

    @spec.setter
    def spec(self, spec: PipelineSpec) -> None:
        self.load(spec)

    @property
    def is_right(self) -> bool:
        """True if `spec` is the present input, and no error that is known here prevents a start."""
        return self._is_spec and not self.errors

    def load(self, content: PipelineSpec | Mapping[str, Any], *, editor: str = "") -> None:
        """Load a spec or a document, which replaces all input. Raises: SpecError."""
        with self.lock:
            self._load(document_of(content), editor)
        self._tell()

    def to_code(self) -> str:
        """Return Python that builds and submits the spec. Raises: SpecError if the input is not a valid spec."""
        from .form_code import write_code

        with self.lock:
            if not self._is_spec or self._spec is None:
                faults = "; ".join(f"{path}: {said}" if path else said for path, said in self.errors.items())
                raise SpecError(f"this is not a pipeline yet: {faults}")
            return write_code(self._spec)

    def _judge(self, *, is_read: bool) -> Iterable[Finding]:
        self._is_spec = False
        try:
            spec = PipelineSpec.from_dict(self._document)
            if not is_read:
                return check_source(self._document)
            self._spec, self._is_spec = spec, True
            return number_nodes(spec.check(), [node.name for node in spec.nodes])
        except DetrainError as exc:
            found = findings_of(exc) if isinstance(exc, ValueError) else [Finding("", str(exc))]
            return [*found, *check_source(self._document)]


def number_nodes(findings: Iterable[Finding], names: Iterable[str]) -> list[Finding]:
    """Replace names of nodes by numbers: ``nodes.gpu1.ranks`` is ``nodes[0].ranks``. Both may number thousands."""
    places, numbered = {name: place for place, name in enumerate(names)}, list[Finding]()
    for each in findings:
        name, field = each.field.removeprefix("nodes."), each.field
        while name and name not in places:
            name = name.rpartition(".")[0]
        if name and field.startswith(f"nodes.{name}."):
            field = f"nodes[{places[name]}].{field.removeprefix(f'nodes.{name}.')}"
        numbered.append(Finding(field, each.text, each.severity))
    return numbered
