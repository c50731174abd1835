"""The handler with its sender's thread, against a Kinesis in memory."""

import asyncio
import json
import logging
import logging.config
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import loguru
import pytest
import structlog
from pythonjsonlogger.json import JsonFormatter as PythonJsonFormatter

from kpl_core import BlockingProducer, Config
from kpl_core.background.process_end import NEEDS_SPARE_THREADS
from kpl_core.testing import FakeKinesis
from kpl_core.testing.fake_transport import FakeTransport
from kpl_integrations.logging_handler import JsonFormatter, KinesisHandler
from kpl_integrations.logging_handler.sender import SENDER_THREADS
from tests.support.consumers import log_records, user_records
from tests.support.running_program import environment
from tests.support.waiting import wait_until


def messages(kinesis: FakeKinesis) -> list[str]:
    return [record["message"] for record in log_records(kinesis)]


def test_every_line_arrives_in_the_stream(make, kinesis, logger):
    handler = make()
    logger.addHandler(handler)
    for number in range(1_000):
        logger.info("line %d", number)
    handler.flush()
    assert sorted(messages(kinesis)) == sorted(f"line {number}" for number in range(1_000))
    counts = handler.counts()
    assert (counts.emitted, counts.delivered, counts.dropped_total, counts.buffered) == (1_000, 1_000, 0, 0)


def test_close_delivers_and_can_be_called_twice(make, kinesis, logger):
    handler = make()
    logger.addHandler(handler)
    logger.info("last words")
    handler.close()
    handler.close()
    assert messages(kinesis) == ["last words"]
    logger.info("too late")
    assert handler.counts().dropped == {"Closed": 1}


def test_a_handler_without_records_starts_no_thread(make):
    before = threading.active_count()
    handler = make()
    handler.flush()
    assert threading.active_count() == before + NEEDS_SPARE_THREADS
    handler.close()
    wait_until(lambda: threading.active_count() == before, lambda: f"{threading.enumerate()}")
    assert handler.counts().emitted == 0


def test_any_formatter_works(make, kinesis, logger):
    handler = make()
    handler.setFormatter(logging.Formatter("%(levelname)s|%(message)s"))
    logger.addHandler(handler)
    logger.warning("plain text")
    handler.close()
    assert [record.data for record in user_records(kinesis)] == [b"WARNING|plain text"]


