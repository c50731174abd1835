"""An embedded Kinesis for demos and tests: no account, real limits, switchable faults."""

from kpl_integrations.local_kinesis.process import LocalKinesisProcess
from kpl_integrations.local_kinesis.server import LocalKinesis
from kpl_integrations.local_kinesis.threaded import ThreadedLocalKinesis

__all__ = ["LocalKinesis", "LocalKinesisProcess", "ThreadedLocalKinesis"]
