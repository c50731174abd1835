"""One order as each type that a topic takes."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic


class OrderStruct(msgspec.Struct):
    customer: str
    total: int


@dataclass
class OrderDataclass:
    customer: str
    total: int


class OrderModel(pydantic.BaseModel):
    customer: str
    total: int


OrderDict = dict[str, Any]

ORDER: dict[str, Any] = {"customer": "c-1", "total": 12}
KINDS: list[tuple[Any, Any]] = [
    (OrderStruct, OrderStruct(**ORDER)),
    (OrderDataclass, OrderDataclass(**ORDER)),
    (OrderModel, OrderModel(**ORDER)),
    (OrderDict, dict(ORDER)),
    (dict, dict(ORDER)),
]
