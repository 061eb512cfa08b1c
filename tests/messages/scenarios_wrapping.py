"""Wrapping a module, and options."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Wrapping and options"


@scenario("A function instead of a module")
def not_a_module():
    model = instep.DataParallel(lambda x: x)


@scenario("A module in torch.nn.DataParallel")
def wrapped_by_torch():
    net = nn.DataParallel(nn.Linear(3, 2))
    model = instep.DataParallel(net, ["cpu", "cpu"])


@scenario("torch.nn.DataParallel around the wrapper")
def wrapped_again():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    nn.DataParallel(model)(torch.randn(4, 3))


@scenario("DistributedDataParallel around the wrapper")
def wrapped_by_ddp():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    try:
        nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


@scenario("engine='torchrun' without a launcher")
def no_launcher():
    model = instep.DataParallel(nn.Linear(3, 2), engine="torchrun")


@scenario("Several devices for each rank")
def devices_of_a_rank():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], engine="torchrun")


@scenario("An unknown kind of batches")
def unknown_batches():
    model = instep.DataParallel(nn.Linear(3, 2), batches="rank")


@scenario("An unknown way to gather outputs")
def unknown_gather():
    model = instep.DataParallel(nn.Linear(3, 2), gather="none")


@scenario("An unknown way to send gradients")
def unknown_reduce():
    model = instep.DataParallel(nn.Linear(3, 2), reduce="int8")


@scenario("gather='sharded' with a loss in the module")
def sharded_loss():
    net = instep.with_loss(nn.Linear(3, 2), nn.MSELoss())
    model = instep.DataParallel(net, gather="sharded")


@scenario("A script module")
def script_module():
    net = torch.jit.script(nn.Linear(3, 2))
    model = instep.DataParallel(net, ["cpu", "cpu"])


@scenario("A script of the wrapper")
def scripted_wrapper():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    torch.jit.script(model)


@scenario("A parametrization of the wrapper itself")
def parametrized_wrapper():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    torch.nn.utils.parametrizations.weight_norm(model)


@scenario("No devices")
def no_devices():
    model = instep.DataParallel(nn.Linear(3, 2), [])


@scenario("One device that is not in a list")
def device_not_in_a_list():
    model = instep.DataParallel(nn.Linear(3, 2), "cpu")


@scenario("A module on two devices")
def several_devices():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
    model = instep.DataParallel(net, ["cpu", "cpu"])


@scenario("A module that was moved after it was wrapped")
def moved():
    net = nn.Linear(3, 2)
    model = instep.DataParallel(net, ["cpu", "cpu"])
    net.to("meta")
    model(torch.randn(4, 3))


@scenario("A sparse parameter")
def sparse_parameter():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.weight, x.T).T

    model = instep.DataParallel(Mix(), ["cpu", "cpu"])
    model(torch.randn(4, 3))


@scenario("An unknown engine")
def unknown_engine():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], engine="process")


@scenario("An unknown merge rule")
def unknown_merge_rule():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], merge={"loss": "average"})


@scenario("An unknown state rule")
def unknown_state_rule():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], state={"steps": "add"})


@scenario("A state rule without a name")
def state_without_names():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], state="sum")


@scenario("An unknown value of on_unmerged_state")
def unknown_on_unmerged_state():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], on_unmerged_state="ignore")


@scenario("An unknown value of hooks")
def unknown_hooks():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], hooks="each")


@scenario("Shares for another number of devices")
def wrong_shares():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], shares=[2, 1, 1])


@scenario("A method that the module does not have")
def unknown_method():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], methods=["encode"])


@scenario("Options of a method that are not in a dictionary")
def method_options():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], methods={"forward": "cat"})


@scenario("An attribute that the module does not have")
def unknown_attribute():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    model.encode


@scenario("An invalid dim")
def invalid_dim():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], in_dims={"input": "batch"})
    model(torch.randn(4, 3))


@scenario("A misspelled argument in in_dims")
def misspelled_argument():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], in_dims={"inputs": 0})
    model(torch.randn(4, 3))


@scenario("A cost of an argument that the call does not have")
def unknown_cost():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], cost="lengths")
    model(torch.randn(4, 3))


@scenario("A cost with too few numbers")
def wrong_cost():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], cost=lambda input: [1.0])
    model(torch.randn(4, 3))


@scenario("A registered type without functions")
def register_without_functions():
    class Points:
        pass

    instep.register(Points, size=3, split=None, merge=None)


@scenario("A type of torch, registered")
def register_builtin():
    instep.register(torch.Tensor, size=len, split=lambda v, sizes: v.split(sizes), merge=torch.cat)
