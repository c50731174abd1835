"""The Host names that a server on a developer's machine answers to, against DNS rebinding.

A web page can let its own name resolve to 127.0.0.1 and so make a browser send requests to this machine. The browser
then sends that name as Host. It cannot do that with a loopback name, nor with an address.
"""

import ipaddress
from collections.abc import Iterable


class HostNames:
    """Loopback names and addresses, and the names given. With `any_address` every IP address is one of them too."""

    def __init__(self, names: Iterable[str], *, any_address: bool = False) -> None:
        self._names = frozenset(name.strip().lower() for name in names)
        self._any_address = any_address

    def allow(self, hosts: Iterable[str]) -> bool:
        """Return True if each of a request's Host fields is one of the names; no browser sends a request without."""
        return all(map(self._is_known, hosts))

    def _is_known(self, host: str) -> bool:
        name = host.lower().strip()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback
