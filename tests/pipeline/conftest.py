"""The kernels in C, compiled for these tests."""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from kpl_core.pipeline import open_record
from kpl_core.records.outcome import Outcome
from tests.pipeline.one_stream import OneStream, one_stream_of

SOURCE = Path(open_record.__file__).with_name("_module.c")


@pytest.fixture(scope="session")
def in_c(tmp_path_factory) -> ModuleType:
    """Compile it here: the sources run without it, and the compiled wheel has it."""
    include = Path(sysconfig.get_path("include"))
    if not shutil.which("cc") or not (include / "Python.h").exists():
        pytest.skip("no C compiler with the headers of Python")
    built = tmp_path_factory.mktemp("c") / f"_open_record{sysconfig.get_config_var('EXT_SUFFIX')}"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type"]
    options += [
        "-Wno-missing-field-initializers",
        *(["-undefined", "dynamic_lookup"] * (sysconfig.get_platform()[:5] == "macos")),
    ]
    subprocess.run(["cc", *options, f"-I{include}", str(SOURCE), "-o", str(built)], check=True, timeout=50)
    spec = importlib.util.spec_from_file_location("_open_record", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.use_outcomes(Outcome)
    return module


@pytest.fixture
def one_stream(in_c: ModuleType) -> OneStream:
    return one_stream_of(in_c)
