"""The reason for a producer that could not be measured names the error, but not this machine."""

import pytest

from benchmarks.reason import reason_in

CASES = [
    ("", ""),
    ("ERROR: No matching distribution found for peer==99\n", "ERROR: No matching distribution found for peer==99"),
    ("Traceback\n  File x\nValueError: too large\n", "ValueError: too large"),
    ("  | Traceback\n  | RuntimeError: in a task\n  +---------\n", "RuntimeError: in a task"),
    ("killed\n", "killed"),
    ("OSError: [Errno 2] No such file: /home/user/x/bin/python", "OSError: [Errno 2] No such file: ..."),
    (
        "ERROR: HTTPSConnectionPool(host='index.example', port=443): gone",
        "ERROR: HTTPSConnectionPool(..., port=443): gone",
    ),
    ("ERROR: 404 for https://index.example/simple/peer", "ERROR: 404 for ..."),
]


@pytest.mark.parametrize(("output", "reason"), CASES)
def test_the_reason_is_the_line_that_names_the_error(output: str, reason: str) -> None:
    assert reason_in(output) == reason
