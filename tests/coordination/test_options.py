import pytest

from kpl_core import Config, ConfigError, CoordinationOptions
from kpl_core.coordination.stores import part_of_store
from kpl_core.options.coordination_options import WorkerTier
from kpl_core.options.stage_rules import shard_rules
from kpl_core.options.validation import without_passwords
from kpl_core.records.user_record import Tier


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "bucket/prefix"}, "not a URL of a known kind"),
        ({"tier": "vip"}, "tier is 'vip'"),
        ({"max_workers": 0}, "max_workers is 0; it must be between 1 and 1,000,000 (workers)"),
        ({"max_workers": 2.5}, "max_workers is 2.5; it must be a whole number (workers)"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"interval_seconds": 0.0}, "between 0.05 and 3,600 (seconds)"),
        ({"store": "rediss:///127.0.0.1?group=a"}, "a rediss:// URL without a host; write it as rediss://host:6379/0"),
        ({"usual_workers": 0}, "usual_workers is 0; it must be between 1 and 1,000,000 (workers)"),
        ({"worker_id": "a/b"}, "worker_id is 'a/b'; it must be 1 to 100 letters"),
    ],
)
def test_a_wrong_option_names_its_value_and_its_bound(options, message):
    with pytest.raises(ConfigError) as error:
        CoordinationOptions(**{"store": "memory://x", **options})
    assert message in str(error.value)


@pytest.mark.parametrize("password", ["hunter2", "hun/ter2", "hun@ter2", "hun ter2", "hun?ter2#"])
def test_a_password_in_the_url_is_masked(password):
    options = CoordinationOptions(store=f"redis://user:{password}@host:6379/0?group=a&redis_password=hunter2")
    assert "ter2" not in repr(options)
    assert "ter2" not in repr(Config(coordination=options))
    assert options.shown_store == "redis://***@host:6379/0?group=a&redis_password=***"


def test_passwords_in_a_text_are_masked():
    text = "no answer of redis://u:p/w@host:1 and https://host/?X-Amz-Signature=1a2b&x=1 for a@b"
    assert (
        without_passwords(text) == "no answer of redis://***@host:1 and https://host/?X-Amz-Signature=***&x=1 for a@b"
    )


def test_before_the_first_sync_a_shard_has_a_sixth_of_one_workers_part():
    rules = shard_rules(Config(coordination=CoordinationOptions(store="memory://x", max_workers=10)))
    assert rules.records_per_second == pytest.approx(1_000 / 60)
    assert rules.burst_seconds == 0.1


def test_in_shadow_mode_the_whole_limit_is_used():
    shadow = CoordinationOptions(store="memory://x", shadow=True)
    assert shard_rules(Config(coordination=shadow)) == shard_rules(Config())


def test_workers_have_the_tiers_that_user_records_have():
    assert WorkerTier == Tier


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("file:///run/kpl", "file:///run/kpl/quotas"),
        ("file:///run/kpl/?shared=true", "file:///run/kpl/quotas?shared=true"),
        ("s3://bucket/prefix/?region=eu-west-1", "s3://bucket/prefix/quotas?region=eu-west-1"),
        ("s3://bucket", "s3://bucket/quotas"),
        ("dynamodb://table/group?region=eu-west-1", "dynamodb://table/group-quotas?region=eu-west-1"),
        ("dynamodb://table", "dynamodb://table/default-quotas"),
        ("redis://u:p@host:6379/0", "redis://u:p@host:6379/0?group=default-quotas"),
        ("rediss://host/1?group=a&ssl_cert_reqs=none", "rediss://host/1?group=a-quotas&ssl_cert_reqs=none"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2&group=default-quotas"),
        ("memory://name", "memory://name-quotas"),
    ],
)
def test_each_purpose_has_a_part_of_the_store(url: str, part: str) -> None:
    assert part_of_store(url, "quotas") == part
    assert part_of_store(url, "shards") != part
