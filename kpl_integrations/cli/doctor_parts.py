"""The parts of a configuration that `kpl doctor` checks on this machine: files, store, certificate, tenants, transport.

The configuration is that of a gateway if a file or the variable of one of its settings is given, else that of a
producer from KPL_ variables. Nothing is changed, and no file is created.
"""

import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import anyio
import msgspec

from kpl_core import Config, ConfigError, CoordinationOptions, SpoolOptions
from kpl_core.coordination import StoreFailed
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.worker import read_plan
from kpl_core.durability.dead_letters import new_letter
from kpl_core.durability.spool import DeadLetter, SpooledRecord
from kpl_core.options.environment import is_service_link
from kpl_core.transport.default_transport import reason_for_botocore
from kpl_integrations.cli.exit_code import CommandFailure, ExitCode

if TYPE_CHECKING:
    from kpl_integrations.ingest import IngestSettings

Status = Literal["ok", "warning", "failed", "skipped"]
# A spool's file takes up to so many times its bytes, and the WAL beside it so many bytes.
_FILE_SHARE: Final = 1.3
_WAL_BYTES: Final = 64 << 20
_INGEST: Final = "KPL_INGEST_"


class Check(msgspec.Struct, frozen=True):
    """The result of one check: `found` describes it, `fix` says what to do (empty if there is nothing to do)."""

    name: str
    status: Status
    found: str
    fix: str = ""


class FoundConfiguration(NamedTuple):
    """The options of a producer, the settings of its gateway if there is one, and where they come from.

    `unknown` has a sentence about the variables that look like options and are none; it is empty if there are none.
    """

    config: Config
    settings: "IngestSettings | None"
    source: str
    unknown: str = ""


def find_configuration(file: Path | None, environment: Mapping[str, str] = os.environ) -> FoundConfiguration:
    """Return the configuration that a gateway, or else a producer, would have here.

    Raises:
        CommandFailure: it is invalid, or the gateway's package is not installed.
    """
    is_gateway = file is not None or any(
        name.upper().startswith(_INGEST) and not is_service_link(name, value) for name, value in environment.items()
    )
    try:
        if not is_gateway:
            return _of_producer(environment)
        # Importing the gateway takes 0.3 s, and it is an extra.
        from kpl_integrations.ingest.settings_sources import find_settings  # noqa: PLC0415

        settings = find_settings({}, file=file, environment=environment).settings
    except ConfigError as error:
        raise CommandFailure(str(error), exit_code=ExitCode.WRONG_USAGE) from error
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; pip install 'kpl-integrations[cli,ingest]'"
        raise CommandFailure(message) from error
    source = "KPL_INGEST_ variables" if file is None else f"{file} and KPL_INGEST_ variables"
    return FoundConfiguration(settings.producer, settings, f"a gateway's, from {source}")


def _of_producer(environment: Mapping[str, str]) -> FoundConfiguration:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = Config.from_env(environment)
    unknown = "; ".join(str(each.message) for each in caught if each.category is UserWarning)
    return FoundConfiguration(config, None, "a producer's, from KPL_ variables", unknown)


def check_settings(found: FoundConfiguration) -> Check:
    """Say whose configuration it is, and name the variables that set nothing."""
    if found.unknown:
        return Check("settings", "warning", f"{found.source}; {found.unknown}", "correct or unset these variables")
    return Check("settings", "ok", found.source)


async def check_parts(found: FoundConfiguration, producer: Config | None, *, puts: bool) -> list[Check]:
    """Check every part that the configuration names. `producer` has the region and endpoint, if they are known.

    With `puts`, one dead letter is sent to a queue or a bucket.
    """
    config, settings = found.config, found.settings
    checks = [*check_files(config, settings), await check_coordination(_shared_limits(found))]
    if settings is not None and (settings.dead_letters_sqs or settings.dead_letters_s3):
        checks.append(await check_sink(settings, puts=puts))
    if producer is not None:
        # It may ask for credentials.
        checks.append(await anyio.to_thread.run_sync(check_transport, producer))
    if settings is not None:
        checks.append(check_tenants(settings.tenants, has_spool=settings.spool is not None))
        checks.append(check_certificate(settings.tls_certificate, settings.tls_key, time.time()))
    return checks


