"""The installed packages: environment.yml and the lists in pyproject.toml agree with each other and with the tree."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "detrain_nb"
MAPPED = {"magics": f"{PACKAGE}.magics", "widgets": f"{PACKAGE}.widgets"}  # top-level folder -> import name
CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python"}  # where conda-forge uses another name
ONLY_CONDA = {"pip"}  # installs the package itself


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_environment_yml_equals_pyproject(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    wanted = {"python": str(Requirement(f"python{project['requires-python']}").specifier)}
    for line in project["dependencies"] + extras["quickstart"] + extras["test"]:
        requirement = Requirement(line)
        wanted[CONDA_NAMES.get(requirement.name, requirement.name)] = str(requirement.specifier)

    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *lines, by_pip = environment["dependencies"]
    package, *only_pip = by_pip["pip"]
    assert package == "--editable ."
    lines += only_pip  # packages that conda-forge may lack
    found = {Requirement(line).name: str(Requirement(line).specifier) for line in lines}
    assert environment["channels"] == ["conda-forge"]
    assert {name: found[name] for name in found if name not in ONLY_CONDA} == wanted
    assert len(lines) == len(found), "a name stands twice in environment.yml"


def test_constraints_are_within_the_ranges_of_pyproject(pyproject: dict[str, Any]) -> None:
    allowed = {Requirement(line).name: Requirement(line).specifier for line in pyproject["project"]["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert [pin.name for pin in pins] == ["torch"], "more pins could make it impossible to install elsewhere"
    for pin in pins:
        version = str(pin.specifier).removeprefix("==")
        assert allowed[pin.name].contains(version)


def test_setuptools_lists_every_package_of_the_tree(pyproject: dict[str, Any]) -> None:
    folders = {PACKAGE: PACKAGE, **{name: folder for folder, name in MAPPED.items() if (ROOT / folder).exists()}}
    packages = set()
    for name, folder in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            packages.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    setuptools = pyproject["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(packages)
    assert setuptools["package-dir"] == folders


def test_every_library_that_is_imported_is_declared(pyproject: dict[str, Any]) -> None:
    """Libraries are in the dependencies, or in an extra if only functions import them."""
    declared = {Requirement(line).name.lower() for line in pyproject["project"]["dependencies"]}
    extras = pyproject["project"]["optional-dependencies"]
    in_an_extra = declared | {Requirement(line).name.lower() for line in extras["quickstart"]}
    owners = importlib.metadata.packages_distributions()
    undeclared = []
    for path in [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "magics").rglob("*.py"), *(ROOT / "widgets").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_the_top = _list_libraries(tree, is_in_functions=False)
        for library in _list_libraries(tree):
            allowed = declared if library in at_the_top else in_an_extra
            if not {name.lower() for name in owners.get(library, [library])} & allowed:
                undeclared.append(f"{path.relative_to(ROOT)} imports {library}: declare it in pyproject.toml")
    assert undeclared == []


def _list_libraries(tree: ast.Module, *, is_in_functions: bool = True) -> set[str]:
    imported = set()
    inside = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_in_functions
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            imported.add(node.module.split(".")[0])
    return imported - set(sys.stdlib_module_names) - {PACKAGE}


@pytest.mark.parametrize("name", ["detrain_nb", *MAPPED.values()])
def test_installed_package_imports_from_any_folder(name: str, pyproject: dict[str, Any], tmp_path: Path) -> None:
    if name not in pyproject["tool"]["setuptools"]["packages"]:
        assert not (ROOT / name.rpartition(".")[2]).exists()  # a room that does not exist yet
        return
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if (Path(sys.prefix) / ".done").is_dir():  # the Makefile made this environment, and guarantees the import
        (tmp_path / "detrain_nb" / "detrain_nb").mkdir(parents=True)  # the folder above a clone
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}; print({name}.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "__init__.py"


def test_entry_points_lead_somewhere(pyproject: dict[str, Any]) -> None:
    wanted = {name: target for group in _entry_groups(pyproject).values() for name, target in group.items()}
    distribution = importlib.metadata.distribution(PACKAGE)
    installed = {entry.name: entry.value for entry in distribution.entry_points}
    assert installed == wanted, "the package was installed before pyproject.toml changed: install it again"
    for entry in distribution.entry_points:
        assert callable(entry.load())


def test_every_name_that_the_package_offers_is_there() -> None:
    package = importlib.import_module("detrain_nb")
    for name in package.__all__:
        assert getattr(package, name)


def test_version_is_the_one_of_the_package(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["version"] == importlib.import_module(PACKAGE).__version__


def _entry_groups(pyproject: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {"console_scripts": pyproject["project"]["scripts"], **pyproject["project"]["entry-points"]}
