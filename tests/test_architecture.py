"""Rules of the architecture that import-linter cannot check, read from the source as it is imported.

The allowed imports are in pyproject.toml (`[tool.importlinter]`, run by `make check`). These tests read the modules
with I/O from there, so that the list exists once.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp

import kpl_core
import kpl_integrations

CORE = Path(next(iter(kpl_core.__path__)))
ADAPTERS = Path(next(iter(kpl_integrations.__path__)))
TESTS = Path(__file__).parent
PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))

LONGEST_FILE_LINES = 500
LONGEST_FUNCTION_LINES = 60
MOST_FILES_IN_A_FOLDER = 20
NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "manager", "misc", "types", "util", "utils"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
ASYNC_SYNTAX = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)


def _ring() -> set[str]:
    """Return the modules and packages of kpl_core that may touch everything."""
    (contract,) = (
        each for each in PYPROJECT["tool"]["importlinter"]["contracts"] if each["id"] == "effects-in-the-ring"
    )
    exempt = (re.fullmatch(r"kpl_core\.([\w.]+?)(\.\*\*)? -> \*", line) for line in contract["ignore_imports"])
    return {match[1] for match in exempt if match}


@cache
def _sources(package: Path) -> tuple[tuple[Path, ast.Module], ...]:
    return tuple(
        (path.relative_to(package.parent), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(package.rglob("*.py"))
    )


# Which modules bring each distribution takes a second to find out.
_packages_distributions = cache(packages_distributions)


def _names(requirements: Iterable[str]) -> set[str]:
    """Return the distributions named by requirements such as `uvicorn[standard]>=0.32`."""
    return {re.split(r"[\[<>=~!; ]", each, maxsplit=1)[0].replace("_", "-").lower() for each in requirements}


def _undeclared(package: Path, declared: set[str]) -> set[str]:
    """Return the imports of `package`, as `file: module`, that no declared distribution brings."""
    own = {CORE.name, ADAPTERS.name}
    brought_by = _packages_distributions()
    return {
        f"{path}: {module}"
        for path, tree in _sources(package)
        for module in _imports(tree)
        if module not in own | sys.stdlib_module_names
        and not declared & {name.replace("_", "-").lower() for name in brought_by.get(module, ())}
    }


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_the_ring_is_the_one_of_the_architecture() -> None:
    assert _ring() == {
        "background",
        "coordination",
        "durability.dead_letters",
        "durability.replay",
        "durability.spool",
        "event_loop",
        "limits",
        "producer",
        "testing",
        "transport",
    }


def test_outside_the_ring_nothing_is_async() -> None:
    ring = _ring()
    offenders = [
        f"{path}:{node.lineno}"
        for path, tree in _sources(CORE)
        if not ring & {".".join(path.with_suffix("").parts[1:depth]) for depth in (2, 3)}
        for node in ast.walk(tree)
        if isinstance(node, ASYNC_SYNTAX)
    ]
    assert offenders == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types alone and those in functions count too."""
    graph = grimp.build_graph("kpl_core", "kpl_integrations", cache_dir=None)
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


def test_a_file_can_be_read_in_one_sitting() -> None:
    too_long = {
        str(path): lines
        for folder in (CORE, ADAPTERS, TESTS, TESTS.parent / "benchmarks", TESTS.parent / "examples")
        for path in sorted(folder.rglob("*.py"))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE_LINES
    }
    assert too_long == {}


def test_a_function_fits_on_a_screen() -> None:
    too_long = {
        f"{path}:{node.lineno} {node.name}": lines
        for package in (CORE, ADAPTERS)
        for path, tree in _sources(package)
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION_LINES
    }
    assert too_long == {}


def test_a_file_is_named_for_what_it_holds() -> None:
    offenders = [
        str(path)
        for package in (CORE, ADAPTERS)
        for path, _ in _sources(package)
        if NAMES_THAT_SAY_NOTHING & {path.stem, path.parent.name}
    ]
    assert offenders == []


def test_a_folder_has_at_most_20_files() -> None:
    folders = Counter(str(path.parent) for package in (CORE, ADAPTERS) for path, _ in _sources(package))
    assert {folder: files for folder, files in folders.items() if files > MOST_FILES_IN_A_FOLDER} == {}


def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for package in (CORE, ADAPTERS):
        for path, tree in _sources(package):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_what_two_folders_of_tests_use_is_in_support() -> None:
    wrong = {
        f"{path.relative_to(TESTS)}: tests.{folder}"
        for path in sorted(TESTS.rglob("*.py"))
        for folder in re.findall(r"^\s*from tests\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if folder not in {"support", path.relative_to(TESTS).parts[0].removesuffix(".py")}
    }
    assert not wrong, "move it to tests/support/, or to a folder that both are in"


def test_the_mark_long_stands_in_the_file_of_its_tests() -> None:
    """`make test-long` runs only the files that contain it."""
    elsewhere = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if not path.name.startswith("test_") and "mark.long" in path.read_text(encoding="utf-8")
    ]
    assert elsewhere == []


def test_what_is_imported_is_declared() -> None:
    project = PYPROJECT["project"]
    extras = {extra: _names(requirements) for extra, requirements in project["optional-dependencies"].items()}
    # aiohttp and botocore come with aiobotocore, in the releases that fit it; trio is only met where it runs already.
    core = _names(project["dependencies"]) | extras["cbor"] | extras["redis"] | {"aiohttp", "botocore", "trio"}
    assert _undeclared(CORE, core) == set()
    # Only pytest loads the plugin.
    assert _undeclared(ADAPTERS, core.union({"pytest"}, *extras.values())) == set()
