"""A local Kinesis for demos and tests: no AWS account, the real limits, faults on demand."""

from kpl_integrations.local_kinesis.server import LocalKinesis, LocalKinesisProcess, ThreadedLocalKinesis

__all__ = ["LocalKinesis", "LocalKinesisProcess", "ThreadedLocalKinesis"]
