"""What a sender's thread needs, imported by whoever configures it.

A process that forks while its thread is in the middle of an import leaves its child half a module, which nobody
there can ever import again: what the child logs would be lost. A fork waits for the thread as long as it
can, and half a second of imports is many seconds on a busy machine.
"""

from importlib import import_module

from kpl_core import Config

__all__ = ["import_early"]


def import_early(config: Config) -> None:
    """Import what a producer of `config` imports when it is opened, on asyncio and over the network."""
    import_module("kpl_core.transport.aiobotocore_transport")
    if config.spool is not None or config.dead_letters is not None:
        import_module("kpl_core.producer.durable_store")
    if config.coordination is not None:
        import_module("kpl_core.producer.coordination_driver")
    # What anyio and the resolution of names import when they are first used.
    import_module("anyio._backends._asyncio")
    import_module("encodings.idna")
