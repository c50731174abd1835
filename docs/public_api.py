"""Write the public API of `kpl_core` with its signatures, read from the source: `python -m docs.public_api > FILE`.

`docs/reference/public_api.txt` is its output. So a change of a public name or signature is seen in a review.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import kpl_core

__all__ = ["public_api"]

_SHOWN = {"property", "classmethod", "staticmethod"}
_SPECIAL = {
    "__init__",
    "__await__",
    "__aenter__",
    "__aexit__",
    "__enter__",
    "__exit__",
    "__iter__",
    "__len__",
    "__getitem__",
}


def public_api() -> str:
    """Return a line for each name that `kpl_core` exports, and for each public member of a class."""
    return "".join(f"{line}\n" for name in kpl_core.__all__ for line in _lines(name, getattr(kpl_core, name)))


def _lines(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {name}" + _bases(value)
        members: dict[str, str] = {}
        for each in reversed(value.__mro__):
            if each.__module__.startswith("kpl_core."):
                members |= _members(each)
        for member in sorted(members):
            yield f"    {members[member]}"
    elif inspect.isfunction(value):
        yield _signature(_tree(value))
    else:
        yield name


def _bases(value: type) -> str:
    bases = [base.__name__ for base in value.__bases__ if base is not object]
    return f"({', '.join(bases)})" if bases else ""


def _tree(value: Any) -> Any:  # noqa: ANN401
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _members(value: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in _tree(value).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if "overload" in decorators:
                continue
            shown = next(
                (f"@{each} " for each in decorators if each in {"property", "classmethod", "staticmethod"}), ""
            )
            found[node.name] = shown + _signature(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_public(node.target.id):
            # Without what describes an option: `reference/options.md` has that.
            kind = node.annotation
            if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
                kind = kind.slice.elts[0]  # type: ignore[attr-defined] # a tuple
            default = "" if node.value is None else f" = {ast.unparse(node.value)}"
            found[node.target.id] = f"{node.target.id}: {ast.unparse(kind)}{default}"
    return found


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in _SPECIAL


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{kind} {node.name}({ast.unparse(node.args)}){returns}"


if __name__ == "__main__":
    sys.stdout.write(public_api())
