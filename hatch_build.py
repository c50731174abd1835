"""Hatchling's build hook: adds the C version of the open aggregated record to a compiled wheel."""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "kpl_core.pipeline._open_record"
SOURCES = "kpl_core/pipeline/*.c"


class CustomBuildHook(BuildHookInterface[Any]):
    """Compiles with setuptools, which knows the platform's compiler. It runs if HATCH_BUILD_HOOKS_ENABLE is set."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """Compile, and include the result in the wheel."""
        from setuptools import Distribution, Extension  # noqa: PLC0415 - a dependency of this hook alone

        sources = sorted(map(str, Path(self.root).glob(SOURCES)))
        self._folder = tempfile.TemporaryDirectory()
        distribution = Distribution({"ext_modules": [Extension(NAME, sources)]})
        command: Any = distribution.get_command_obj("build_ext")
        command.build_lib = command.build_temp = self._folder.name
        command.ensure_finalized()
        command.run()
        compiled = Path(command.get_ext_fullpath(NAME))
        build_data["force_include"][str(compiled)] = f"{NAME.rpartition('.')[0].replace('.', '/')}/{compiled.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove the compiler's files."""
        self._folder.cleanup()
