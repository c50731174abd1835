"""The listening sockets of the gateway, and the check of its TLS files.

A single process has one socket. On Linux each worker has its own socket on the same port, and the kernel distributes
new connections over them (SO_REUSEPORT). The supervisor keeps all sockets open, so connections of a dead worker wait
for its replacement. On other systems the workers share one socket.
"""

import logging
import socket
import ssl
import sys
from pathlib import Path
from typing import Final

from kpl_core import ConfigError

if sys.platform != "win32":
    import resource

BACKLOG: Final = 2_048
# Descriptors for files, for connections to Kinesis, and for accepting a connection before another one is closed.
_OTHER_DESCRIPTORS: Final = 128

_log: Final = logging.getLogger(__name__)


def connection_limit(max_connections: int) -> int:
    """Return how many connections this process can have, and raise its limit of open files for them if possible.

    Without descriptors left, no client could connect and the gateway could not reach Kinesis.
    """
    if sys.platform == "win32":
        return max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            most = max(1, soft - _OTHER_DESCRIPTORS)
            _log.warning("max_connections is %d, but the limit of open files allows %d", max_connections, most)
            return most
    return max_connections


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` sockets that listen on one port; raises OSError if the address is not available."""
    # Bind exclusively first. A shared port would admit a second gateway of the same user, which is a mistake.
    with bound_socket(host, port) as first:
        port = first.getsockname()[1]
        if sys.platform != "linux":
            first.listen(BACKLOG)
            return [first.dup() for _ in range(count)]
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(bound_socket(host, port, is_shared=True))
            sockets[-1].listen(BACKLOG)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def require_certificate(certificate: Path, key: Path) -> None:
    """Raise ConfigError unless this certificate chain and its private key can serve TLS."""
    for name, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            message = f"{name} {path} cannot be read ({error.strerror}); give a PEM file that this process may read"
            raise ConfigError(message) from error

    def refuse_password() -> str:
        # OpenSSL would ask for the password on the terminal and block a service.
        message = f"tls_key {key} is encrypted, and a server cannot ask for its password; give a decrypted key"
        raise ConfigError(message)

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        message = (
            f"tls_certificate {certificate} and tls_key {key} cannot be used ({error.reason or 'not PEM'}); "
            f"give a certificate chain and the private key that belongs to it, both in PEM"
        )
        raise ConfigError(message) from error


def bound_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet; raises OSError if the address is not available.

    `is_shared`: one more socket for a port of `listening_sockets`; Linux only.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
