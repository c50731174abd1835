"""The public API of `kpl_core` is what its page says, and what adapters and examples import from it."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import kpl_core
from docs.public_api import public_api

ROOT = Path(__file__).parents[2]
MOST_NAMES = 40


def test_the_page_has_the_signatures_of_today() -> None:
    """To change the public API, write the file again: `python -m docs.public_api > docs/reference/public_api.txt`."""
    assert (ROOT / "docs" / "reference" / "public_api.txt").read_text(encoding="utf-8") == public_api()


def test_the_package_exports_few_names() -> None:
    assert len(kpl_core.__all__) == len({*kpl_core.__all__}) <= MOST_NAMES


def test_adapters_and_examples_import_public_names_from_the_package() -> None:
    public = {*kpl_core.__all__}
    deep = [
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for folder in ("kpl_integrations", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for module, name in _imports(path)
        if name in public and getattr(import_module(module), name) is getattr(kpl_core, name)
    ]
    assert deep == []


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kpl_core."):
            yield from ((str(node.module), alias.name) for alias in node.names)
