"""Runs schemathesis on a path of an OpenAPI description, inside a test.

`schema.parametrize()` makes the cases when tests are collected. Each worker process collects all tests, so it would
pay for the cases of tests that another one runs.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from schemathesis import BaseSchema, Case
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.pytest.lazy import get_all_tests

__all__ = ["check_path"]


def check_path(schema: BaseSchema, path: str, check: "Callable[[Case[Any]], None]", *, max_examples: int) -> None:
    """Call `check` with schemathesis' own cases of each operation at this path, and with `max_examples` drawn ones."""
    load_all_checks()
    how = settings(
        max_examples=max_examples,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    tests = list(get_all_tests(schema=schema.include(path=path), test_func=check, settings=how, given_kwargs=None))
    assert tests, path
    for result in tests:
        assert isinstance(result, Ok), result
        _, run = result.ok()
        run()
