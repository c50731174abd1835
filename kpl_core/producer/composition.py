"""Builds the pipeline of a stream: which intake, gate and fate a configuration asks for.

| place | plain | with |
| --- | --- | --- |
| intake | straight to the aggregator | `Config.spool` in write-ahead mode; `Config.fairness`; both |
| gate | every admitted record passes | `Config.breaker` |
| fate | failed records are final | `Config.spool`, `Config.dead_letters` |
"""

from collections.abc import Callable

from kpl_core.durability.breaker_gate import BreakerGate, ShardBreakers
from kpl_core.durability.durable_ledger import DurableLedger, WriteAheadIntake, durable_rules
from kpl_core.fairness.fair_intake import FairIntake
from kpl_core.options.config import Config
from kpl_core.options.reliability import TierPolicy
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.stages import Stages
from kpl_core.records.outcome import ResultHandle


def stream_pipeline(
    stream: str,
    config: Config,
    buffer_limit: BufferLimit,
    *,
    now: float,
    chance: Callable[[], float],
    delivery: type[ResultHandle] = ResultHandle,
    listening: bool = False,
) -> StreamPipeline:
    """Return the pipeline of a stream, with the places filled that its configuration asks for.

    Args:
        stream: the stream's name or ARN.
        config: the stream's options.
        buffer_limit: the producer's room, shared by all streams.
        now: the present time in seconds.
        chance: draws from [0, 1), for the jitter of backoffs.
        delivery: the class of the handles that a put returns.
        listening: whether hooks want facts.
    """
    rules = durable_rules(config)
    ledger: Ledger
    write_ahead = None
    if rules.spool or rules.dead_letters:
        ledger = durable = DurableLedger(stream, buffer_limit, rules=rules, listening=listening)
        if rules.write_ahead:
            write_ahead = WriteAheadIntake(durable)
    else:
        ledger = Ledger(stream, buffer_limit, listening=listening)
    stages = Stages(stream, config, buffer_limit, ledger, chance=chance, delivery=delivery)
    fair = None if config.fairness is None else FairIntake(stages, config.fairness)
    gate = _breaker_gate(stream, config, spools=rules.spool)
    return StreamPipeline(stages, now=now, write_ahead=write_ahead, fair=fair, gate=gate)


def _breaker_gate(stream: str, config: Config, *, spools: bool) -> BreakerGate | None:
    if config.breaker is None:
        return None
    reserve = (TierPolicy() if config.tiers is None else config.tiers).critical_reserve
    breakers = ShardBreakers(
        config.breaker,
        reserved_per_second=max(1.0, reserve * config.rate_limit_records_per_sec_per_shard),
        is_retryable=config.is_retryable,
    )
    return BreakerGate(stream, breakers, spools=spools)
