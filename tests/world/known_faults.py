"""Faults that a simulation should find: a list that was written before the world could find all of them.

The first ones were in the product: those of the issues on losses and leases, and of newer fixes, that a world can hold.
The others are mutants of the places where parts meet. Each replaces one piece of the present text.

`python -m tests.world.find_faults` says which of them a simulation finds, with seed and time.
"""

from typing import NamedTuple


class KnownFault(NamedTuple):
    """A fault, and the text that puts it in.

    Args:
        name: what goes wrong.
        origin: the commit that corrected it, the issue that named it, or "mutant".
        story: of `simulate.STORIES`, or a kind of faults of leases after "leases: ".
        path: of the file.
        before: a piece of its text that occurs once.
        after: what replaces it.
    """

    name: str
    origin: str
    story: str
    path: str
    before: str
    after: str


_RETRIER = "kpl_core/pipeline/retrier.py"
_LEDGER = "kpl_core/pipeline/ledger.py"
_FORWARDING = "kpl_core/pipeline/forwarding.py"
_GATE = "kpl_core/durability/breaker_gate.py"
_BREAKER = "kpl_core/durability/circuit_breaker.py"
_DURABLE = "kpl_core/durability/durable_ledger.py"
_STORE = "kpl_core/producer/durable_store.py"
_WRITER = "kpl_core/durability/spool/group_commit.py"
_CLAIMS = "kpl_core/durability/spool/claims.py"
_REPLAYER = "kpl_core/durability/replay/replayer.py"
_STAGES = "kpl_core/pipeline/intake/write_ahead.py"
_ADMISSION = "kpl_integrations/ingest/admission/admission.py"
_RECORDS = "kpl_integrations/ingest/request/records.py"
_HOLDER = "kpl_core/coordination/leaseholder.py"
_TABLE = "kpl_core/coordination/lease_table.py"
_GATEWAY = "kpl_integrations/ingest/gateway.py"
_STREAMS = "kpl_integrations/ingest/streams/stream_directory.py"
_READINESS = "kpl_integrations/ingest/readiness/readyz.py"

