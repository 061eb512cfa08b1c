"""What is refused: wrappers of torch's own around a wrapper, and what cannot be wrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


@pytest.fixture
def model() -> Iterator[instep.DataParallel]:
    with instep.DataParallel(Net(), ["cpu"] * 2) as wrapped:
        yield wrapped


def test_it_refuses_to_be_copied_to_devices(model: instep.DataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    there = sys.modules["torch.nn.parallel.replicate"]  # what it does with two GPUs, but for the copies themselves
    monkeypatch.setattr(there, "_broadcast_coalesced_reshape", lambda tensors, devices, detach=False: [tensors] * 2)
    assert len(nn.parallel.replicate(model.module, [0, 1])) == 2
    with pytest.raises(
        instep.WrapError, match=r"torch\.nn\.DataParallel cannot wrap instep\.DataParallel: both would split"
    ):
        nn.parallel.replicate(model, [0, 1])


def test_it_refuses_to_be_wrapped(model: instep.DataParallel, tmp_path: object) -> None:
    with pytest.raises(
        instep.WrapError, match=r"torch\.nn\.DataParallel cannot wrap instep\.DataParallel: both would split"
    ):
        nn.DataParallel(instep.DataParallel(Net(), ["cpu"] * 2))(torch.randn(4, 3))
    model(torch.randn(4, 3))
    for _ in range(2):  # at any call, not at the first alone
        with pytest.raises(
            instep.WrapError, match=r"torch\.nn\.DataParallel cannot wrap instep\.DataParallel: both would split"
        ):
            nn.DataParallel(model)(torch.randn(4, 3))
    model(torch.randn(4, 3))
    store = torch.distributed.FileStore(f"{tmp_path}/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(
            instep.WrapError, match=r"DistributedDataParallel cannot wrap instep\.DataParallel: both would split"
        ):
            nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


def test_modules_that_cannot_be_wrapped() -> None:
    with pytest.raises(instep.WrapError, match=r"wraps an nn\.Module, not a int"):
        instep.DataParallel(3)
    with pytest.raises(instep.WrapError, match=r"(?s)already wrapped by DataParallel.*model\.module"):
        instep.DataParallel(nn.DataParallel(Net()))
    with pytest.raises(instep.WrapError, match="device_ids is empty: name at least one device, or leave it out"):
        instep.DataParallel(Net(), [])
    with pytest.raises(instep.WrapError, match="on_unmerged_state='shrug'"):
        instep.DataParallel(Net(), ["cpu"], on_unmerged_state="shrug")
    choices = r"Choose one of: auto, torchrun, serial, processes, threads"
    with pytest.raises(instep.EngineError, match=rf"engine='rocket' is not an engine\. {choices}"):
        instep.DataParallel(Net(), ["cpu"], engine="rocket")
    with pytest.raises(instep.MergeError, match="there is no merge rule 'average'"):
        instep.DataParallel(Net(), ["cpu"] * 2, merge={"loss": "average"})(torch.randn(4, 3))
    with pytest.raises(instep.StateError, match=r"state=\{.steps.: .add.\}"):
        instep.DataParallel(Net(), ["cpu"] * 2, state={"steps": "add"})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_module_is_refused() -> None:
    with pytest.raises(instep.WrapError, match="ScriptModule"):
        instep.DataParallel(torch.jit.script(nn.Linear(2, 2)))


class Mixes(nn.Module):
    """A weight that is sparse itself, and not only its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mix, x.t()).t()


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_weights_that_are_sparse(engine: str) -> None:
    net, x = Mixes(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        with pytest.raises(instep.WrapError, match=r"'mix' is a torch\.sparse_coo tensor"):
            model(x)
        net.mix.requires_grad_(False)
        torch.testing.assert_close(model(x), net(x))
