"""Which version of the hot path runs: the kernels in C or their twins in Python."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from kpl_core import COMPILED, ConfigError
from kpl_core.pipeline import open_record
from kpl_core.pipeline.open_record import PythonOpenRecord, chosen_kernels


def ran(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)


def test_compiled_says_which_open_record_runs():
    assert (open_record.OpenRecord is not PythonOpenRecord) is COMPILED


def test_without_a_choice_the_kernels_run_where_they_were_compiled():
    assert (chosen_kernels("") is not None) is (find_spec("kpl_core.pipeline._open_record") is not None)


def test_off_runs_the_version_in_python():
    assert chosen_kernels("off") is None
    code = "from kpl_core.pipeline.open_record import *; print(COMPILED, OpenRecord is PythonOpenRecord)"
    assert ran(code, KPL_KERNELS=" off ").stdout.split() == ["False", "True"]


def test_require_fails_at_the_import_without_the_kernels(monkeypatch):
    def missing(name: str) -> None:
        message = f"No module named {name!r}"
        raise ImportError(message)

    monkeypatch.setattr(open_record, "import_module", missing)
    assert chosen_kernels("") is None
    with pytest.raises(ImportError, match="KPL_KERNELS is 'require', but this installation has no kernels in C"):
        chosen_kernels("require")


def test_another_value_is_an_error_that_names_the_values():
    with pytest.raises(ConfigError, match="KPL_KERNELS is 'on'; set it to off or require, or unset it"):
        chosen_kernels("on")
    done = ran("import kpl_core", KPL_KERNELS="on")
    assert done.returncode == 1
    assert done.stderr.endswith("KPL_KERNELS is 'on'; set it to off or require, or unset it\n")
