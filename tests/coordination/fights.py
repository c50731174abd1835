"""Two processes compete for one object: at most one of them replaces each version."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import kpl_core

FIGHTER = Path(__file__).with_name("fighter.py")
PACKAGES = str(Path(next(iter(kpl_core.__path__))).parent)


def assert_never_two_winners(url: str, *, attempts: int, environment: Mapping[str, str] | None = None) -> None:
    """Let two processes compete, and check that no version was replaced twice."""
    fighters = [
        subprocess.Popen(
            [sys.executable, FIGHTER, url, str(attempts)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": PACKAGES} | dict(environment or {}),
        )
        for _ in range(2)
    ]
    try:
        said = [json.loads(fighter.communicate(timeout=200)[0]) for fighter in fighters]
    finally:
        for fighter in fighters:
            fighter.kill()
            fighter.wait()
    replaced = [version for each in said for version in each["replaced"]]
    assert len(replaced) == len(set(replaced))
    # For each loser there is a winner, and the processes really competed.
    assert len(replaced) + sum(each["refused"] for each in said) == 2 * attempts
    assert sum(each["refused"] for each in said) > 0
    assert len(replaced) >= attempts