def check_files(config: Config, settings: "IngestSettings | None" = None) -> Iterator[Check]:
    """Check the disks of the spool and of the dead letters, with the files of all workers of a gateway."""
    configs = [config] if settings is None else _of_each_worker(settings)
    spools = [each.spool for each in configs if each.spool is not None]
    yield _check_disk("spool", spools) if spools else Check("spool", "ok", "none is configured")
    letters = [each.dead_letters for each in configs if each.dead_letters is not None]
    files = [SpoolOptions(path=each.path, max_dead_letter_bytes=each.max_bytes) for each in letters if each.path]
    if settings is not None and (settings.dead_letters_sqs or settings.dead_letters_s3):
        return
    if files:
        yield _check_disk("dead letters", files)
    elif letters and not spools:
        yield Check("dead letters", "skipped", "sent to the producer's dead_letter_sink; not checked")
    else:
        yield Check("dead letters", "ok", "in the spool's file" if letters else "none are kept")


async def check_sink(settings: "IngestSettings", *, puts: bool) -> Check:
    """Check that the queue or the bucket for dead letters exists; with `puts`, send one dead letter to it."""
    from aiobotocore.config import AioConfig  # noqa: PLC0415 - 0.3 s, as the next one
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    from kpl_integrations.ingest.outside_parts import open_sink  # noqa: PLC0415 - an extra

    place = settings.dead_letters_sqs or settings.dead_letters_s3
    once = AioConfig(connect_timeout=4, read_timeout=10, retries={"total_max_attempts": 1})
    try:
        async with open_sink(settings, config=once) as opened:
            assert opened is not None  # noqa: S101 - the caller has seen that the settings name one
            if puts:
                report = await opened.sink.send([_letter()])
                if report.refused:
                    return _failed("dead letters", f"{place}: {report.refused[0].why}")
                return Check("dead letters", "ok", f"{place} took one dead letter")
            if opened.service == "sqs":
                await opened.client.get_queue_attributes(QueueUrl=place, AttributeNames=["MaximumMessageSize"])
            else:
                await opened.client.head_bucket(Bucket=str(place).partition("/")[0])
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code == "403" or "AccessDenied" in code:
            needs = "sqs:GetQueueAttributes" if settings.dead_letters_sqs else "s3:ListBucket"
            fix = f"--put sends one dead letter; or allow {needs}"
            return Check("dead letters", "warning", f"{place} may not be asked, so it is unknown if it takes any", fix)
        return Check("dead letters", "failed", f"{place}: {error}", "check its name and region, or create it")
    except (BotoCoreError, OSError) as error:
        return Check("dead letters", "failed", f"{place}: {error}", "check its name, the network and the credentials")
    return Check("dead letters", "ok", f"{place} exists; --put checks the permission to write to it")


def _letter() -> DeadLetter:
    """Return a letter that says where it comes from."""
    record = SpooledRecord("kpl-doctor", "kpl doctor", b"kpl doctor", time.time())
    return new_letter(record, "shutdown", time.time())


def _of_each_worker(settings: "IngestSettings") -> list[Config]:
    from kpl_integrations.ingest.workers.spool_files import SINGLE, settings_of_worker  # noqa: PLC0415 - as above

    workers = [SINGLE] if settings.workers == 1 else range(settings.workers)
    return [settings_of_worker(settings, worker).producer for worker in workers]


def _check_disk(name: str, files: Sequence[SpoolOptions]) -> Check:
    """Check the files of one folder, one for each worker."""
    first, folder = files[0].file, files[0].file.absolute().parent
    if not folder.is_dir():
        return Check(name, "failed", f"{folder} is not a folder", "create it, for the user of the producer")
    wanted, needed = os.R_OK | os.W_OK, 0
    for options in files:
        file = options.file
        if not os.access(folder, wanted | os.X_OK) or (file.exists() and not os.access(file, wanted)):
            return Check(name, "failed", f"this user may not write {file}", f"let this user write {file} and {folder}")
        most = int((options.max_bytes + options.max_dead_letter_bytes) * _FILE_SHARE) + _WAL_BYTES
        needed += max(0, most - (file.stat().st_size if file.exists() else 0))
    free = shutil.disk_usage(folder).free
    shown = f"{first}" if len(files) == 1 else f"{len(files)} files, {first} to {files[-1].file.name},"
    shown += f" may grow by {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
    if free < needed:
        return Check(name, "warning", shown, "give it a larger disk, or lower its max_bytes")
    return Check(name, "ok", shown)


