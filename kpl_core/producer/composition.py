"""Builds the pipeline of a stream: which intake, gate and ledger a configuration asks for.

| place | plain | with |
| --- | --- | --- |
| intake | straight to the aggregator | `Config.spool` in write-ahead mode; `Config.fairness`; both |
| gate | every admitted record passes | `Config.breaker` |
| ledger | failed records are final | `Config.spool`, `Config.dead_letters` |
"""

from collections.abc import Callable
from typing import NamedTuple

from kpl_core.durability.breaker_gate import BreakerGate
from kpl_core.durability.durable_ledger import DurableLedger, durable_rules
from kpl_core.options.config import Config
from kpl_core.pipeline.buffer_limit import BufferLimit
from kpl_core.pipeline.intake.fair_intake import FairIntake
from kpl_core.pipeline.intake.write_ahead import SpoolState, WriteAhead
from kpl_core.pipeline.ledger import Ledger
from kpl_core.pipeline.pipeline import StreamPipeline
from kpl_core.pipeline.stages import Stages
from kpl_core.records.outcome import ResultHandle


class StreamParts(NamedTuple):
    """The pipeline of a stream, and what fills its places."""

    pipeline: StreamPipeline
    fair: FairIntake | None
    gate: BreakerGate | None


def stream_parts(
    stream: str,
    config: Config,
    buffer_limit: BufferLimit,
    *,
    now: float,
    chance: Callable[[], float],
    delivery: type[ResultHandle] = ResultHandle,
    listening: bool = False,
    spool_state: SpoolState | None = None,
) -> StreamParts:
    """Build the pipeline of a stream, with the places filled that its configuration asks for.

    Args:
        stream: the stream's name or ARN.
        config: the stream's options.
        buffer_limit: the producer's room, shared by all streams.
        now: the present time in seconds.
        chance: draws from [0, 1), for the jitter of backoffs.
        delivery: the class of the handles that a put returns.
        listening: whether hooks want facts.
        spool_state: whether the spool can store; by default it can.
    """
    rules = durable_rules(config)
    state = SpoolState() if spool_state is None else spool_state
    if rules.spool or rules.dead_letters:
        ledger: Ledger = DurableLedger(stream, buffer_limit, rules=rules, listening=listening, spool_state=state)
    else:
        ledger = Ledger(stream, buffer_limit, listening=listening)
    in_order = config.ordering == "per_key"
    write_ahead = WriteAhead(stream, ledger, state, in_order=in_order) if rules.write_ahead else None
    stages = Stages(stream, config, buffer_limit, ledger, chance=chance, delivery=delivery)
    fair = None if config.fairness is None else FairIntake(stages, config.fairness)
    gate = (
        None
        if config.breaker is None
        else BreakerGate(stream, config.breaker, config, spool=state if rules.spool else None)
    )
    return StreamParts(StreamPipeline(stages, now=now, write_ahead=write_ahead, fair=fair, gate=gate), fair, gate)
