"""What the ranks run: a script, cells of a notebook, a repository, a folder or a module; and its arguments."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..errors import FieldError, FieldFault
from ..plan.choices import ONE_OF, ArgumentStyle
from ..plan.git_urls import check_git_ref, check_git_url
from ..text import show
from .model import SpecModel
from .places import URL, Url
from .words import (
    INSIDE,
    PATH,
    PYTHON_FILE,
    Inside,
    Lines,
    Module,
    Path,
    Variable,
    as_tuple,
    check_free,
    is_for_argv,
    is_inside,
    is_path,
    like,
    only,
)

_KINDS = tuple(name.removeprefix("source.") for group in ONE_OF for name in group if name.startswith("source."))
_Script = Annotated[
    str, only(lambda text: is_path(text) and text.lower().endswith(".py")), like(f"(?={PYTHON_FILE}$){PATH}")
]
_Notebook = Annotated[
    str,
    only(lambda text: is_path(text) and text.lower().endswith(".ipynb")),
    like(rf"(?=.*\.[iI][pP][yY][nN][bB]$){PATH}"),
]
_Entry = Annotated[
    str, only(lambda text: is_inside(text) and text.lower().endswith(".py")), like(f"(?={PYTHON_FILE}$){INSIDE}")
]
_Argument = Annotated[str, only(is_for_argv)]
FOLDER_KINDS = ("git", "path")  # the kinds that have an entry


class Git(SpecModel):
    """A repository, at a branch, tag or commit."""

    url: Annotated[str, AfterValidator(check_git_url)] = Field(
        description="https://host/path, ssh://host/path, user@host:path or a path, without a password"
    )
    ref: Annotated[str, AfterValidator(check_git_ref)] | None = Field(
        default=None, description="a branch, a tag or a commit; unset: the repository's default branch"
    )
    token: Annotated[Variable, AfterValidator(check_free)] | None = Field(
        default=None, description="the name of the environment variable that holds a token; never the token itself"
    )
    ssh_key: Path | None = Field(default=None, description="the path of a private key on the machine that clones")
    folder: Inside | None = Field(
        default=None, description="the folder of the repository that the ranks run in; unset: its root"
    )
    how: Literal["auto", "clone", "bundle"] = Field(
        default="auto",
        description='"clone": each node clones from the git host; "bundle": this machine does, and sends it to the '
        'nodes; "auto": "clone", or "bundle" if a node cannot reach that host',
    )

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.token is not None and self.ssh_key is not None:
            raise ValueError("token and ssh_key are both given: leave out one")
        return self


class Source(SpecModel):
    """Exactly one of `script`, `script_text`, `notebook`, `git`, `path` and `module`, and its arguments."""

    script: _Script | None = Field(default=None, description="the path of a Python file, *.py")
    script_text: Annotated[str, only(lambda text: bool(text.strip()) and is_for_argv(text))] | None = Field(
        default=None, description="the text of a Python script"
    )
    notebook: _Notebook | None = Field(
        default=None, description="the path of a saved notebook, *.ipynb, whose cells with the tag job are run"
    )
    git: Git | None = Field(default=None, description="a table with the url of a repository")
    path: Url | None = Field(default=None, description=f"a folder: {URL}")
    module: Module | None = Field(
        default=None, description="the name of a module that is installed on the nodes, such as package.train"
    )
    entry: _Entry | None = Field(
        default=None, description="the Python file to run, *.py, as a path inside the folder of git or path"
    )
    arguments: Annotated[tuple[_Argument, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="a list of texts without NUL"
    )
    argument_style: ArgumentStyle = Field(
        default="plain",
        description='"plain", or "detrain", which adds --gpu, --epochs, --batch_size, --lr, --model_name, --split_size',
    )
    setup: Lines = Field(
        default=(), description="shell lines to run on every node before the ranks start, without control characters"
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "nothing to run is given"
            raise ValueError(f"{found}: give exactly one of {', '.join(_KINDS)}")
        if given[0] in FOLDER_KINDS and self.entry is None:
            advice = f"{given[0]} is a folder: give the Python file in it to run"
            raise FieldError([FieldFault("entry", f" is missing: {advice}", advice)])
        if given[0] not in FOLDER_KINDS and self.entry is not None:
            said = f" {show(self.entry)} does not apply to {given[0]}, which is not a folder: leave it out"
            raise FieldError([FieldFault("entry", said)])
        return self

    @property
    def kind(self) -> str:
        """The name of the one field that is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)
