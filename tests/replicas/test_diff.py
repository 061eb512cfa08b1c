"""Looking for changes: what is seen, and that both ways of looking see the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from instep.replicas import diff, write_watch
from instep.replicas.diff import ChangeTracker, IdentitySnapshot
from instep.replicas.write_watch import MemoryLayout, SavedValues, WriteDetector, data_ptr


@pytest.fixture(params=[True, False], ids=["by address", "object by object"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not diff.CAN_READ_ADDRESSES:
        pytest.skip("this interpreter's lists are laid out otherwise")
    monkeypatch.setattr(diff, "CAN_READ_ADDRESSES", request.param)
    return bool(request.param)


class Equal:
    """Says that it equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("old", "new"),
    [([1], [1]), (0, torch.tensor(0)), (torch.ones(3), torch.ones(3)), (Equal(), Equal()), (1.5, float("1.5"))],
    ids=["equal lists", "a number and a tensor", "equal tensors", "always equal", "equal numbers"],
)
def test_identity_snapshots_compare_identity_not_equality(old: object, new: object) -> None:
    table = {"a": old, "b": None}
    holdings = IdentitySnapshot([table, {}])
    assert holdings.is_unchanged()
    table["a"] = new
    assert not holdings.is_unchanged()
    table["a"] = old
    assert holdings.is_unchanged()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(c=1),
        lambda table: table.pop("b"),
        lambda table: table.update(a=table["b"], b=table["a"]),
        lambda table: table.clear(),
    ],
    ids=["added", "removed", "swapped", "cleared"],
)
def test_identity_snapshots_detect_added_and_removed_keys(change: Callable[[dict[str, object]], object]) -> None:
    table: dict[str, object] = {"a": object(), "b": object()}
    holdings = IdentitySnapshot([table])
    change(table)
    assert not holdings.is_unchanged()


@pytest.mark.usefixtures("fast")
def test_change_tracker_lists_attributes_and_detects_structure_changes() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    watch = ChangeTracker(list(net.modules()), tensors=list(net.parameters()))
    assert not watch.diff()
    net[0].note = [1]
    net[1].running_mean = torch.ones(2)
    changes = watch.diff()
    assert not changes.is_structural
    assert [(c.module_index, c.name, c.is_buffer) for c in changes.attributes] == [
        (1, "note", False),
        (2, "running_mean", True),
    ]
    watch.accept(changes)
    assert not watch.diff()
    handle = net[0].register_forward_hook(lambda *_: None)
    assert watch.diff().is_structural
    handle.remove()
    assert not watch.diff()
    net[0].weight.requires_grad_(False)
    assert watch.diff().is_structural
    net[0].weight.requires_grad_(True)
    net[0] = nn.Linear(2, 2)
    assert watch.diff().is_structural


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: setattr(p, "data", p.data[:2]),
        lambda p: setattr(p, "data", p.data.view(9)),
        lambda p: p.requires_grad_(False),
    ],
    ids=["other memory", "transposed", "a part of it", "another shape", "frozen"],
)
@pytest.mark.parametrize("quick", [True, False], ids=["one pass", "one by one"])
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside a sparse one"])
def test_memory_layout_detects_changed_metadata(
    change: Callable[[nn.Parameter], None], quick: bool, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not quick:
        monkeypatch.setattr(write_watch, "make_tensor_guard", lambda tensors: lambda: False)
    parameter = nn.Parameter(torch.randn(3, 3))
    lay = MemoryLayout([parameter, *[torch.eye(2).to_sparse().requires_grad_()] * beside])
    assert lay.is_unchanged()
    with torch.autocast("cpu"):
        assert lay.is_unchanged()
    with torch.inference_mode():
        assert lay.is_unchanged()
    with torch.no_grad():
        parameter.add_(1)
    assert lay.is_unchanged()
    change(parameter)
    assert not lay.is_unchanged()


def test_writes_are_detected_by_version_address_and_value() -> None:
    leaf = nn.Parameter(torch.zeros(3))
    versions, addresses = WriteDetector(["leaf"], [leaf]), WriteDetector(["leaf"], [leaf], read=data_ptr)
    values = SavedValues([("leaf", leaf)])
    assert versions.written() == addresses.written() == values.changed() == []
    with torch.no_grad():
        leaf.detach().add_(1)  # a view has the counter of its base
    assert (versions.written(), addresses.written(), values.changed()) == (["leaf"], [], ["leaf"])
    versions.reset()
    values.restore(["leaf"])
    leaf.data.add_(1)
    assert (versions.written(), addresses.written(), values.changed()) == ([], [], ["leaf"])
    leaf.data = torch.zeros(3)
    assert (addresses.written(), values.changed()) == (["leaf"], [])