def _shared_limits(found: FoundConfiguration) -> CoordinationOptions | None:
    """Return how the shards' limits are shared. A gateway shares its tenants' rates beside them."""
    if found.settings is None:
        return found.config.coordination
    from kpl_integrations.ingest.workers.shared_quotas import sharing_of  # noqa: PLC0415 - as `find_configuration`

    sharing = sharing_of(found.settings, None)
    return None if sharing is None else sharing.shards


async def check_coordination(options: CoordinationOptions | None) -> Check:
    """Check that the store answers, and say what its plan divides."""
    if options is None:
        return Check("coordination", "ok", "none is configured")
    try:
        with anyio.fail_after(options.store_timeout_seconds + 1.0):
            store = await open_store(options.store)
            try:
                plan = await read_plan(store)
            finally:
                await store.aclose()
    except (StoreFailed, ConfigError, TimeoutError, OSError) as error:
        reason = "it does not answer in time" if isinstance(error, TimeoutError) else str(error)
        fix = (
            "check its URL, the network and the permission; meanwhile running producers keep their shares, and one "
            f"that starts uses {options.first_share:.2%} of each limit, then what the shards take"
        )
        if isinstance(error, ConfigError):
            fix = "correct the URL, or install what it needs"
        elif isinstance(error, StoreFailed) and error.reason in {"garbage", "version"}:
            fix = "give each fleet a place of its own, and run the same release in all its workers"
        return Check("coordination", "failed", f"{options.shown_store}: {reason}", fix)
    found = f"{options.shown_store} answers; no plan yet"
    if plan is not None:
        found = f"{options.shown_store} answers; its plan is {plan.age_seconds:,.0f} s old; workers: {plan.workers:,}"
        if plan.unassigned is not None:
            found += f"; unassigned: at least {plan.unassigned:.0%} of each limit"
    return Check("coordination", "ok", found)


def check_transport(config: Config, *, has_cbor: bool | None = None) -> Check:
    """Say which transport a producer of this configuration uses, and why."""
    if config.wire_path == "cbor" and not (find_spec("cbor2") is not None if has_cbor is None else has_cbor):
        fix = "CBOR needs cbor2: pip install 'kpl-integrations[cbor]'"
        return Check("transport", "failed", "wire_path is 'cbor', and cbor2 is not installed", fix)
    encoding = {"fast": "JSON by the producer's encoder", "cbor": "CBOR", "stock": "JSON by botocore"}[config.wire_path]
    reason = reason_for_botocore(config)
    if reason is None:
        return Check("transport", "ok", f"the producer's own connections, {encoding}")
    return Check("transport", "ok", f"botocore's client, because {reason}; {encoding}")


def check_tenants(file: Path | None, *, has_spool: bool = True) -> Check:
    """Check the tenants file and the secrets that it names."""
    from kpl_integrations.ingest.tenants import FileTenants  # noqa: PLC0415 - as `find_configuration`

    if file is None:
        return Check("tenants file", "warning", "none is configured", "name one; without it only --local starts")
    try:
        tenants = FileTenants(file, has_spool=has_spool)
    except ConfigError as error:
        return _failed("tenants file", str(error))
    return Check("tenants file", "ok", f"{file} has {len([*tenants.tenants()]):,} tenants")


def check_certificate(certificate: Path | None, key: Path | None, now: float) -> Check:
    """Check the pair of TLS files and until when it is valid, at an instant in seconds since 1970."""
    from kpl_integrations.ingest.http.certificate import ServerCertificate, instant_text  # noqa: PLC0415 - as above

    if certificate is None or key is None:
        return Check("certificate", "ok", "none is configured")
    try:
        validity = ServerCertificate(certificate, key).validity
    except ConfigError as error:
        return _failed("certificate", str(error))
    problem = validity.problem(now)
    if problem is None:
        return Check("certificate", "ok", f"valid until {instant_text(validity.not_after)}")
    status: Status = "failed" if now >= validity.not_after or now < validity.not_before else "warning"
    return Check("certificate", status, problem, "replace both files; a running gateway reads them again by itself")


def _failed(name: str, sentence: str) -> Check:
    found, _, fix = sentence.rpartition("; ")
    return Check(name, "failed", found or sentence, fix or "correct it")
