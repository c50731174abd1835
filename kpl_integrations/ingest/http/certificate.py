"""The server's certificate: checked before the gateway listens, and read again while it runs.

Each handshake takes the latest pair that could be loaded. A pair that does not match, or is half written, is never
used: the earlier one stays, and `problem` says why. Connections that are open keep theirs.

The pair is changed by the callback for server names (RFC 6066), which OpenSSL calls for a client without a name too,
and not by loading new files into the server's own SSLContext. Loading is two steps, and a handshake, or a file that
is replaced in between, would meet a certificate with the key of another.
"""

import logging
import re
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from kpl_core import ConfigError
from kpl_integrations.ingest.file_states import FileStates, file_states

_log: Final = logging.getLogger("kpl_integrations.ingest.certificate")

_DAY_SECONDS: Final = 86_400.0
# A certificate should be renewed in the last 14 days, or in the last sixth of a shorter life.
_RENEW_SECONDS: Final = 14 * _DAY_SECONDS
_RENEW_SHARE: Final = 6.0
_FIRST_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER (X.690), and the number of bytes of a short length.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_LONG_LENGTH: Final = 0x80
# The members of a TBSCertificate before its validity, without the optional version: serial, signature, issuer.
_BEFORE_VALIDITY: Final = 3


class Validity(NamedTuple):
    """From when and until when a certificate is valid, in seconds since 1970."""

    not_before: float
    not_after: float

    @property
    def renew_at(self) -> float:
        """The instant from which it should be renewed."""
        return self.not_after - min(_RENEW_SECONDS, (self.not_after - self.not_before) / _RENEW_SHARE)

    def problem(self, now: float) -> str | None:
        """Return why clients will not accept it, or soon will not, at this instant; None if they will."""
        if now >= self.not_after:
            return f"expired at {instant_text(self.not_after)}"
        if now < self.not_before:
            return f"is not valid before {instant_text(self.not_before)}"
        if now >= self.renew_at:
            return f"expires at {instant_text(self.not_after)}, in {(self.not_after - now) / _DAY_SECONDS:.1f} days"
        return None


def instant_text(unix_seconds: float) -> str:
    """Return an instant in the form of RFC 3339, to the second."""
    return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def validity_of(pem: str) -> Validity:
    """Return the validity of the first certificate of a chain, which is the server's own (RFC 5280, section 4.1).

    Raises:
        ValueError: there is no certificate, or it is malformed.
    """
    found = _FIRST_CERTIFICATE.search(pem)
    if found is None:
        message = "no certificate"
        raise ValueError(message)
    try:
        certificate = next(_members(ssl.PEM_cert_to_DER_cert(found[0])))[1]
        to_be_signed = next(_members(certificate))[1]
        members = [member for member in _members(to_be_signed) if member[0] != _VERSION]
        not_before, not_after = (_unix_seconds(*time) for time in _members(members[_BEFORE_VALIDITY][1]))
    except (IndexError, StopIteration, ValueError) as error:
        message = "a malformed certificate"
        raise ValueError(message) from error
    return Validity(not_before, not_after)


def _members(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of the values that follow each other in these bytes."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length >= _LONG_LENGTH:
            size = length - _LONG_LENGTH
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        yield tag, der[at : at + length]
        at += length


def _unix_seconds(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280: years from 50 on are of the last century.
        text = ("19" if text >= "5" else "20") + text
    elif tag != _GENERALIZED_TIME:
        message = f"the tag of a time is {tag}"
        raise ValueError(message)
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


class ServerCertificate:
    """The certificate chain and key of two PEM files, as they could be loaded last.

    A client may choose one of `protocols` in the handshake (ALPN, RFC 7301).
    `problem` says why files that changed since then cannot be used. Not thread-safe: one thread at a time reloads.

    Raises:
        ConfigError: the files cannot be used at the start.
    """

    def __init__(self, certificate: Path, key: Path, protocols: Sequence[str] = ("http/1.1",)) -> None:
        self._protocols = list(protocols)
        self._files = (certificate, key)
        self._seen: FileStates = file_states(self._files)
        self._context, self.validity = self._load()
        self.problem: str | None = None

    def serve(self, context: ssl.SSLContext) -> None:
        """Let all further handshakes of this server's context use the latest pair."""
        context.sni_callback = self._choose

    def reload_if_changed(self, *, always: bool = False) -> bool:
        """Read the files again if they changed or could not be used last time, or always; return True if it did."""
        seen = file_states(self._files)
        if seen == self._seen and self.problem is None and not always:
            return False
        # The next call sees changes from here on.
        self._seen = seen
        try:
            loaded = self._load()
        except ConfigError as error:
            problem = str(error)
            if problem != self.problem:
                _log.warning("%s; the earlier certificate stays in use", problem)
            self.problem = problem
            return False
        if file_states(self._files) != seen:
            # They change at this moment: the certificate may be of another pair than the validity. Soon once more.
            self._seen = ()
            return False
        self._context, self.validity = loaded
        self.problem = None
        _log.info("read the certificate %s, valid until %s", self._files[0], instant_text(self.validity.not_after))
        return True

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._context

    def _load(self) -> tuple[ssl.SSLContext, Validity]:
        certificate, key = self._files
        texts = []
        for name, path in (("tls_certificate", certificate), ("tls_key", key)):
            try:
                texts.append(path.read_text("utf-8", "replace"))
            except OSError as error:
                message = f"{name} {path} cannot be read ({error.strerror}); give a PEM file that this process may read"
                raise ConfigError(message) from error

        def refuse_password() -> str:
            # OpenSSL would ask for the password on the terminal and block a service.
            message = f"tls_key {key} is encrypted, and a server cannot ask for its password; give a decrypted key"
            raise ConfigError(message)

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(self._protocols)
        try:
            context.load_cert_chain(certificate, key, refuse_password)
            return context, validity_of(texts[0])
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            reason = (isinstance(error, ssl.SSLError) and error.reason) or "not PEM"
            message = (
                f"tls_certificate {certificate} and tls_key {key} cannot be used ({reason}); "
                f"give a certificate chain and the private key that belongs to it, both in PEM"
            )
            raise ConfigError(message) from error

    def __repr__(self) -> str:
        return f"<ServerCertificate {self._files[0]}, valid until {instant_text(self.validity.not_after)}>"