def test_python_json_logger_works(make, kinesis, logger):
    handler = make()
    handler.setFormatter(PythonJsonFormatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.warning("as json", extra={"order": 42})
    handler.close()
    assert log_records(kinesis) == [{"levelname": "WARNING", "message": "as json", "order": 42}]


def test_structlog_works(make, kinesis, logger):
    handler = make()
    logger.addHandler(handler)
    bound = structlog.wrap_logger(
        logger,
        processors=[structlog.stdlib.add_log_level, structlog.stdlib.render_to_log_kwargs],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    bound.bind(order=42).info("placed", customer="7")
    handler.close()
    (found,) = log_records(kinesis)
    assert (found["message"], found["order"], found["customer"]) == ("placed", 42, "7")


@pytest.fixture
def to_loguru() -> Iterator[Callable[[logging.Handler], None]]:
    """Return a function that makes a handler the sink of loguru until the end of the test."""
    sinks: list[int] = []
    yield lambda handler: sinks.append(loguru.logger.add(handler, format="{message}"))
    for sink in sinks:
        loguru.logger.remove(sink)


@pytest.mark.parametrize("json_format", ["plain", "otel"])
def test_bound_fields_of_loguru_are_fields_of_the_line(make, kinesis, to_loguru, json_format):
    handler = make(json_format=json_format)
    to_loguru(handler)
    loguru.logger.bind(order=42, level="gold", extra="more").warning("placed {}", 1)
    loguru.logger.info("without bound fields")
    handler.close()
    # They may be in two shards.
    found, bare = sorted(log_records(kinesis), key=lambda line: "without bound fields" in str(line))
    fields = found if json_format == "plain" else found["Attributes"]
    assert (fields["order"], fields["extra"]) == (42, "more")
    assert "extra" not in (bare if json_format == "plain" else bare["Attributes"])
    if json_format == "plain":
        # A bound field does not replace a field of each line.
        assert (found["message"], found["level"], found["extra.level"]) == ("placed 1", "WARNING", "gold")


def test_a_bound_field_of_loguru_is_the_partition_key(make, kinesis, to_loguru):
    handler = make(partition_key="extra:customer")
    to_loguru(handler)
    loguru.logger.bind(customer="c7").info("x")
    handler.close()
    assert [record.partition_key for record in user_records(kinesis)] == ["c7"]


WRONG_IN_DICTCONFIG = """
import logging.config
handler = {"class": "kpl_integrations.logging_handler.KinesisHandler", %s}
logging.config.dictConfig({"version": 1, "handlers": {"kinesis": handler}, "root": {"handlers": ["kinesis"]}})
"""


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (
            '"stream": "logs", "json_format": "elastic"',
            "json_format is 'elastic'; it must be one of 'plain', 'ecs', 'otel'",
        ),
        ('"stream": "logs", "overflow": "wait"', "overflow is 'wait'; it must be one of 'drop_oldest'"),
        ('"stream": "logs", "max_queue": 5', "KinesisHandler has no option 'max_queue'; did you mean max_queue_bytes?"),
        (
            '"stream": "logs", "config": {"regoin": "x"}',
            "ConfigError: there is no option 'regoin'; did you mean region?",
        ),
        (
            '"stream": "logs", "config": 5',
            "config is of type int; it must be a kpl_core.Config, a table of its options, or left out",
        ),
        # dictConfig hides every TypeError with the text 'stream'.
        ('"streem": "logs"', "KinesisHandler has no option 'streem'; did you mean stream?"),
        ('"level": "INFO"', "KinesisHandler has no stream; give the name or the ARN of one"),
    ],
)
def test_a_wrong_option_in_dictconfig_shows_only_its_own_error(wrong, error):
    program = [sys.executable, "-c", WRONG_IN_DICTCONFIG % wrong]
    ended = subprocess.run(program, env=environment(), capture_output=True, text=True, check=False, timeout=30)
    assert error in ended.stderr
    assert "Unable to configure handler 'kinesis'" in ended.stderr
    # `logging.shutdown` flushes every handler that began, at the exit.
    assert "AttributeError" not in ended.stderr


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("logger", "orders"),
        ("extra:customer", "c7"),
        (lambda record: f"level-{record.levelno}", "level-20"),
        (lambda record: "é" * 300, "é" * 256),
    ],
)
def test_the_partition_key_is_chosen(make, kinesis, logger, choice, expected):
    handler = make(partition_key=choice)
    logger.addHandler(handler)
    logger.info("x", extra={"customer": "c7"})
    handler.close()
    assert [record.partition_key for record in user_records(kinesis)] == [expected]


def test_a_record_without_the_key_field_gets_a_random_key(make, kinesis, logger):
    handler = make(partition_key="extra:customer")
    logger.addHandler(handler)
    logger.info("x")
    handler.close()
    assert [len(record.partition_key) for record in user_records(kinesis)] == [16]


def test_a_key_function_that_fails_is_counted(make, logger, capsys):
    handler = make(partition_key=lambda record: record.no_such_thing)
    logger.addHandler(handler)
    logger.info("x")
    assert handler.counts().dropped == {"FormatError": 1}


def test_an_oversize_record_is_truncated_and_marked(make, kinesis, logger):
    handler = make()
    logger.addHandler(handler)
    logger.info("x" * 2_000_000)
    handler.close()
    (found,) = log_records(kinesis)
    assert found["truncated"]
    assert found["original_bytes"] > 2_000_000
    assert len(found["message"]) > 1_000_000


def test_an_oversize_record_is_split_and_counts_once(make, kinesis, logger):
    handler = make(oversize="split")
    logger.addHandler(handler)
    logger.info("x" * 2_500_000)
    logger.info("small")
    handler.close()
    found = log_records(kinesis)
    assert sum(len(each["message"]) for each in found) == 2_500_000 + len("small")
    assert sorted(each["split"]["index"] for each in found if "split" in each) == [0, 1, 2]
    assert (handler.counts().emitted, handler.counts().delivered) == (2, 2)


