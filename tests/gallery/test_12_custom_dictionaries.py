"""Custom dictionaries, BatchEncoding and namedtuples fail, or reach forward as another type."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter

import instep

from .common import on_each_engine


class Pair(NamedTuple):
    ids: Tensor
    mask: Tensor


class Bag(UserDict[str, Tensor]):
    pass


IDS, MASK = torch.arange(10.0).view(5, 2), torch.ones(5, 2)
ITEMS = {"ids": IDS, "mask": MASK}


def encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(ITEMS)


class Reads(nn.Module):
    expected: type

    def forward(self, batch: Any) -> Any:
        assert type(batch) is self.expected
        if isinstance(batch, tuple):
            return type(batch)(batch[0] * batch[1], batch[1])
        return {"out": batch["ids"] * batch["mask"]}


@on_each_engine
@pytest.mark.parametrize(
    "make",
    [
        lambda: dict(ITEMS),
        lambda: OrderedDict(ITEMS),
        lambda: Bag(ITEMS),
        lambda: MappingProxyType(ITEMS),
        lambda: Pair(IDS, MASK),
        encoding,
    ],
    ids=["dict", "OrderedDict", "UserDict", "mappingproxy", "namedtuple", "BatchEncoding"],
)
def test_mappings_and_namedtuples_keep_their_type(make: Any, engine: str) -> None:
    batch = make()
    net = Reads()
    net.expected = type(batch)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        mine, plain = model(batch), net(batch)
    assert type(mine) is type(plain)
    first = (mine[0], plain[0]) if isinstance(plain, tuple) else (mine["out"], plain["out"])
    assert torch.equal(*first)


def test_torch_neither_splits_nor_gathers_a_user_dict() -> None:
    batch = Bag(ITEMS)
    assert [part is batch for part in scatter(batch, [0, 1])] == [True, True]
    with pytest.raises((TypeError, ValueError)):
        gather([Bag(out=IDS[:3]), Bag(out=IDS[3:])], torch.device("cpu"))