KNOWN_FAULTS = (
    # Faults of the product.
    KnownFault(
        "a full disk: records are acknowledged that no store takes", "ef4f43b7", "gateway", _STORE,
        'if self.state.failure != "fail" and not durable and not self._closing:', "if False:",
    ),
    KnownFault(
        "a disk that has room again is not tried", "ef4f43b7", "gateway", "kpl_core/producer/spool_watch.py",
        "            self._failing.set()\n", "            pass\n",
    ),
    KnownFault(
        "a failed write of our own is taken for that of another process", "issue 34.2", "spool",
        "kpl_core/durability/spool/group_commit.py", "        if not is_temporary(error):\n", "        if True:\n",
    ),
    KnownFault(
        "a transport that raises ends the producer", "c9ab7c00", "producer", "kpl_core/transport/transport.py",
        "except Exception as error:", "except ZeroDivisionError as error:",
    ),
    KnownFault(
        "refused records cost a tenant's rate", "33f4e5e4", "gateway", _ADMISSION,
        "                account.quota.give_back(_user_records(records, counts), size_bytes)\n",
        "                pass\n",
    ),
    KnownFault(
        "records that were not delivered cost a tenant's rate", "33f4e5e4", "gateway", _ADMISSION,
        "        if account.quota is None:\n            return\n", "        return\n",
    ),
    KnownFault(
        "a breaker forgets failures that are far apart", "ba8fe6dd", "producer", _GATE,
        "failed = max(sent, self._failed_records - known.failed_records)", "failed = sent",
    ),
    KnownFault(
        "a quiet tenant is refused for a noisy one's load", "d6ec8373", "gateway",
        "kpl_integrations/ingest/admission/tenant_account.py", "        self.shed_records += ", "        _ = ",
    ),
    KnownFault(
        "load is never shed", "issue 33", "gateway", _ADMISSION,
        "used = SHEDDING_STEPS[-1][0]", "used = SHEDDING_STEPS[-1][1]",
    ),
    KnownFault(
        "open records of a lane stay open when their order needs them closed", "issue 33", "producer",
        "kpl_core/pipeline/aggregator.py",
        "            if shard_id in shard_ids:\n", "            if shard_id not in shard_ids:\n",
    ),
    KnownFault(
        "a key is unknown while a record of it is on its way to a failing disk", "2cb42bd7", "spool", _STAGES,
        "if in_order and (self.waiting or self.keys is None", "if in_order and (self.keys is None",
    ),
    KnownFault(
        "a record of the spool counts as a dead letter before its letter is stored", "ea8abeeb", "dead letters", _STORE,
        "            if committed.exception() is not None:\n                return\n            self.moved += 1\n",
        "            self.moved += 1\n",
    ),
    KnownFault(
        "a lowered share is in force after its report", "8c79d2e6", "leases: slow answers",
        "kpl_core/coordination/lease_sync.py",
        "                self._holder.renew(head, part, clock(), at=reading.at)\n            self._on_shares()\n",
        "                self._holder.renew(head, part, clock(), at=reading.at)\n",
    ),
    KnownFault(
        "a report has its effects before it is written", "8c79d2e6", "leases: lost requests", _HOLDER,
        "        return PreparedReport(report, now, counted)\n",
        "        prepared = PreparedReport(report, now, counted)\n        self.reported(prepared)\n"
        "        return prepared\n",
    ),
    KnownFault(
        "a worker that leaves goes on with its share", "8c79d2e6", "leases: slow answers, joins and leaves",
        "kpl_core/coordination/worker.py", "        self._holder.leave()\n        self._use_shares()\n", "",
    ),
    KnownFault(
        "a process uses a grant that an earlier one of its name gave up", "b6f3ab50", "leases: crashes and restarts",
        _HOLDER, "if member is None or member.reported_at < ", "if member is None or -1.0 > ",
    ),
    KnownFault(
        "a newcomer takes the whole reserve in the place of a small worker", "b6f3ab50", "leases: tiers and weights",
        _TABLE, "    if is_warm and min(granted, default=reserve) < reserve:\n", "    if False:\n",
    ),
    KnownFault(
        "what a worker holds is free before it has read the next plan", "mutant", "leases: joins and leaves", _TABLE,
        "        ceiling, granted = claim.holding, NO_GRANT\n", "        ceiling, granted = NO_GRANT, NO_GRANT\n",
    ),
    KnownFault(
        "a worker is taken for dead after half a lifetime", "mutant", "leases: pauses", _TABLE,
        "    if abs(age) <= lifetime:\n", "    if abs(age) <= lifetime / 2:\n",
    ),
    KnownFault(
        "records of a deleted stream are accepted for good", "5daa2164", "gateway", _GATEWAY,
        "if fact.error_code == NO_STREAM:", "if False:",
    ),
    KnownFault(
        "a gateway that restarts in an outage does not know the streams in its spool", "ee7577ad", "gateway", _GATEWAY,
        "has_pipeline=lambda stream: stream in producer.statistics()", "has_pipeline=lambda _: False",
    ),
    KnownFault(
        "a restart in an outage: a stream behind many spooled records of another is unknown", "issue 42", "gateway",
        _STORE, "        put.open_streams(spool.spool.found_streams)\n", "",
    ),
    KnownFault(
        "a gateway that restarts in an outage and knows no stream is ready", "ee7577ad", "gateway", _READINESS,
        "found[Symptom.NO_STREAM_KNOWN] = named[lookup.stream]", "pass",
    ),
    KnownFault(
        "one unknown stream makes a gateway with records in its spool not ready", "3163108c", "gateway", _READINESS,
        "not works and not counts and self._knows_none", "not works and self._knows_none",
    ),
    KnownFault(
        "a stream that is listed and takes no puts is looked up again and again", "b9f53e1b", "gateway", _STREAMS,
        "            self.known.discard(stream)\n            _remember(", "            _ = (",
    ),
    KnownFault(
        "records of a deleted stream are accepted in an outage", "b9f53e1b", "gateway", _STREAMS,
        "is_new = stream not in self._unconfirmed.names and stream not in self._doubted",
        "is_new = stream not in self._unconfirmed.names",
    ),
    # Mutants of the places where parts meet.
    KnownFault(
        "an answer with another number of results is believed", "mutant", "producer", _RETRIER,
        "            answer = RequestFailure(RECORD_COUNT_MISMATCH, text)\n",
        "            answer = [*answer, *answer][: len(records)]\n",
    ),
    KnownFault(
        "the fifth retry is forgotten", "mutant", "producer", _RETRIER,
        "        retries.resend.append((min(now + delay, record.expires_at), record))\n",
        "        if record.failures < 5:\n            retries.resend.append((now + delay, record))\n",
    ),
    KnownFault(
        "a record in another shard than predicted is taken for well placed", "mutant", "producer", _RETRIER,
        "            all_inside=all(self._shard_map.is_inside(digest, actual) for digest in digests),\n",
        "            all_inside=True,\n",
    ),
    KnownFault(
        "the wrong half of a record that missed its shard is sent again", "mutant", "producer", _RETRIER,
        "            if is_inside:\n", "            if not is_inside:\n",
    ),
    KnownFault(
        "records that wait for a retry are lost when shards change", "mutant", "producer", _RETRIER,
        "        self._heap = [entry for entry in self._heap if entry[2].predicted_shard in shard_ids]\n",
        "        self._heap = []\n",
    ),
    KnownFault(
        "an outcome that awaits the shard map is lost when it waited too long", "mutant", "producer", _RETRIER,
        "return self._decide(lambda stored: stored.attempt.ended_at + self._map_wait_seconds <= now, now)",
        "return Retries()",
    ),
    KnownFault(
        "the next record of a key leaves while the one before it is retried", "mutant", "producer", _RETRIER,
        "                self._again(record, attempt, retries, delay=delay)\n",
        "                self._again(record, attempt, retries, delay=delay)\n"
        "                retries.finished.append(record)\n",
    ),
    KnownFault(
        "a failed Kinesis record counts as one user record", "mutant", "producer", _LEDGER,
        '        self.failed[attempt.error_code or ""] += count\n',
        '        self.failed[attempt.error_code or ""] += 1\n',
    ),
    KnownFault(
        "a flush ends one generation early", "mutant", "producer", _LEDGER,
        "retained <= generation for retained", "retained < generation for retained",
    ),
    KnownFault(
        "a record that waits for its flow's turn keeps a flush waiting after it failed", "mutant", "producer", _LEDGER,
        "        self.settle_alone(detached, attempt, predicted_shard=None)\n"
        "        self.generations.release(detached.generation)\n",
        "        self.settle_alone(detached, attempt, predicted_shard=None)\n",
    ),
    KnownFault(
        "a put that leaves the line does not call the next one", "mutant", "producer",
        "kpl_core/producer/capacity_waiters.py",
        "            del self._line[place]\n            self.wake_first()\n", "            del self._line[place]\n",
    ),
    KnownFault(
        "a breaker whose probes are not answered stays half open", "mutant", "producer", _BREAKER,
        "            self._signal(BreakerSignal.PROBES_UNANSWERED)\n", "            pass\n",
    ),
    KnownFault(
        "a closed breaker keeps the records that it stopped", "mutant", "producer", _GATE,
        "                        ready += self._take_waiting_for(name)\n",
        "                        _ = self._take_waiting_for(name)\n",
    ),
    KnownFault(
        "a spool answers before its commit", "mutant", "spool", _WRITER,
        "            self._failed(work, self._note(error))\n            return\n",
        "            _ = self._note(error)\n            removed = Removed([], 0, 0)\n",
    ),
    KnownFault(
        "records are called spooled that no disk took", "mutant", "spool", _STORE,
        "                self._settle(pipeline, group, None)\n            else:",
        '                self._settle(pipeline, group, "spooled")\n            else:',
    ),
    KnownFault(
        "a delivered record stays in the spool", "mutant", "spool", _REPLAYER,
        "                self._spool.confirm([claimed.id])\n", "                pass\n",
    ),
    KnownFault(
        "a replayed record that failed is not tried again", "mutant", "spool", _REPLAYER,
        "        else:\n            self._order.failed(claimed.id)\n",
        "        else:\n            self._order.succeeded(claimed.id)\n",
    ),
    KnownFault(
        "a released record is not in the backlog again", "mutant", "spool", _CLAIMS,
        "                    heappush(self._released, record_id)\n        return released\n",
        "                    pass\n        return released\n",
    ),
    KnownFault(
        "a request is not known while it is answered", "mutant", "gateway", _RECORDS,
        "        keys.finish(key, StoredAnswer(answer.status, answer.body), self.now())\n",
        "        keys.forget(key)\n",
    ),
    KnownFault(
        "a request is answered as delivered when its first record is", "mutant", "gateway",
        "kpl_integrations/ingest/http/answers.py",
        "    for outcome in deliveries.outcomes:\n",
        "    for outcome in deliveries.outcomes[:1] * len(deliveries.outcomes):\n",
    ),
    KnownFault(
        "a breaker that has closed is still refused", "mutant", "gateway", _ADMISSION,
        "                self._open_breakers.pop(fact.stream, None)\n", "                pass\n",
    ),
    KnownFault(
        "requests without permission do not show in the part kinesis", "mutant", "gateway",
        _READINESS,
        "self._answers[fact.stream] = fact.ended_at, fact.error_code",
        'self._answers[fact.stream] = fact.ended_at, None if "Denied" in (fact.error_code or "") else fact.error_code',
    ),
)  # fmt: skip
