"""Hatchling's hooks. The one for wheels adds the kernels in C, where a C compiler can make them.

The environment variable `KPL_KERNELS` decides: `off` makes the pure wheel, `require` fails where none is possible.

The one for metadata adds what depends on where the project is published.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

NAME = "kpl_core.pipeline._open_record"
SOURCE = "kpl_core/pipeline/_module.c"


class CustomBuildHook(BuildHookInterface[Any]):
    """Compiles with setuptools, which knows the platform's compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and include the result in the wheel. An editable installation has no kernels.

        Raises:
            ValueError: `KPL_KERNELS` has a value that does not exist, or requires what is not possible.
        """
        wanted = os.environ.get("KPL_KERNELS", "").strip()
        if wanted not in {"", "off", "require"}:
            message = f"KPL_KERNELS is {wanted!r}; set it to off or require, or unset it"
            raise ValueError(message)
        without = "an editable installation" if version == "editable" else sys.implementation.name
        is_possible = without == "cpython"
        if wanted == "require" and not is_possible:
            message = f"KPL_KERNELS is 'require', but {without} has no kernels in C; set it to off, or unset it"
            raise ValueError(message)
        self._folder = tempfile.TemporaryDirectory()
        if wanted == "off" or not is_possible:
            return
        compiled = self._compile(is_optional=wanted != "require")
        if not compiled.exists():
            self.app.display_warning(f"{NAME} was not compiled, so the wheel is pure Python")
            return
        build_data["force_include"][str(compiled)] = f"{NAME.rpartition('.')[0].replace('.', '/')}/{compiled.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _compile(self, *, is_optional: bool) -> Path:
        """Return the path of the module. If the compiler fails, an optional one does not exist then."""
        from setuptools import Distribution, Extension  # noqa: PLC0415 - a dependency of this hook alone

        sources = [str(Path(self.root) / SOURCE)]
        distribution = Distribution({"ext_modules": [Extension(NAME, sources, optional=is_optional)]})
        command: Any = distribution.get_command_obj("build_ext")
        command.build_lib = command.build_temp = self._folder.name
        command.ensure_finalized()
        command.run()
        return Path(command.get_ext_fullpath(NAME))

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove the compiler's files."""
        self._folder.cleanup()


class CustomMetadataHook(MetadataHookInterface):
    """Adds authors, URLs and README, whose links are absolute: an index of packages has only this file of the project.

    Owner and repository stand in `pyproject.toml`. While they are empty, the links stay as they are in the checkout.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields."""
        owner, repository = self.config["owner"], self.config["repository"].rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        if owner and repository:
            files = f"{repository}/blob/v{metadata['version']}"
            readme = with_absolute_links(readme, files)
            metadata["authors"] = [{"name": owner}]
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def with_absolute_links(text: str, files: str) -> str:
    """Return Markdown whose relative links and pictures, those in HTML too, lead to `files`, the URL of its folder."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        return f"{match['before']}{files}/{target}{'?raw=true' if target.endswith(('.png', '.svg')) else ''}"

    return re.sub(r'(?P<before>\]\(|\b(?:href|src|srcset)=")(?!\w+:|#)(?P<target>[^)"\s]+)', absolute, text)
