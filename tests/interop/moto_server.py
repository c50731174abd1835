"""Serve moto on loopback, one request at a time; run by the interpreter of moto's own environment.

moto's own server answers in threads, and its `Shard.put_record` may give two of them the same
sequence number. One record then overwrites the other while both are acknowledged. One request at a
time loses nothing. Usage: `python moto_server.py PORT`.
"""

import sys

from moto.server import (  # type: ignore[import-not-found, unused-ignore]
    DomainDispatcherApplication,
    create_backend_app,
)
from werkzeug.serving import make_server  # type: ignore[import-not-found, unused-ignore]

if __name__ == "__main__":
    application = DomainDispatcherApplication(create_backend_app)
    make_server("127.0.0.1", int(sys.argv[1]), application, threaded=False).serve_forever()
