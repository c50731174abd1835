"""The handler's options are checked when it is made, and none of them is ignored."""

import math

import pytest

from kpl_core import BlockingProducer, Config, ConfigError
from kpl_integrations.logging_handler import KinesisHandler
from kpl_integrations.logging_handler.options import LogSettings, producer_config


def test_the_options_of_the_producer_can_be_a_table_of_dict_config():
    table = {"record_ttl_ms": 60_000, "region": "eu-west-1"}
    config = producer_config(LogSettings(), table, is_shared=False)
    assert config == Config(record_ttl_ms=60_000, region="eu-west-1")
    KinesisHandler("logs", config=table, region=None, spool_path=None).close()
    with pytest.raises(ConfigError, match="there is no option 'record_ttl'; did you mean record_ttl_ms"):
        KinesisHandler("logs", config={"record_ttl": 60_000})


# An option of the producer, and what stands for it in `config`.
INSIDE = [
    ({"region": "eu-west-1"}, "region"),
    ({"endpoint_url": "http://127.0.0.1:1"}, "endpoint_url"),
    ({"spool_path": "x.db"}, "spool"),
    ({"max_sending_bytes": 1_000_000}, "max_outstanding_bytes"),
]


@pytest.mark.parametrize(("option", "inside"), INSIDE)
def test_an_option_that_the_configuration_has_too_is_an_error(option, inside):
    [name] = option
    for config in ({"record_ttl_ms": 60_000}, {}, Config()):
        with pytest.raises(ConfigError, match=f"^{name} and config are both set; write {inside} into config$"):
            KinesisHandler("logs", config=config, **option)
    with pytest.raises(ConfigError, match=f"^{name} and producer are both set; .*, so leave {name} out$"):
        KinesisHandler("logs", producer=BlockingProducer(Config()), **option)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overflow": "drop_all"}, "overflow is 'drop_all'; it must be one of 'drop_oldest'"),
        ({"overflow": "block"}, "block\\(<seconds>\\)"),
        ({"oversize": "explode"}, "oversize is 'explode'"),
        ({"partition_key": "extra:"}, "partition_key is 'extra:'"),
        ({"json_format": "xml"}, "json_format is 'xml'"),
        ({"max_queue_bytes": 0}, "max_queue_bytes is 0"),
        ({"close_timeout": -1}, "close_timeout is -1"),
        ({"close_timeout": math.inf}, "close_timeout is inf; it must be a finite number"),
        ({"max_queue_records": "100"}, "max_queue_records is '100'"),
        ({"partition_key": None}, "partition_key is of type NoneType; it must be a str or a function"),
        ({"producer": "orders.producer"}, "producer is of type str; it must be an open BlockingProducer; .* 'ext://'"),
    ],
)
def test_an_option_out_of_its_bounds_raises_an_error_that_names_it(options, words):
    with pytest.raises(ConfigError, match=words):
        KinesisHandler("logs", **options)
