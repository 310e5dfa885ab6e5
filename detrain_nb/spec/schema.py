"""The JSON Schema of a spec, for editors that complete and check one: ``python -m detrain_nb.spec.schema`` writes it.

A document names it with ``"$schema": "..."``, in YAML with ``# yaml-language-server: $schema=...``. It checks less than
the models do: only they check fields against each other.
"""

from __future__ import annotations

import json
from pathlib import Path

from .pipeline import PipelineSpec

FILE = Path(__file__).with_name("pipeline.schema.json")


def make_schema() -> str:
    """Return the schema as the text of its file."""
    schema = PipelineSpec.model_json_schema()
    schema["properties"]["$schema"] = {"type": "string", "description": "the address or path of this schema"}
    for model in (schema, *schema["$defs"].values()):  # editors show the first paragraph of a docstring
        model["description"] = model["description"].partition("\n\n")[0]
        for name, field in model["properties"].items():
            if isinstance(field.get("default"), dict | list):  # a table whose lines are all comments is null in YAML
                told = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
                model["properties"][name] = {"anyOf": [field, {"type": "null"}], **told}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A pipeline of detrain_nb"}
    return json.dumps({**head, **{name: schema[name] for name in schema if name not in head}}, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(make_schema(), encoding="utf-8")
