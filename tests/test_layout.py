"""The rooms and the imports between them match docs/design.md: its blocks are parsed, and the code is scanned.

`read_rules` turns the blocks into `Rules`. `find_faults` checks a tree against them and returns one line per fault, so
the tests below can also check a small tree with a fault in it.
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.wire import KINDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "detrain_nb"
MAPPED = {"magics": f"{PACKAGE}.magics", "widgets": f"{PACKAGE}.widgets"}  # top-level folder -> import name
HEAVY = {"IPython", "ipykernel", "ipywidgets", "anywidget", "paramiko", "torch", "numpy"}  # the core works without them
NOT_ON_WINDOWS = {"fcntl", "grp", "pty", "pwd", "resource", "termios"}
DRIVES_NODES = {"agents", "deploy", "jobs", "session", "spec", "transport"}  # these also run on Windows

# Additions to the standard library after Python 3.10.
NEWER_MODULES = {"annotationlib", "asyncio.taskgroups", "compression", "concurrent.interpreters", "tomllib"}
NEWER_MODULES |= {"importlib.resources.abc", "pathlib.types", "string.templatelib", "wsgiref.types"}
NEWER_NAMES = {
    "asyncio": "Barrier BrokenBarrierError QueueShutDown Runner TaskGroup Timeout timeout timeout_at",
    "base64": "z85decode z85encode",
    "builtins": "BaseExceptionGroup ExceptionGroup PythonFinalizationError",
    "calendar": "Day Month",
    "concurrent.futures": "InterpreterPoolExecutor",
    "contextlib": "chdir",
    "copy": "replace",
    "datetime": "UTC",
    "enum": "CONFORM EJECT EnumCheck EnumDict EnumType FlagBoundary KEEP NAMED_FLAGS ReprEnum STRICT StrEnum UNIQUE "
    "global_enum member nonmember property show_flag_values verify",
    "functools": "Placeholder",
    "glob": "translate",
    "hashlib": "file_digest",
    "inspect": "BufferFlags getasyncgenlocals getasyncgenstate getmembers_static markcoroutinefunction",
    "itertools": "batched",
    "logging": "getHandlerByName getHandlerNames getLevelNamesMapping",
    "math": "cbrt exp2 fma sumprod",
    "operator": "call is_none is_not_none",
    "os": "login_tty posix_openpt process_cpu_count ptsname setns timerfd_create unshare",
    "pathlib": "UnsupportedOperation",
    "queue": "ShutDown",
    "re": "NOFLAG PatternError",
    "sys": "activate_stack_trampoline exception monitoring",
    "threading": "setprofile_all_threads settrace_all_threads",
    "types": "CapsuleType get_original_bases",
    "typing": "LiteralString Never NoDefault NotRequired ReadOnly Required Self TypeAliasType TypeIs TypeVarTuple "
    "Unpack assert_never assert_type clear_overloads dataclass_transform get_overloads get_protocol_members "
    "is_protocol override reveal_type",
    "uuid": "uuid6 uuid7 uuid8",
    "warnings": "deprecated",
}
NEWER = NEWER_MODULES | {f"{module}.{name}" for module, names in NEWER_NAMES.items() for name in names.split()}
NEWER_METHODS = {"add_note"}  # of any object


# The rules


@dataclass(frozen=True)
class Libraries:
    """The packages outside the standard library that a room may import."""

    anywhere: frozenset[str] = frozenset()
    in_functions: frozenset[str] = frozenset()
    by_file: dict[str, frozenset[str]] = field(default_factory=dict)

    def allow(self, library: str, file_name: str, scope: str) -> bool:
        if scope == "typing":
            return True
        at_top = self.anywhere | self.by_file.get(file_name, frozenset())
        return library in at_top or (scope == "function" and library in self.in_functions)


@dataclass(frozen=True)
class Rules:
    """The three blocks of docs/design.md. Rooms are named as in the second block: `wire`, `node`, `__init__`."""

    top_level: frozenset[str]  # "detrain_nb/", "magics/": a folder ends with a slash
    in_package: frozenset[str]  # "plan/a.py", "node/"
    may_import: dict[str, frozenset[str]]  # transitive, including the room itself
    inside: dict[
        str, frozenset[str]
    ]  # the same for the rooms in a room: `node/cell`; `node/.` is the files next to them
    libraries: dict[str, Libraries]
    on_node: frozenset[str]
    when_called: frozenset[tuple[str, str]]  # ("spec/pipeline.py", "jobs"): a room above, imported in a function


def read_rules(design: str) -> Rules:
    """Parse the block of rooms and the two blocks of imports; raises ValueError for a line that it cannot read."""
    blocks = re.findall(r"(?:^ {4}.*\n)+", design, flags=re.MULTILINE)
    rooms = next(block for block in blocks if block.startswith(f"    {PACKAGE}/"))
    arrows = next(block for block in blocks if block.startswith("    __init__:"))
    top_level, in_package = _read_rooms(rooms)
    inner = next(block for block in blocks if block.startswith("    node/system:"))
    may_import, libraries, on_node, when_called = _read_arrows(arrows)
    return Rules(top_level, in_package, may_import, _read_inner_arrows(inner), libraries, on_node, when_called)


def _read_rooms(block: str) -> tuple[frozenset[str], frozenset[str]]:
    top_level: set[str] = set()
    in_package: set[str] = set()
    for line in block.splitlines():
        if match := re.match(r" {6}([^\s,]+(?:, [^\s,]+)*)", line):
            in_package.update(match[1].split(", "))
        elif re.match(r" {4}\S", line):  # a line may have several: "tests/  mirrors the rooms;   docs/"
            top_level.update(re.findall(r"(?:^|;) +(\S+/|\S+\.\w+)(?= |$)", line))
    return frozenset(top_level), frozenset(in_package)


def _read_arrows(
    block: str,
) -> tuple[dict[str, frozenset[str]], dict[str, Libraries], frozenset[str], frozenset[tuple[str, str]]]:
    may_import: dict[str, frozenset[str]] = {}
    libraries: dict[str, Libraries] = {}
    on_node: frozenset[str] = frozenset()
    when_called: frozenset[tuple[str, str]] = frozenset()
    for line in re.sub(r"\n {5,}# ", "; ", block).splitlines():  # a comment may continue on the next line
        match = re.fullmatch(r" {4}([\w ,]+):\s+([^#]+?)(?:\s+# (.+))?", line)
        if not match:
            raise ValueError(f"docs/design.md: cannot read {line!r}: write 'room: rooms   # libraries'")
        names, targets, comment = match[1].split(", "), match[2], match[3] or ""
        if names == ["on a node"]:
            on_node = frozenset(targets.split(", "))
            continue
        if names == ["when called"]:
            pairs = (each.partition(": ") for each in targets.split(", "))
            when_called = frozenset((file, room) for file, _, room in pairs)
            continue
        reached = _read_targets(targets, may_import)
        for name in names:
            may_import[name] = reached | set(names)
            libraries[name] = _read_libraries(comment)
    return may_import, libraries, on_node, when_called


def _read_inner_arrows(block: str) -> dict[str, frozenset[str]]:
    inside: dict[str, frozenset[str]] = {}
    for line in block.splitlines():
        match = re.fullmatch(r" {4}(\w+)/(\w+): +(-|[\w.]+(?:, [\w.]+)*)", line)
        if not match:
            raise ValueError(f"docs/design.md: cannot read {line!r}: write 'room/room: rooms beside it'")
        room, name, targets = match.groups()
        names = [f"{room}/{target}" for target in targets.split(", ") if target != "-"]
        if unknown := [target for target in names if target not in inside and not target.endswith("/.")]:
            raise ValueError(f"docs/design.md: {', '.join(unknown)} stands in no line above {line!r}")
        reached = [inside.get(target, frozenset({target})) for target in names]
        inside[f"{room}/{name}"] = frozenset({f"{room}/{name}"}).union(*reached)
    return inside


def _read_targets(targets: str, above: dict[str, frozenset[str]]) -> frozenset[str]:
    if targets in {"-", "everything, inside functions"}:  # the porch is lazy: importing it imports nothing else
        return frozenset()
    first, *rest = targets.split(", ")
    if first == "everything above":
        return frozenset(above) - {name.removeprefix("not ") for name in rest}
    direct = {first, *rest}
    if unknown := direct - set(above):
        raise ValueError(f"docs/design.md: {', '.join(sorted(unknown))} stands in no line above {targets!r}")
    return frozenset(direct).union(*(above[name] for name in direct))


def _read_libraries(comment: str) -> Libraries:
    anywhere: set[str] = set()
    in_functions: set[str] = set()
    by_file: dict[str, frozenset[str]] = {}
    for clause in comment.split("; ") if comment and not comment.startswith("none") else []:
        match = re.fullmatch(r"(?:([\w.]+\.py(?:, [\w.]+\.py)*): )?(\w+(?:, \w+)*)( inside functions)?", clause)
        if not match:
            raise ValueError(f"docs/design.md: cannot read {clause!r}: write 'file.py: library' or 'none: why'")
        names = frozenset(match[2].split(", "))
        if match[1]:
            by_file |= dict.fromkeys(match[1].split(", "), names)
        else:
            (in_functions if match[3] else anywhere).update(names)
    return Libraries(frozenset(anywhere), frozenset(in_functions), by_file)


# The tree


@dataclass(frozen=True)
class Module:
    path: Path  # relative to the root of the tree
    room: str
    package: str  # the package that relative imports start from

    @property
    def inner_room(self) -> str:
        """The inner room: `node/cell`, or `node/.` for a file next to the rooms."""
        inside = self.package.removeprefix(f"{PACKAGE}.").split(".")
        return f"{self.room}/{inside[1] if inside[1:] else '.'}"

    @property
    def import_name(self) -> str:
        return self.package if self.path.name == "__init__.py" else f"{self.package}.{self.path.stem}"


def list_modules(root: Path) -> Iterator[Module]:
    """Yield the modules of the installed package, each with its room."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        inside = path.relative_to(root / PACKAGE)
        room = inside.parts[0].removesuffix(".py")
        yield Module(path.relative_to(root), room, ".".join([PACKAGE, *inside.parts[:-1]]))
    for folder, import_name in MAPPED.items():
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root / folder)
            yield Module(path.relative_to(root), folder, ".".join([import_name, *inside.parts[:-1]]))


