"""Policies: plain values that are checked once and can be pickled, written as JSON and read from TOML."""

import copy
import dataclasses
import json
import math
import pickle
import tomllib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kpl_core.errors import ConfigError
from kpl_core.options.policy import FairnessPolicy, RateLimitPolicy

NOT_A_POSITIVE_NUMBER = [0, 0.0, -1, math.nan, math.inf, -math.inf, True, "3", None]
NOT_A_COUNT = [0, -1, 1.5, math.nan, math.inf, True, "3", None]


def test_the_defaults_are_the_specifications():
    assert RateLimitPolicy() == RateLimitPolicy(tokens_per_second=10.0, burst_tokens=10)
    assert FairnessPolicy() == FairnessPolicy(weights={}, default_weight=1, max_buffer_per_flow=16)


@pytest.mark.parametrize("bad", NOT_A_POSITIVE_NUMBER)
def test_a_rate_must_be_finite_and_positive(bad):
    with pytest.raises(ConfigError, match="tokens_per_second is"):
        RateLimitPolicy(tokens_per_second=bad)


@pytest.mark.parametrize("bad", NOT_A_COUNT)
def test_a_burst_must_be_a_whole_number_above_zero(bad):
    with pytest.raises(ConfigError, match="burst_tokens is"):
        RateLimitPolicy(burst_tokens=bad)


@pytest.mark.parametrize("bad", [*NOT_A_POSITIVE_NUMBER, 1e-7, 1e7])
def test_weights_must_be_within_their_bounds(bad):
    with pytest.raises(ConfigError, match=r"weights\['a'\] is"):
        FairnessPolicy(weights={"a": bad})
    with pytest.raises(ConfigError, match="default_weight is"):
        FairnessPolicy(default_weight=bad)


@pytest.mark.parametrize("bad", NOT_A_COUNT)
def test_a_buffer_must_be_a_whole_number_above_zero(bad):
    with pytest.raises(ConfigError, match="max_buffer_per_flow is"):
        FairnessPolicy(max_buffer_per_flow=bad)


def test_weights_must_be_a_mapping():
    with pytest.raises(ConfigError, match="weights is of type list"):
        FairnessPolicy(weights=[1, 2])  # type: ignore[arg-type]


def test_an_unknown_flow_has_the_default_weight():
    policy = FairnessPolicy(weights={"a": 3}, default_weight=2)

    assert (policy.weight_of("a"), policy.weight_of("b"), policy.weight_of(None), policy.weight_of(7)) == (3, 2, 2, 2)


def test_a_position_is_found_as_an_int_and_as_text():
    assert FairnessPolicy(weights={0: 3}).weight_of(0) == 3
    assert FairnessPolicy(weights={"0": 3}).weight_of(0) == 3
    assert FairnessPolicy(weights={0: 3}).weight_of("0") == 1


@pytest.mark.parametrize("policy", [RateLimitPolicy(), FairnessPolicy()])
def test_a_policy_cannot_be_changed(policy):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, dataclasses.fields(policy)[0].name, 1)


def test_the_weights_of_a_policy_cannot_be_changed():
    given_weights: dict[str | int, float] = {"a": 3}
    policy = FairnessPolicy(weights=given_weights)
    given_weights["a"] = 5
    weights: Any = policy.weights

    changes: list[Callable[[], object]] = [
        lambda: weights.__setitem__("a", 1),
        lambda: weights.__delitem__("a"),
        lambda: weights.__ior__({"a": 1}),
        weights.clear,
        lambda: weights.pop("a"),
        weights.popitem,
        lambda: weights.setdefault("b", 1),
        lambda: weights.update(a=1),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert policy.weights == {"a": 3}


rate_limits = st.builds(RateLimitPolicy, st.floats(1e-6, 1e9), st.integers(1, 10**9))
fairness = st.builds(
    FairnessPolicy,
    st.dictionaries(st.text(max_size=5), st.integers(1, 100) | st.floats(1e-6, 1e6), max_size=4),
    st.integers(1, 100),
    st.integers(1, 1000),
)


@given(rate_limits | fairness)
def test_a_policy_can_be_serialised_and_read_back(policy):
    table = dataclasses.asdict(policy)

    assert type(policy)(**json.loads(json.dumps(table))) == policy
    assert msgspec.json.decode(msgspec.json.encode(policy), type=type(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301 - our own bytes
    assert copy.deepcopy(policy) == policy
    assert hash(copy.copy(policy)) == hash(policy)


def test_a_policy_can_be_read_from_toml():
    tables = tomllib.loads("""
        [rate_limit]
        tokens_per_second = 8.0
        burst_tokens = 20
        [fairness]
        max_buffer_per_flow = 32
        weights = { gold = 3, trial = 0.5 }
    """)

    assert RateLimitPolicy(**tables["rate_limit"]) == RateLimitPolicy(8.0, 20)
    assert FairnessPolicy(**tables["fairness"]) == FairnessPolicy({"gold": 3, "trial": 0.5}, 1, 32)


def test_an_invalid_value_in_a_file_is_named():
    with pytest.raises(msgspec.ValidationError, match="tokens_per_second is 0"):
        msgspec.json.decode(b'{"tokens_per_second": 0}', type=RateLimitPolicy)
