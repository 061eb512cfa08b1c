"""Merging the outputs of the replicas."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import instep

from .harness import scenario

TOPIC = "Merging outputs"


@scenario("A loss over pairs of samples")
def contrastive_loss():
    class Net(nn.Module):
        def forward(self, x):
            return F.cross_entropy(x @ x.T, torch.arange(len(x)))

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.eye(6))


@scenario("Outputs that depend on other samples")
def samples_interact():
    class Net(nn.Module):
        def forward(self, x):
            return x - x.mean()

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.arange(6.0))


@scenario("A loss with an ignored label")
def ignored_label():
    class Net(nn.Module):
        def forward(self, x, y):
            return F.cross_entropy(x, y, ignore_index=255)

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.eye(6), torch.tensor([0, 1, 255, 2, 255, 255]))


@scenario("A mean that differs between replicas, without a probe")
def unequal_scalar():
    class Net(nn.Module):
        def forward(self, x):
            return {"loss": x.mean()}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.arange(6.0))


@scenario("A count, without a probe")
def count():
    class Net(nn.Module):
        def forward(self, x):
            return {"positive": (x > 0).sum()}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(6))


@scenario("The number of samples, without a probe")
def number_of_samples():
    class Net(nn.Module):
        def forward(self, x):
            return {"samples": len(x)}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5))


@scenario("A string that differs between replicas")
def strings():
    class Net(nn.Module):
        def forward(self, x):
            return x, f"{len(x)} samples"

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5))


@scenario("A string that differs between replicas, without a probe")
def strings_without_probe():
    class Net(nn.Module):
        def forward(self, x):
            return x, f"{len(x)} samples"

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5))


@scenario("No dim has the size of the batch")
def no_batch_dim():
    class Net(nn.Module):
        def forward(self, x):
            return {"first": x[:1]}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.arange(10.0).view(5, 2))


@scenario("Two dims have the size of the batch")
def two_batch_dims():
    class Net(nn.Module):
        def forward(self, x):
            return {"similarity": x @ x.T}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(5, 2))


@scenario("A dim that cannot be concatenated")
def wrong_out_dim():
    class Net(nn.Module):
        def forward(self, x):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], out_dims=1, probe=False)
    model(torch.ones(5, 2))


@scenario("Different types")
def different_types():
    class Net(nn.Module):
        def forward(self, x):
            return x if len(x) > 2 else [x]

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5))


@scenario("Different layouts")
def different_layouts():
    class Net(nn.Module):
        def forward(self, x):
            return x if len(x) > 2 else x.to_sparse()

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5))


@scenario("Different keys")
def different_keys():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x, "large": x} if len(x) > 2 else {"y": x}

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5))


@scenario("None on some replicas")
def missing_parts():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x * 2 if x.max() > 2 else None}

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.tensor([3.0, 3.0, 3.0, 0.0, 0.0, 0.0]))


@scenario("Lists of different lengths")
def list_lengths():
    class Net(nn.Module):
        def forward(self, x):
            return [row for row in x if row.sum() > 2]

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([[3.0], [3.0], [0.0], [3.0]]))


@scenario("A list with two meanings")
def ambiguous_output_list():
    class Net(nn.Module):
        def forward(self, x):
            return [x * n for n in range(len(x))]

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(6, 2))


@scenario("An object that is not registered")
def unregistered_output():
    class Points:
        def __init__(self, xyz):
            self.xyz = xyz

    class Net(nn.Module):
        def forward(self, x):
            return {"points": Points(x)}

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5, 2))


@scenario("Attributes of a container")
def attributes():
    class Output(dict):
        pass

    class Net(nn.Module):
        def forward(self, x):
            output = Output(y=x)
            output.total = float(x.sum())
            return output

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5))


@scenario("A constant that changes after the trial")
def changed_constant():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x, "saturated": bool((x > 9).any())}

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    x = torch.ones(64)
    x[50] = 10
    model(x)


@scenario("A constant tensor that changes after the trial")
def changed_constant_tensor():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x, "limit": torch.where((x > 9).any(), 2.0, 1.0)}

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    x = torch.ones(64)
    x[50] = 10
    model(x)


@scenario("A shape that changes after the trial")
def changed_shape():
    class Net(nn.Module):
        def forward(self, x):
            return torch.cat([x, x]) if x.max() > 9 else x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    x = torch.ones(64)
    x[50] = 10
    model(x)


@scenario("A number that the trial cannot decide")
def undecided():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x, "errors": (x < 0).sum()}

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    x = torch.ones(64)
    x[20], x[50] = -1, -1
    model(x)


@scenario("Trials that contradict each other")
def contradicting_trials():
    class Net(nn.Module):
        def forward(self, x):
            return x.sum() if x.max() > 9 else x.mean()

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.arange(6.0))
    model(torch.arange(10.0, 16.0))


@scenario("Shapes as outputs")
def shapes():
    class Net(nn.Module):
        def forward(self, x):
            return x.shape

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(6, 2))


@scenario("A rule that does not fit the shapes")
def rule_shapes():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], merge={"y": "sum"})
    model(torch.ones(5, 2))


@scenario("A rule for tensors, given for strings")
def rule_strings():
    class Net(nn.Module):
        def forward(self, x):
            return {"note": f"{len(x)} samples"}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], merge={"note": "sum"})
    model(torch.ones(5, 2))


@scenario("A mean of strings")
def mean_of_strings():
    class Net(nn.Module):
        def forward(self, x):
            return {"note": f"{len(x)} samples"}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], merge={"note": "mean"})
    model(torch.ones(5, 2))


@scenario("A mean of tensors with different shapes")
def mean_of_shapes():
    class Net(nn.Module):
        def forward(self, x):
            return {"y": x}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], merge={"y": "mean"})
    model(torch.ones(5, 2))


@scenario("A weight that the call does not have")
def unknown_weight():
    class Net(nn.Module):
        def forward(self, x):
            return {"loss": x.mean()}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], merge={"loss": instep.weighted_by("mask")})
    model(torch.ones(5, 2))


@scenario("A weight for a string")
def weight_for_a_string():
    class Net(nn.Module):
        def forward(self, x):
            return {"note": f"{len(x)} samples"}

    model = instep.DataParallel(Net(), ["cpu", "cpu"], merge={"note": instep.weighted_by("x")})
    model(torch.ones(5))


@scenario("A weight by function, without arguments")
def weight_without_arguments():
    parts = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    instep.merge(parts, [3, 2], merge={"loss": instep.weighted_by(lambda mask: mask.sum())})


@scenario("Sparse tensors of different sizes")
def sparse_sizes():
    class Net(nn.Module):
        def forward(self, x):
            return torch.sparse_coo_tensor(torch.stack([torch.arange(len(x)), x.long()]), torch.ones(len(x)))

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.arange(6.0))


@scenario("Tensors in a compressed sparse layout")
def compressed_outputs():
    class Net(nn.Module):
        def forward(self, x):
            return x.to_sparse_csc()

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(6, 2))


@scenario("Nested tensors that are ragged in different dims")
def ragged_dims():
    class Net(nn.Module):
        def forward(self, x):
            rows = [torch.ones(n + 1, 2) for n in range(len(x))]
            nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
            return nested if x.sum() > 3 else nested.transpose(1, 2)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([2.0, 2.0, 1.0, 1.0]))


@scenario("Nested tensors of different widths")
def nested_widths():
    class Net(nn.Module):
        def forward(self, x):
            rows = [torch.ones(n + 1, int(x.max())) for n in range(len(x))]
            return torch.nested.nested_tensor(rows, layout=torch.jagged)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([2.0, 2.0, 1.0, 1.0]))


@scenario("A registered type with another number of samples")
def wrong_number_of_samples():
    class Points:
        def __init__(self, xyz):
            self.xyz = xyz

    class Net(nn.Module):
        def forward(self, x):
            return Points(x[:1])

    instep.register(
        Points,
        size=lambda v: len(v.xyz),
        split=lambda v, sizes: [Points(part) for part in v.xyz.split(sizes)],
        merge=lambda parts: Points(torch.cat([part.xyz for part in parts])),
    )
    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(6, 3))


@scenario("A TensorDict of losses")
def tensordict_of_losses():
    from tensordict import TensorDict

    class Net(nn.Module):
        def forward(self, x):
            return TensorDict({"loss": x.mean()})

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.arange(6.0))


@scenario("Distributions with different shapes")
def distribution_shapes():
    class Net(nn.Module):
        def forward(self, x):
            width = int(x.max())
            return torch.distributions.Normal(torch.zeros(len(x), width), torch.ones(len(x), width))

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([2.0, 2.0, 1.0, 1.0]))


@scenario("Distributions of different types")
def distribution_types():
    class Net(nn.Module):
        def forward(self, x):
            base = torch.distributions.Normal if x.max() > 1 else torch.distributions.Laplace
            return torch.distributions.Independent(base(torch.zeros(len(x), 2), torch.ones(len(x), 2)), 1)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([2.0, 2.0, 1.0, 1.0]))


@scenario("One graph from each replica")
def one_graph_each():
    from torch_geometric.data import Data

    class Net(nn.Module):
        def forward(self, x):
            return Data(x=x)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.ones(6, 2))


@scenario("Graphs of which some have another attribute")
def graph_attributes():
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        def forward(self, x):
            graphs = [Data(x=row[None], score=row) if x.max() > 1 else Data(x=row[None]) for row in x]
            return Batch.from_data_list(graphs)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([[2.0], [2.0], [1.0], [1.0]]))


@scenario("Graphs with an attribute that was added to some")
def graph_added_attribute():
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        def forward(self, x):
            if x.max() > 1:
                return Batch.from_data_list([Data(x=row[None], score=row) for row in x])
            graphs = Batch.from_data_list([Data(x=row[None]) for row in x])
            graphs.score = x[:, 0]
            return graphs

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([[2.0], [2.0], [1.0], [1.0]]))


@scenario("Graphs with a setting that differs")
def graph_setting():
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        def forward(self, x):
            graphs = Batch.from_data_list([Data(x=row[None]) for row in x])
            graphs.threshold = float(x.max())
            return graphs

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([[2.0], [2.0], [1.0], [1.0]]))


@scenario("Caches of different lengths")
def cache_lengths():
    from transformers import DynamicCache

    class Net(nn.Module):
        def forward(self, x):
            cache = DynamicCache()
            states = torch.ones(len(x), 2, int(x.max()), 8)
            cache.update(states, states, 0)
            return cache

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([2.0, 2.0, 1.0, 1.0]))


@scenario("Caches with different layers")
def cache_layers():
    from transformers import DynamicCache

    class Net(nn.Module):
        def forward(self, x):
            cache = DynamicCache()
            states = torch.ones(len(x), 2, 5, 8)
            for layer in range(int(x.max())):
                cache.update(states, states, layer)
            return cache

    model = instep.DataParallel(Net(), ["cpu", "cpu"], probe=False)
    model(torch.tensor([2.0, 2.0, 1.0, 1.0]))