def find_faults(root: Path, rules: Rules) -> list[str]:
    """Check the tree at ``root`` against the rules; one line per fault, with the file, the line and what to do."""
    faults = list(_find_strangers(root, rules))
    for module in list_modules(root):
        if module.room in rules.may_import:
            source = (root / module.path).read_text(encoding="utf-8")
            faults += [f"{module.path}:{line}: {text}" for line, text in _find_faults_in(module, source, rules)]
    return list(dict.fromkeys(faults))  # `from x import a, b` is one fault, not two


def names_in(module: Module, source: str) -> list[tuple[int, str]]:
    """Return the full names of a module's imports and of the attributes that it uses of them, each with its line."""
    uses = _Uses(module)
    uses.visit(ast.parse(source))
    return [(use.line, use.target) for use in uses.imports + uses.names]


def _find_strangers(root: Path, rules: Rules) -> Iterator[str]:
    gitignore = root / ".gitignore"
    lines = gitignore.read_text().splitlines() if gitignore.exists() else []
    ignored = {".*", *(line.strip("/") for line in lines if line and not line.startswith("#"))}
    for folder, known in ((root, rules.top_level), (root / PACKAGE, rules.in_package)):
        for path in sorted(folder.iterdir()):
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored) or (path / "pyvenv.cfg").exists():
                continue
            name = f"{path.name}/" if path.is_dir() else path.name
            if (path.is_dir() or path.suffix == ".py") and name not in known:
                yield f"{path.relative_to(root)}: is not in docs/design.md: move it into a room, or add it there first"
    for module in list_modules(root):
        if not module.inner_room.endswith("/.") and module.inner_room not in rules.inside:
            yield f"{module.path.parent}: is not in docs/design.md: say there what it may import of the rooms beside it"


