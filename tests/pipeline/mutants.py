"""Broken copies of an algorithm, to see that a law would notice.

A mutant is the module's own source with a line or two replaced, so that it stays in step
with the original: when the line to be broken is gone, the mutant says so.
"""

import inspect
from types import ModuleType
from typing import Any

__all__ = ["mutant_of"]


def mutant_of(module: ModuleType, *replacements: tuple[str, str], **names: Any) -> Any:
    """Return a copy of `module` with pieces of its source, each found exactly once, replaced.

    `names` are put into the copy's namespace in place of what it imported.
    """
    source = inspect.getsource(module)
    for old, new in replacements:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    copy = ModuleType(f"{module.__name__}_mutant")
    exec(compile(source, f"<mutant of {module.__name__}>", "exec"), copy.__dict__)  # noqa: S102 - our own source
    vars(copy).update(names)
    return copy
