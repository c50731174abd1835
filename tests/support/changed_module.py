"""A module that is imported from a changed text in place of its file. The file stays as it is."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class ChangedLoader(SourceFileLoader):
    """Loads a module from a text in place of its file."""

    def __init__(self, module: str, path: str, text: str) -> None:
        super().__init__(module, path)
        self._text = text
        self.was_used = False

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        self.was_used = True
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _ChangedFinder(MetaPathFinder):
    """Finds the module of one loader, and no other."""

    def __init__(self, loader: ChangedLoader) -> None:
        self._loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = self._loader
        return spec


def import_changed(path: str, text: str) -> ChangedLoader:
    """Let this process import the module at `path` from `text`. It must not have imported it yet."""
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    loader = ChangedLoader(name, str(Path(path).resolve()), text)
    sys.meta_path.insert(0, _ChangedFinder(loader))
    return loader