def _find_faults_in(module: Module, source: str, rules: Rules) -> Iterator[tuple[int, str]]:
    on_node = module.room in rules.on_node
    try:
        tree = ast.parse(source, feature_version=(3, 10) if on_node else None)
    except SyntaxError as exc:
        yield exc.lineno or 0, f"does not parse as Python 3.10, which a node may have: {exc.msg}"
        return
    uses = _Uses(module)
    uses.visit(tree)
    for use in uses.imports:
        yield from _check_import(module, use, rules)
        yield from _check_inner_import(module, use, rules)
    if module.room in DRIVES_NODES:
        for use in uses.imports + uses.names:
            if use.scope == "top" and (use.target.split(".")[0] in NOT_ON_WINDOWS or use.target == "socket.AF_UNIX"):
                yield (
                    use.line,
                    f"{use.target} does not exist on Windows, which runs {module.room}/: use it in a function",
                )
    if on_node:
        for use in uses.imports + uses.names:
            newer = use.target in NEWER or use.module in NEWER_MODULES or use.name in NEWER_METHODS
            if newer and use.scope != "typing":
                yield use.line, f"{use.target} is newer than Python 3.10, which a node may have"


def _check_import(module: Module, use: Use, rules: Rules) -> Iterator[tuple[int, str]]:
    library = use.module.partition(".")[0]
    if library == PACKAGE:
        room = _room_of(use, rules)
        if module.room == "__init__":
            if use.scope == "top":
                yield use.line, f"the porch imports {room} when it is imported: do it in a function"
        elif use.target == f"{PACKAGE}.__version__" or _is_when_called(module, use, rules):
            return
        elif room not in rules.may_import[module.room]:
            allowed = ", ".join(sorted(rules.may_import[module.room] - {module.room})) or "nothing of ours"
            yield use.line, f"{module.room} imports {room} but may import {allowed}: move the code, or change design.md"
    elif library not in sys.stdlib_module_names and not rules.libraries[module.room].allow(
        library, module.path.name, use.scope
    ):
        where = " here" if library in rules.libraries[module.room].in_functions else ""
        yield use.line, f"{module.room} may not import {library}{where}: design.md says which file may, and where"


