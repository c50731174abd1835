"""How many requests were answered with what, and refused for which reason; every route counts here."""

from collections import Counter

from kpl_integrations.ingest.admission.admission import Refusal

__all__ = ["Tally"]


class Tally:
    """Two counters that only grow, from the making of a gateway on."""

    __slots__ = ("answers", "refusals")

    def __init__(self) -> None:
        # By HTTP status.
        self.answers: Counter[int] = Counter()
        self.refusals: Counter[Refusal] = Counter()