def test_the_handlers_libraries_do_not_log_to_it_even_at_debug(make, kinesis):
    handler = make()
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("", "asyncio", "botocore", "kpl_core")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.DEBUG)
        root.addHandler(handler)
        logging.getLogger("orders").debug("mine")
        handler.flush()
        handler.flush()
        assert handler.counts().emitted == 1
    finally:
        root.removeHandler(handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("shared", [False, True])
def test_a_line_of_another_process_is_accepted_although_its_thread_has_the_senders_identity(
    make, kinesis, logger, shared
):
    """As from a QueueListener: a forked child's first threads have the identities of the parent's threads."""
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer) if shared else make()
        logger.addHandler(handler)
        others = set(SENDER_THREADS)
        logger.info("of this process")
        handler.flush()
        (sender,) = SENDER_THREADS - others
        for process, message in ((os.getpid(), "our own"), (None, "our own"), (os.getpid() + 1, "a child's")):
            made = {"msg": message, "levelno": 20, "thread": sender, "process": process, "threadName": "kpl-producer"}
            logger.handle(logging.makeLogRecord(made))
        handler.close()
    assert set(messages(kinesis)) == {"of this process", "a child's"}
    assert handler.counts().emitted == 2


def test_a_handler_does_not_take_what_its_sender_logs_after_another_handler_of_it_closed(make, kinesis, logger):
    with BlockingProducer(Config(), transport=FakeTransport(kinesis)) as producer:
        first, second = make(producer=producer), make(producer=producer)
        logger.addHandler(second)
        others = set(SENDER_THREADS)
        logger.info("before")
        first.handle(logging.makeLogRecord({"msg": "of the first", "levelno": 20}))
        first.flush()
        second.flush()
        first.close()
        (sender,) = SENDER_THREADS - others
        logger.handle(
            logging.makeLogRecord({"msg": "the sender's own", "levelno": 20, "thread": sender, "process": os.getpid()})
        )
        logger.info("after")
        second.close()
    assert sorted(messages(kinesis)) == ["after", "before", "of the first"]


def test_it_works_from_inside_a_running_loop(make, kinesis, logger):
    handler = make()
    logger.addHandler(handler)

    async def main() -> None:
        logger.info("from a task")
        await asyncio.to_thread(handler.flush)

    asyncio.run(main())
    assert messages(kinesis) == ["from a task"]


def test_threads_lose_nothing(make, kinesis, logger):
    handler = make()
    logger.addHandler(handler)

    def work(worker: int) -> None:
        for number in range(500):
            logger.info("%d-%d", worker, number)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handler.close()
    assert handler.counts().delivered == 4_000
    assert len(set(messages(kinesis))) == 4_000


def _dict_config(kinesis: FakeKinesis, **options: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {
            "kinesis": {
                "class": "kpl_integrations.logging_handler.KinesisHandler",
                "stream": "logs",
                "level": "INFO",
                "close_timeout": 20,
                **options,
            }
        },
        "loggers": {"tests.dict_config": {"level": "DEBUG", "handlers": ["kinesis"], "propagate": False}},
    }


@pytest.mark.parametrize(
    ("overflow", "may_drop"),
    # What waits for room is accepted only once there is; what comes after the close was never accepted.
    [("block(30)", {"Closed"}), ("drop_oldest", {"Closed", "Evicted"})],
)
def test_dict_config_twice_under_load_loses_nothing_accepted_and_does_not_deadlock(kinesis, overflow, may_drop):
    logger = logging.getLogger("tests.dict_config")
    configuration = _dict_config(kinesis, transport=lambda config: FakeTransport(kinesis), overflow=overflow)
    handlers: list[KinesisHandler] = []
    ended = threading.Event()
    logged: list[int] = []

    def configure() -> None:
        logging.config.dictConfig(configuration)
        handler = logger.handlers[0]
        assert isinstance(handler, KinesisHandler)
        handlers.append(handler)

    def load() -> None:
        count = 0
        while not ended.is_set():
            logger.info("line")
            count += 1
        logged.append(count)

    configure()
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            wait_until(lambda: handlers[-1].counts().emitted > 200, "lines at the newest handler")
            configure()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    for handler in handlers[:-1]:
        handler.finish_closing()
    handlers[-1].close()
    counts = [handler.counts() for handler in handlers]
    assert [each.buffered for each in counts] == [0, 0, 0]
    assert sum(each.delivered for each in counts) == messages(kinesis).count("line")
    # While dictConfig exchanges the handlers, the logger has none, and a record logged then is lost.
    assert sum(logged) >= sum(each.emitted for each in counts) > 400
    assert set().union(*(each.dropped for each in counts)) <= may_drop
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})


