"""A signal that comes from two sides counts once; one that is meant to hurry counts."""

import signal

import pytest

from kpl_integrations.cli.serve.echoes import Echoes

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("signals", "counted"),
    [
        pytest.param([(TERM, 0.0), (TERM, 0.003)], [True, False], id="from systemd and from the crew"),
        pytest.param([(TERM, 0.0), (TERM, 1.0)], [True, True], id="somebody who hurries"),
        pytest.param([(TERM, 0.0), (TERM, 0.9), (TERM, 1.1)], [True, False, True], id="no echo of an echo"),
        pytest.param([(TERM, 0.0), (INT, 0.1), (INT, 0.2)], [True, True, False], id="another signal is no echo"),
    ],
)
def test_the_same_signal_within_a_second_counts_once(signals, counted):
    echoes = Echoes()
    assert [not echoes.is_echo(number, now) for number, now in signals] == counted
