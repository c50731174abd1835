"""Wrong admin keys: a few attempts, then slowly, without an effect on other addresses. Times are literal."""

import pytest

from kpl_integrations.ingest.admission.clients import ALL_AT_ONCE, AT_ONCE, SECONDS_EACH, LoginAttempts


def guessed(count: int, *addresses: str, now: float = 0.0) -> LoginAttempts:
    attempts = LoginAttempts(0.0)
    for _ in range(count):
        for address in addresses:
            attempts.failed(address, now)
    return attempts


def test_after_a_few_wrong_keys_an_address_waits_and_then_has_one_attempt_at_a_time() -> None:
    attempts = guessed(AT_ONCE - 1, "192.0.2.1")
    assert attempts.wait_seconds("192.0.2.1", 0.0) == 0
    attempts.failed("192.0.2.1", 0.0)
    assert attempts.wait_seconds("192.0.2.1", 0.0) == pytest.approx(SECONDS_EACH)
    assert attempts.wait_seconds("192.0.2.1", SECONDS_EACH) == 0
    attempts.failed("192.0.2.1", SECONDS_EACH)
    assert attempts.wait_seconds("192.0.2.1", SECONDS_EACH) == pytest.approx(SECONDS_EACH)
    assert attempts.wait_seconds("192.0.2.1", 3_600.0) == 0


@pytest.mark.parametrize(
    ("guesser", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("", "192.0.2.1", False),
        ("a socket", "a socket", True),
    ],
)
def test_wrong_keys_delay_only_their_own_address(guesser: str, other: str, is_same: bool) -> None:
    assert (guessed(AT_ONCE, guesser).wait_seconds(other, 0.0) > 0) == is_same


def test_many_addresses_together_are_bounded_too() -> None:
    addresses = [f"10.0.{number // 256}.{number % 256}" for number in range(ALL_AT_ONCE)]
    attempts = guessed(1, *addresses)
    assert 0 < attempts.wait_seconds("192.0.2.1", 0.0) <= 0.1
    assert attempts.wait_seconds("192.0.2.1", 0.2) == 0
