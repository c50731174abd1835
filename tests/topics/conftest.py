from kpl_integrations.pytest_plugin import kinesis_double

__all__ = ["kinesis_double"]