def test_dict_config_takes_scalars_and_factories(kinesis):
    configuration = _dict_config(kinesis, region="us-east-1", json_format="ecs", partition_key="logger")
    configuration["handlers"]["made"] = {"()": lambda: KinesisHandler("logs")}
    configuration["loggers"]["tests.dict_config"]["handlers"].append("made")
    logging.config.dictConfig(configuration)
    try:
        first, second = logging.getLogger("tests.dict_config").handlers
        assert isinstance(first, KinesisHandler)
        assert isinstance(second, KinesisHandler)
        assert first.level == logging.INFO
    finally:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})


def test_the_json_is_one_object_a_record(make, kinesis, logger):
    handler = make(json_format="otel")
    logger.addHandler(handler)
    logger.error("it broke")
    handler.close()
    assert json.loads(user_records(kinesis)[0].data)["SeverityNumber"] == 17


def test_a_shared_producer_sends_log_records_too_and_stays_open(make, kinesis, logger):
    with BlockingProducer(Config(max_outstanding_records=50), transport=FakeTransport(kinesis)) as producer:
        handler = make(producer=producer)
        logger.addHandler(handler)
        for number in range(300):
            logger.info("line %d", number)
        handler.close()
        assert (handler.counts().delivered, handler.counts().buffered) == (300, 0)
        assert producer.put("logs", partition_key="1", data=b"{}").result(10).successful
    assert len(user_records(kinesis)) == 301


def test_a_shared_producer_and_its_handler_do_not_deadlock_under_load(logger):
    kinesis = FakeKinesis({"logs": 2, "orders": 1}, enforce_limits=False)
    config = Config(max_outstanding_records=100, record_max_buffered_time_ms=5)
    with BlockingProducer(config, transport=FakeTransport(kinesis, latency_seconds=0.001)) as producer:
        handler = KinesisHandler("logs", producer=producer, close_timeout=20)
        logger.addHandler(handler)

        def log_and_put() -> None:
            for number in range(100):
                logger.info("line %d", number)
                producer.put("orders", partition_key="k", data=b"x")

        def flush() -> None:
            for _ in range(5):
                handler.flush()
                producer.flush(5)

        threads = [threading.Thread(target=work, daemon=True) for work in (log_and_put, log_and_put, flush)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        handler.close()
        counts = handler.counts()
        assert (counts.emitted, counts.delivered, counts.buffered) == (200, 200, 0)
        assert producer.close().delivered == 400


def test_a_formatter_that_encodes_in_its_own_way_is_used(make, kinesis, logger):
    class Upper(JsonFormatter):
        def encode(self, record: logging.LogRecord) -> bytes:
            return super().encode(record).upper()

    handler = make()
    handler.setFormatter(Upper())
    logger.addHandler(handler)
    logger.info("hello")
    logger.info("x" * 1_500_000)
    handler.close()
    # They may be on different shards.
    small, large = sorted((record.data for record in user_records(kinesis)), key=len)
    assert b'"MESSAGE":"HELLO"' in small
    assert json.loads(large)["truncated"]


def test_an_oversize_record_without_a_message_is_delivered_and_counted(make, kinesis, logger):
    handler = make(oversize="split")
    logger.addHandler(handler)
    logger.error("", extra={"blob": "x" * 3_000_000})
    handler.close()
    counts = handler.counts()
    assert (counts.delivered, counts.buffered, counts.dropped_total) == (1, 0, 0)
