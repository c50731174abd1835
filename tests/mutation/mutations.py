"""Mutations: small faults that a person could have written, each a replaced piece of a module's source.

A mutation replaces one piece of the text and leaves the rest as it stands, so its diff shows the fault alone.
"""

import ast
import difflib
import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

# Operator -> what replaces it. A comparison gets its neighbour at the boundary first, then its opposite.
COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls whose first two arguments may change places without a fault, or that only the type checker reads.
UNORDERED = frozenset({"min", "max", "cast", "isinstance", "issubclass", "TypeVar", "NewType"})
# A fault in these would be in a type, not in what the program does.
_TYPES = frozenset({"TypeVar", "NewType", "ParamSpec"})


@dataclass(frozen=True)
class Mutation:
    """One replaced piece of a module: `text[start:end]` in bytes, `old`, becomes `new`.

    `lines` are those that run it, and `context` is the text of the first. `at_import`: importing the module runs it.
    """

    path: str
    scope: str
    lines: tuple[int, ...]
    start: int
    end: int
    context: str
    old: str
    new: str
    at_import: bool

    def source(self, root: Path) -> str:
        """Return the module's text with the fault in it."""
        text = (root / self.path).read_bytes()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    def compiles(self, root: Path) -> bool:
        """Return True if Python accepts the text: two swapped arguments may not be in a legal order."""
        try:
            compile(self.source(root), self.path, "exec")
        except SyntaxError:
            return False
        return True

    def diff(self, root: Path) -> str:
        """Return the fault as a unified diff without context."""
        before = (root / self.path).read_text(encoding="utf-8").splitlines()
        changes = list(difflib.unified_diff(before, self.source(root).splitlines(), n=0, lineterm=""))
        return "\n".join(line for line in changes[2:] if not line.startswith("@@"))


def mutations_of(root: Path, path: str) -> list[Mutation]:
    """Return every mutation of a module, in the order of its text."""
    text = (root / path).read_bytes()
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    unique = {(found.start, found.end, found.new): found for found in finder.found}
    return [found for _, found in sorted(unique.items())]


def sample(mutations: list[Mutation], size: int, seed: int, root: Path) -> list[Mutation]:
    """Draw `size` mutations that compile.

    Each one's place in the draw depends on the seed and on its own text. So a change elsewhere keeps the sample.
    """

    def rank(mutation: Mutation) -> bytes:
        key = (seed, mutation.path, mutation.scope, mutation.context, mutation.old, mutation.new)
        return hashlib.sha256(repr(key).encode()).digest()

    drawn = (mutation for mutation in sorted(mutations, key=rank) if mutation.compiles(root))
    return list(itertools.islice(drawn, size))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, text: bytes) -> None:
        self.found: list[Mutation] = []
        self._path = path
        self._text = text
        self._lines = text.splitlines(keepends=True)
        # Where each line starts.
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        self._scope: list[str] = []
        self._functions = 0
        self._statement = 0

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        super().visit(node)

    # What is skipped: types, what only a reader sees, and decorators.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip it: Python 3.11 does not know where the parts stand."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip it: it states what holds already."""

    def visit_arg(self, node: ast.arg) -> None:
        """Skip its annotation."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit(node.args)
        self._scope.append(node.name)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - a node's name

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self._drop_if_stored([node.target], node)
            self.visit(node.value)

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in {"__all__", "__slots__"}:
            return
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id in _TYPES:
            return
        self._drop_if_stored(node.targets, node)
        self._swap_first_two(node.value)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        old, new = ARITHMETIC.get(type(node.op), ("", ""))
        self._replace_between(node.target, node.value, f"{old}=", f"{new}=")
        self._swap_first_two(node.value)
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                # None in place of False is the same to a caller that asks whether. `True` is the fault of that line.
                self._replace(node.value, "None")
            self._swap_first_two(node.value)
            self.visit(node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._swap_first_two(node.iter)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        inverted_anyway = isinstance(node.test, ast.Compare) or (
            isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        )
        if not inverted_anyway:
            self._replace(node.test, f"not ({self._of(node.test)})")
        self.generic_visit(node)

    visit_While = visit_If  # noqa: N815 - a node's name
    visit_IfExp = visit_If  # noqa: N815 - a node's name

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            old, replacements = COMPARISONS[type(operator)]
            for new in replacements:
                self._replace_between(left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        old, new = ARITHMETIC.get(type(node.op), ("", ""))
        self._replace_between(node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, f"({self._of(node.operand)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in OPPOSITES:
            self._replace(node.func, OPPOSITES[name])
        if name not in UNORDERED:
            self._swap(node.args)
        if name == "zip":
            # Its `strict` states what holds already, as an assert does.
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = node.slice
        if isinstance(index, ast.Slice):
            lower, upper = (self._of(end) if end else "" for end in (index.lower, index.upper))
            if index.step is None and lower != upper:
                self._replace(index, f"{upper}:{lower}")
        elif self._of(index) == "0":
            self._replace(index, "-1")
        elif self._of(index) == "-1":
            self._replace(index, "0")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._replace(node, repr(node.value + 1))
            self._replace(node, repr(node.value - 1))

    # The text.

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def _add(self, start: int, end: int, new: str, node: ast.expr | ast.stmt) -> None:
        last = node.end_lineno or node.lineno
        lines = tuple(sorted({self._statement, *range(node.lineno, last + 1)}))
        scope = ".".join(self._scope)
        context = self._lines[node.lineno - 1].decode().strip()
        old = self._text[start:end].decode()
        if new == old:
            return
        mutation = Mutation(self._path, scope, lines, start, end, context, old, new, at_import=not self._functions)
        self.found.append(mutation)

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self._add(*self._span(node), new, node)

    def _replace_between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._text[start:end].decode()
        if old and old in between:
            self._add(start, end, between.replace(old, new, 1), right)

    def _swap(self, nodes: list[ast.expr]) -> None:
        pair = nodes[:2]
        if len(pair) > 1 and not any(isinstance(node, ast.Starred) for node in pair):
            first, second = pair
            between = self._text[self._span(first)[1] : self._span(second)[0]].decode()
            new = f"{self._of(second)}{between}{self._of(first)}"
            self._add(self._span(first)[0], self._span(second)[1], new, first)

    def _swap_first_two(self, node: ast.expr) -> None:
        if isinstance(node, ast.Tuple | ast.List):
            self._swap(node.elts)

    def _drop_if_stored(self, targets: list[ast.expr], node: ast.stmt) -> None:
        """Drop an assignment to an attribute or an item. Without an assigned name the module would not run at all."""
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            self._replace(node, "pass")


def python_files(root: Path, scope: list[str]) -> list[str]:
    """Return the paths, relative to `root`, of the Python files in a scope of files and folders."""
    files: set[Path] = set()
    for name in scope:
        place = root / name
        files |= {place} if place.is_file() else set(place.rglob("*.py"))
    return sorted(str(file.relative_to(root)) for file in files)