def _is_when_called(module: Module, use: Use, rules: Rules) -> bool:
    file = "/".join(module.path.parts[1:])
    return use.scope == "function" and (file, _room_of(use, rules)) in rules.when_called


def _check_inner_import(module: Module, use: Use, rules: Rules) -> Iterator[tuple[int, str]]:
    """Check an import from one inner room to another."""
    _, *parts = use.target.split(".")
    if not use.target.startswith(f"{PACKAGE}.{module.room}.") or module.inner_room not in rules.inside:
        return
    inner = f"{module.room}/{parts[1]}"
    inner = inner if inner in rules.inside else f"{module.room}/."
    if inner not in rules.inside[module.inner_room]:
        allowed = ", ".join(sorted(rules.inside[module.inner_room] - {module.inner_room})) or "no other of these rooms"
        yield (
            use.line,
            f"{module.inner_room} imports {inner} but may import {allowed}: move the code, or change design.md",
        )


def _room_of(use: Use, rules: Rules) -> str:
    """Return the room that an import of ours refers to; a name that is not a room belongs to the porch."""
    _, *inner = use.module.split(".")
    name = inner[0] if inner else use.name
    return name if name in rules.may_import else "__init__"


@dataclass(frozen=True)
class Use:
    """An import, or a used name of a module. ``name`` is that of `from module import name`, or empty."""

    line: int
    module: str
    name: str
    scope: str  # "top", "function", "typing"

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class _Uses(ast.NodeVisitor):
    """Collector of the imports of a module and the attributes that it uses of them, each with its scope."""

    def __init__(self, module: Module) -> None:
        self.imports: list[Use] = []
        self.names: list[Use] = []
        self._module = module
        self._scope = "top"
        self._alias: dict[str, str] = {}  # local name -> module or module.name

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.split(".")[0]
            self._alias[alias.asname or first] = alias.name if alias.asname else first
            self._add_import(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._module.package.split(".")
        start = base[: len(base) - node.level + 1] if node.level else []
        source = ".".join([*start, *([node.module] if node.module else [])])
        for alias in node.names:
            self._alias[alias.asname or alias.name] = f"{source}.{alias.name}"
            self._add_import(node.lineno, source, alias.name)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._resolve(node.func)
        if called in {"importlib.import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
            name = str(node.args[0].value)
            self._add_import(node.lineno, f"{PACKAGE}{name}" if name.startswith(".") else name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._add_name(node.lineno, self._resolve(node.value), node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self._alias and hasattr(builtins, node.id):
            self._add_name(node.lineno, "builtins", node.id)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" in test or "sys.version_info" in test:
            self._visit_as("typing", node.body)
            self._visit_all(node.orelse)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all([*node.decorator_list, node.args])  # defaults are evaluated in the enclosing scope
        self._visit_as("typing", [node.returns] if node.returns else [])
        self._visit_as("function", node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> None:
        self._visit_as("typing", [node.annotation] if node.annotation else [])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_as("typing", [node.annotation])
        self._visit_all([node.target, *([node.value] if node.value else [])])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._visit_as("function", [node.body])

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _visit_as(self, scope: str, nodes: Iterable[ast.AST]) -> None:
        outer, self._scope = self._scope, "typing" if self._scope == "typing" else scope
        self._visit_all(nodes)
        self._scope = outer

    def _resolve(self, node: ast.AST) -> str:
        """Spell `t.Self` as `typing.Self` after `import typing as t`; "" for a name that was not imported."""
        if isinstance(node, ast.Name):
            return self._alias.get(node.id, node.id if node.id == "__import__" else "")
        if isinstance(node, ast.Attribute) and (base := self._resolve(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def _add_import(self, line: int, module: str, name: str = "") -> None:
        self.imports.append(Use(line, module, name, self._scope))

    def _add_name(self, line: int, module: str, name: str) -> None:
        self.names.append(Use(line, module, name, self._scope))


# The tests


@pytest.fixture(scope="module")
def rules() -> Rules:
    return read_rules((ROOT / "docs/design.md").read_text(encoding="utf-8"))


def test_tree_is_the_one_of_the_design(rules: Rules) -> None:
    faults = find_faults(ROOT, rules)
    assert not faults, "\n".join(["", *faults])


def test_both_blocks_of_the_design_name_the_same_rooms(rules: Rules) -> None:
    rooms = {name.removesuffix(".py").removesuffix("/") for name in rules.in_package} | set(MAPPED)
    assert rooms == set(rules.may_import)
    assert rules.on_node <= rooms
    assert rules.top_level >= {
        "detrain_nb/",
        "magics/",
        "widgets/",
        "sdl/",
        "notebooks/",
        "tests/",
        "benchmarks/",
        "docs/",
    }
    assert all(name.endswith("/") or name == "environment.yml" for name in rules.top_level)


def test_planned_rooms_are_those_that_are_not_there() -> None:
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    planned = re.findall(r"^ {4,6}(\w+)/ +planned: ", design, flags=re.MULTILINE)
    assert planned and not [name for name in planned if (ROOT / name).exists() or (ROOT / PACKAGE / name).exists()]


def test_modules_of_every_room_are_those_of_the_design() -> None:
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("\n## Modules\n")[2]
    rooms = re.findall(r"^ {4}([\w/]+)/\n((?: {6,}.*\n)+)", design, flags=re.MULTILINE)
    named = sorted(
        f"{room}/{name}" for room, lines in rooms for name in re.findall(r"^ {6}(\w+\.py)", lines, re.MULTILINE)
    )
    paths = [module.path for module in list_modules(ROOT) if not module.path.name.startswith("__")]
    there = [str(path.relative_to(PACKAGE)) if path.parts[0] == PACKAGE else str(path) for path in paths]
    assert named == sorted(path for path in there if "/" in path)


def test_rooms_in_rooms_are_those_of_the_design(rules: Rules) -> None:
    found = {module.inner_room for module in list_modules(ROOT) if not module.inner_room.endswith("/.")}
    assert found == set(rules.inside)


def test_room_above_is_imported_when_called_where_the_design_says_so(rules: Rules) -> None:
    found = set()
    for module in list_modules(ROOT):
        uses = _Uses(module)
        uses.visit(ast.parse((ROOT / module.path).read_text(encoding="utf-8")))
        if any(_is_when_called(module, use, rules) for use in uses.imports):
            found.add("/".join(module.path.parts[1:]))
    assert found == {file for file, _ in rules.when_called}


def test_no_modules_import_each_other_in_a_circle(rules: Rules) -> None:
    modules = {module.import_name: module for module in list_modules(ROOT)}
    below: dict[str, set[str]] = {}
    for name, module in modules.items():
        uses = _Uses(module)
        uses.visit(ast.parse((ROOT / module.path).read_text(encoding="utf-8")))
        found = {
            use.target if use.target in modules else use.module
            for use in uses.imports
            if not _is_when_called(module, use, rules)
        }
        below[name] = (found & set(modules)) - {name, PACKAGE}  # the porch imports its importers in functions
    while leaves := [name for name, found in below.items() if not found]:
        below = {name: found - {*leaves} for name, found in below.items() if name not in leaves}
    assert not below


def test_what_is_known_of_a_session_changes_by_its_own_methods() -> None:
    """No attribute that others can set (mypy checks Final ones), and no use of private attributes from outside."""
    faults = []
    for path in sorted((ROOT / PACKAGE / "session").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.parent.name == "state":
            faults += [f"{path}:{line}: {name} can be set from outside" for line, name in _public_attributes(tree)]
        else:
            faults += [f"{path}:{line}: {name} is another object's own" for line, name in _private_touches(tree)]
    assert not faults, "\n".join(["", *faults])


def _public_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    annotated = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    final = {node.target for node in annotated if ast.unparse(node.annotation).partition("[")[0] == "Final"}
    for node in ast.walk(tree):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node not in final
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self" and not node.attr.startswith("_"):
            yield node.lineno, node.attr


def _private_touches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):  # `session`: created by its own class
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls", "session"}
            if not is_own:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    ("find", "source"),
    [
        (_public_attributes, "class A:\n    def f(self):\n        self.x += 1"),
        (_public_attributes, "class A:\n    def f(self):\n        self.x, self._y = 1, 2"),
        (_public_attributes, "class A:\n    def f(self):\n        self.x: int = 1"),
        (_public_attributes, "class A:\n    def f(self):\n        self.x: Final = 1\n        self.x = 2"),
        (_private_touches, "state._lost.pop(1)"),
        (_private_touches, "self.state._lost = {}"),
    ],
)
def test_way_around_the_methods_is_found(find: Any, source: str) -> None:
    assert list(find(ast.parse(source)))


@pytest.mark.parametrize(("path", "lengths"), [("cell", [11, 9]), ("stop", [5, 6, 5])])
def test_path_of_a_cell_or_a_stop_is_the_one_of_the_design(path: str, lengths: list[int]) -> None:
    """Each step is defined in its file. A file calls the next step, or both use a message that is sent between them."""
    ways = _read_ways(f"The path of a {path}")
    assert [len(way) for way in ways] == lengths
    for way in ways:
        sources = _read_steps(way)
        for (step, file), source, (following, _), below in zip(way, sources, way[1:], sources[1:]):
            of, _, method = following.partition(".")
            is_called = re.search(rf"\.{method}\(" if method else rf"\b{of}\b", source)
            is_carried = _names_of_wire(source) & _names_of_wire(below)
            is_shown_to = "." not in step and re.search(rf"\b{step}\b", below)  # a protocol, and its implementation
            assert is_called or is_carried or is_shown_to, f"{step} in {file} does not hand on to {following}"


def test_path_of_a_job_is_the_one_of_the_design() -> None:
    """Each step is defined in its file. One of two files names the other's step or module, or says what it receives."""
    ways = _read_ways("The path of a job")
    assert [len(way) for way in ways] == [8, 8]
    for way in ways:
        sources = _read_steps(way)
        for (step, file), source, (following, below_file), below in zip(way, sources, way[1:], sources[1:]):
            is_named = re.search(rf"\b{following.partition('.')[0]}\b|\.{Path(below_file).stem}\b", source)
            is_read = re.search(rf"\b{step.partition('.')[0]}\b|\.{Path(file).stem}\b", below)
            is_heard = set(re.findall(r'\.say\("(\w+)"', source)) & set(re.findall(r'"(\w+)"', below))
            assert is_named or is_read or is_heard, f"{step} in {file} does not hand on to {following}"


def _read_ways(heading: str) -> list[list[tuple[str, str]]]:
    """Return the paths in a section of the design: each step, with its file."""
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n(.*?)^## ", design, flags=re.MULTILINE | re.DOTALL)
    assert section
    ways = [re.findall(r"^    (\S+) +(\S+\.py) ", block, flags=re.MULTILINE) for block in section[1].split("\n\n")]
    return [way for way in ways if way]


def _read_steps(way: list[tuple[str, str]]) -> list[str]:
    """Return the texts of the files of a path; each file must define its step."""
    sources = [(ROOT / file).read_text(encoding="utf-8") for _, file in way]
    for (step, file), source in zip(way, sources):
        assert step in _definitions(ast.parse(source)), f"{step} is not in {file}"
    return sources


def _names_of_wire(source: str) -> set[str]:
    """Return the messages that a file imports from wire, or all of them if the file defines them."""
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("wire")]
    found = {alias.name for node in imports for alias in node.names}
    return (found | _definitions(tree)) & {message.__name__ for message in KINDS.values()}


def _definitions(tree: ast.Module) -> set[str]:
    """Return the names of classes and functions, and `Class.method`."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = {node.name for node in tree.body if isinstance(node, kinds)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return found | {f"{of.name}.{node.name}" for of in classes for node in of.body if isinstance(node, ast.FunctionDef)}


def test_what_a_room_may_import_is_transitive(rules: Rules) -> None:
    assert rules.may_import["errors"] == {"errors"}
    assert rules.may_import["deploy"] >= {"transport", "wire", "errors", "launch", "plan", "storage", "spec"}
    assert "session" not in rules.may_import["deploy"]
    assert rules.may_import["widgets"] >= {"session", "jobs", "wide_area"}
    assert not rules.may_import["cli"] & {"magics", "widgets"}
    assert rules.libraries["transport"].allow("paramiko", "ssh.py", "top")
    assert not rules.libraries["transport"].allow("paramiko", "local.py", "function")


FAULTS = {
    "a room above": ("wire/a.py", "from detrain_nb.session import files", "wire imports session but may import errors"),
    "a room above, relative": ("wire/link.py", "from .. import launch", "wire imports launch"),
    "a room above, from a folder": ("node/agent/agent.py", "from ...session import files", "node imports session"),
    "a room above, in a function": ("plan/a.py", "def f():\n    import detrain_nb.launch", "plan imports launch"),
    "a room above, for types": (
        "plan/a.py",
        "if TYPE_CHECKING:\n    from ..launch import x",
        "plan imports launch",
    ),
    "a room above, by name": (
        "plan/a.py",
        "from importlib import import_module as i\ni('detrain_nb.cli')",
        "plan imports",
    ),
    "a room above in the same room": (
        "session/state/history.py",
        "from ..running import core",
        "session/state imports session/running but may import session/output",
    ),
    "what stands beside the rooms": ("node/cell/a.py", "from .. import b", "node/cell imports node/."),
    "a room in a room, of no name": ("session/views/a.py", "", "session/views: is not in docs/design.md"),
    "the porch": ("wire/link.py", "from detrain_nb import Session", "wire imports __init__"),
    "a porch that is not lazy": ("__init__.py", "from .wire import Frame", "the porch imports wire"),
    "a view in the core": (
        "session/files.py",
        "def f():\n    import IPython",
        "session may not import IPython",
    ),
    "magics in a view": ("../widgets/board.py", "import detrain_nb.magics", "widgets imports magics"),
    "a room above, when called, elsewhere": (
        "spec/planning.py",
        "def f():\n    from ..jobs import check_nodes",
        "spec imports jobs",
    ),
    "a room above, when called, at the top": (
        "spec/pipeline.py",
        "from ..jobs import check_nodes",
        "spec imports jobs",
    ),
    "magics by its folder": ("cli/commands.py", "import magics", "cli may not import magics"),
    "torch at the top of values": ("values.py", "import torch", "values may not import torch here"),
    "torch in the agent": ("node/agent/agent.py", "def f():\n    import torch", "node may not import torch"),
    "IPython in the launcher": ("node/rank/launcher.py", "import IPython", "node may not import IPython"),
    "paramiko beside ssh.py": ("transport/local.py", "import paramiko", "transport may not import paramiko"),
    "any library in the agent": ("node/agent/agent.py", "from psutil import Process", "node may not import psutil"),
    "syntax of 3.11 on a node": ("wire/link.py", "try: pass\nexcept* OSError: pass", "does not parse as Python 3.10"),
    "a module of 3.11 on a node": ("node/agent/agent.py", "from tomllib import load", "tomllib.load is newer"),
    "a name of 3.11 on a node": ("plan/a.py", "from enum import StrEnum", "enum.StrEnum is newer"),
    "an attribute of 3.11 on a node": ("plan/a.py", "import datetime as d\nd.UTC", "datetime.UTC is newer"),
    "a builtin of 3.11 on a node": (
        "plan/a.py",
        "def f(e):\n    ExceptionGroup('', [e])",
        "ExceptionGroup is newer",
    ),
    "a method of 3.11 on a node": ("plan/a.py", "def f(e):\n    e.add_note('')", "add_note is newer"),
    "fcntl in the session": ("session/files.py", "import fcntl", "fcntl does not exist on Windows"),
    "AF_UNIX in the transport": ("transport/a.py", "import socket\nF = socket.AF_UNIX", "does not exist on Windows"),
    "AF_UNIX, imported": ("transport/a.py", "from socket import AF_UNIX", "does not exist on Windows"),
    "AF_UNIX as a default": ("transport/a.py", "import socket\ndef f(x=socket.AF_UNIX): pass", "does not exist on Win"),
    "a module of no room": ("helpers.py", "", "helpers.py: is not in docs/design.md"),
    "a folder of no room": ("util/a.py", "", "util: is not in docs/design.md"),
    "a folder at the top": ("../tools/a.py", "", "tools: is not in docs/design.md"),
    "a module at the top": ("../setup.py", "", "setup.py: is not in docs/design.md"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_found(case: str, rules: Rules, tmp_path: Path) -> None:
    file, source, complaint = FAULTS[case]
    _plant(tmp_path, file, source)
    faults = find_faults(tmp_path, rules)
    assert len(faults) == 1
    assert complaint in faults[0]


ALLOWED = {
    "a room below": ("wire/link.py", "from detrain_nb.errors import DetrainError\nfrom .. import errors"),
    "a room below the one below": ("node/agent/agent.py", "from ...errors import DetrainError\nfrom . import spool"),
    "a room below in the same room": ("session/recovery/a.py", "from ..output.log import OutputLog"),
    "what stands beside a room of helpers": (
        "parallel/stages/a.py",
        "from .. import recording\nfrom ..mesh import AXES",
    ),
    "a lazy porch": ("__init__.py", "def load_ipython_extension(ip):\n    from .magics import load"),
    "a room above, when called": ("spec/pipeline.py", "def f():\n    from ..jobs import check_nodes"),
    "the version in the core": ("plan/a.py", "from .. import __version__"),
    "the version in a view": ("../magics/a.py", "import IPython\nfrom detrain_nb import __version__"),
    "torch in a function of values": ("values.py", "import struct\ndef f():\n    import torch"),
    "torch for types": ("values.py", "if TYPE_CHECKING:\n    import torch\n    from typing import Self"),
    "torch in the launcher": ("node/rank/launcher.py", "from torch.distributed.elastic import agent"),
    "AF_UNIX in a function": ("transport/local.py", "import socket\ndef f():\n    return socket.AF_UNIX"),
    "a newer name behind a version": (
        "plan/a.py",
        "import sys\nif sys.version_info >= (3, 11):\n    import tomllib",
    ),
    "newer things in the kernel": (
        "session/files.py",
        "import asyncio\nfrom typing import Self\nasyncio.TaskGroup",
    ),
    "caches and environments": ("../.cache/a.py", ""),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_design_allows_is_no_fault(case: str, rules: Rules, tmp_path: Path) -> None:
    _plant(tmp_path, *ALLOWED[case])
    assert find_faults(tmp_path, rules) == []


def _plant(root: Path, file: str, source: str) -> None:
    (root / PACKAGE).mkdir()
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


@pytest.mark.parametrize("line", ["    wire:  errors  # numpy, but seldom", "    wire errors", "    wire:  nowhere"])
def test_line_that_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"docs/design\.md"):
        _read_arrows(f"    errors:  -\n{line}\n")


def test_core_imports_without_torch_ipython_widgets_and_paramiko(rules: Rules, tmp_path: Path) -> None:
    names = []
    for module in list_modules(ROOT):
        libraries = rules.libraries[module.room]
        is_heavy = any(libraries.allow(library, module.path.name, "top") for library in HEAVY)
        if not is_heavy and module.room != "__main__":  # importing it would run the command
            names.append(module.import_name)
    assert {PACKAGE, f"{PACKAGE}.session"} <= set(names)
    _import_elsewhere(names, tmp_path, before=f"sys.modules.update(dict.fromkeys({sorted(HEAVY)}))")


def test_notebook_side_imports_where_there_is_no_fcntl_and_no_unix_socket(tmp_path: Path) -> None:
    names = [PACKAGE, *(module.import_name for module in list_modules(ROOT) if module.room in DRIVES_NODES)]
    hide = f"import socket; del socket.AF_UNIX; sys.modules.update(dict.fromkeys({sorted(NOT_ON_WINDOWS)}))"
    _import_elsewhere(names, tmp_path, before=hide)


def _import_elsewhere(names: list[str], folder: Path, *, before: str = "") -> None:
    """Import the modules in a process with neither the checkout nor the current folder on its path."""
    code = f"import importlib, sys\n{before}\nfor name in {names}: importlib.import_module(name)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
