"""A whole pipeline as one document: read, written, changed, planned and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Self

from ..documents import format_document, read_document, write_document
from ..errors import FieldError
from ..plan import Plan
from ..plan.fields import set_fields
from ..plan.job import JobSpec
from ..plan.names import make_name
from ..storage import shown
from ..text import ShownAsText
from .checking import check_spec
from .findings import Finding
from .model import check_names
from .overrides import name_fields, read_overrides
from .pipeline_fields import PipelineFields
from .planning import plan_spec, program_arguments, resolve_job

_RUN_ALONE = {".py": "script", ".ipynb": "notebook"}


class PipelineSpec(ShownAsText, PipelineFields):
    """What to run: frozen, and validated as a whole; it prints as the equivalent YAML.

    `with_overrides` returns a changed copy. Raises: FieldError, a SpecError, with one line for each invalid field.
    """

    def __str__(self) -> str:
        return format_document(self.to_dict(), ".yaml")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a spec from a document's content; ``$schema``, which is for editors, is ignored. Raises: SpecError."""
        check_names(data)
        return cls(**{name: value for name, value in data.items() if name != "$schema"})

    @classmethod
    def load(cls, url: str | os.PathLike[str]) -> Self:
        """Read a spec from a path or an fsspec URL, as JSON, TOML or YAML by the suffix. Raises: SpecError.

        A script (.py) or a notebook makes a spec that runs it, with the defaults for all other fields. A path in
        ``source`` is relative to the current folder.
        """
        file = PurePath(url)
        if kind := _RUN_ALONE.get(file.suffix.lower()):
            return cls.from_dict({"name": make_name(file.stem, default=kind), "source": {kind: os.fspath(url)}})
        try:
            return cls.from_dict(read_document(url))
        except FieldError as exc:
            raise FieldError(exc.faults, where=shown(os.fspath(url))) from None

    def save(self, url: str | os.PathLike[str]) -> None:
        """Write the spec to a path or an fsspec URL, as JSON, TOML or YAML by the suffix. Raises: SpecError."""
        write_document(url, self.to_dict())

    @classmethod
    def field_names(cls, section: str = "") -> list[str]:
        """Return the names of the fields, or of those of a ``section`` such as training; empty if it has none."""
        return name_fields(cls, section)

    @classmethod
    def parse_overrides(cls, words: Sequence[str]) -> dict[str, Any]:
        """Read ``--training.epochs 2 --nodes gpu1,gpu2`` as values for `with_overrides`. Raises: SpecError."""
        return read_overrides(cls, words)

    def with_overrides(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other ``values`` of fields, such as ``{"training.epochs": 2}``. Raises: SpecError.

        A field that a given one replaces is left out of the copy, here ``training.steps``. A value None unsets a field.
        """
        return self.from_dict(set_fields(self.to_dict(), values)) if values else self

    def with_ranks(self, count: int) -> Self:
        """Return a copy with ``count`` ranks on each of its nodes, or on this machine. Raises: SpecError."""
        nodes = [node.to_fields() for node in self.nodes] or [{"host": "localhost"}]
        return self.with_overrides({"nodes": [{**node, "ranks": count} for node in nodes]})

    def plan(self, *, gpus: Mapping[str, int | Sequence[int]] | None = None) -> Plan:
        """Return the plan: on which node each rank runs, and its part of the pipeline.

        ``gpus``: the number or the indices of a node's GPUs, by its name ("" for this machine if no node is named). A
        node that is missing in it has the GPUs that the spec requests, else none. Raises: SpecError.
        """
        return plan_spec(self, gpus=gpus or {})

    def check(self, *, nodes: bool = False) -> list[Finding]:
        """Return what is wrong with the spec, as far as it is known without its nodes; an empty list is good.

        ``nodes``: query them too, as `detrain_nb.jobs.check_nodes` does, without prompting for passphrases.
        A finding with the severity "warning" does not prevent a start.
        """
        if not nodes:
            return check_spec(self)
        from ..jobs import check_nodes  # a room above: the one such import, see design.md

        return check_nodes(self)

    def job_spec(self, plan: Plan) -> JobSpec:
        """Return what the script reads with `detrain_nb.job_spec`: ``spec.job_spec(spec.plan())``."""
        return resolve_job(self, plan)

    def program_arguments(self, plan: Plan) -> tuple[str, ...]:
        """Return the arguments of the script, in the source's ``argument_style``."""
        return program_arguments(self, plan)
