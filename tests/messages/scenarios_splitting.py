"""Splitting the arguments of a call."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .harness import scenario

TOPIC = "Splitting arguments"


@scenario("An argument that has another size than the batch")
def other_size():
    class Net(nn.Module):
        def forward(self, x, class_weights):
            return x * class_weights

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5, 3), torch.ones(3))


@scenario("An argument with the batch in another dim")
def other_dim():
    class Net(nn.Module):
        def forward(self, x, mask, memory):
            return x + memory[0]

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5, 3), torch.ones(5), torch.ones(2, 5, 3))


@scenario("A list with another number of entries")
def other_length():
    class Net(nn.Module):
        def forward(self, x, names):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"], in_dims={"names": "samples"})
    model(torch.ones(5, 3), ["a", "b", "c"])


@scenario("Two lists with different numbers of entries")
def two_lists():
    class Net(nn.Module):
        def forward(self, questions, answers):
            return questions

    model = instep.DataParallel(Net(), ["cpu", "cpu"], in_dims="samples")
    model(["a", "b", "c", "d"], ["e", "f"])


@scenario("A list of tensors with another number of entries")
def other_tensor_list():
    class Net(nn.Module):
        def forward(self, x, images):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5, 3), [torch.ones(3, 8, 8), torch.ones(3, 6, 9)])


@scenario("A tensor without the dim that was given")
def missing_dim():
    class Net(nn.Module):
        def forward(self, x, scale):
            return x * scale

    model = instep.DataParallel(Net(), ["cpu", "cpu"], in_dims={"scale": 1})
    model(torch.ones(5, 3), torch.ones(5))


@scenario("Packed sequences of another batch")
def packed_sequence():
    class Net(nn.Module):
        def forward(self, x, packed):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5, 3), nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)]))


@scenario("Two possible batch sizes")
def two_batch_sizes():
    class Net(nn.Module):
        def forward(self, graphs):
            return [graph.sum() for graph in graphs]

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model([torch.ones(6, 2), torch.ones(6, 2)])


@scenario("A list with two meanings")
def two_readings():
    class Net(nn.Module):
        def forward(self, x, others):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), [torch.ones(4, 2) for _ in range(4)])


@scenario("Lists of different lengths, without a batch")
def uneven_lists():
    class Net(nn.Module):
        def forward(self, pairs):
            return pairs

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model([["a", torch.ones(2)], ["b"]])


@scenario("Several dims for a tensor")
def dims_of_a_tensor():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"], in_dims={"input": (0, 1)})
    model(torch.ones(4, 3))


@scenario("More dims than entries")
def too_many_entries():
    class Net(nn.Module):
        def forward(self, pair):
            return pair[0]

    model = instep.DataParallel(Net(), ["cpu", "cpu"], in_dims=((0, 0, 0),))
    model((torch.ones(4, 3), torch.ones(4, 3)))


@scenario("More dims than arguments")
def too_many_dims():
    instep.split((torch.ones(4, 3),), 2, in_dims=(0, 0))


@scenario("A module as an argument")
def module_argument():
    class Net(nn.Module):
        def forward(self, x, teacher):
            return teacher(x)

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), nn.Linear(3, 2))


@scenario("A set of tensors")
def set_of_tensors():
    class Net(nn.Module):
        def forward(self, x, others):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), {torch.ones(4)})


@scenario("An iterator as an argument")
def iterator():
    class Net(nn.Module):
        def forward(self, x, names):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), iter(["a", "b", "c", "d"]))


@scenario("An object that holds tensors")
def unregistered_argument():
    class Points:
        def __init__(self, xyz):
            self.xyz = xyz

    class Net(nn.Module):
        def forward(self, points):
            return points.xyz

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(Points(torch.ones(4, 3)))


@scenario("A registered type whose split returns too few parts")
def wrong_split():
    class Points:
        def __init__(self, xyz):
            self.xyz = xyz

    class Net(nn.Module):
        def forward(self, points):
            return points.xyz

    instep.register(Points, size=lambda v: len(v.xyz), split=lambda v, sizes: [v], merge=lambda parts: parts[0])
    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(Points(torch.ones(4, 3)))


@scenario("A tensor in a compressed sparse layout")
def sparse_csr():
    class Net(nn.Module):
        def forward(self, adjacency):
            return adjacency.to_dense()

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.eye(4).to_sparse_csc())


@scenario("Shards for another number of replicas")
def wrong_shards():
    class Net(nn.Module):
        def forward(self, x, boxes):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), instep.Shards([torch.ones(1), torch.ones(1), torch.ones(2)]))


@scenario("Two Shards of different sizes")
def unequal_shards():
    class Net(nn.Module):
        def forward(self, x, y):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(instep.Shards([torch.ones(3, 2), torch.ones(1, 2)]), instep.Shards([torch.ones(2, 2), torch.ones(2, 2)]))


@scenario("Shards without entries")
def empty_shards():
    instep.Shards([])


@scenario("Shards for one device")
def shards_on_one_device():
    model = instep.DataParallel(nn.Linear(3, 2), ["cpu"])
    model(instep.Shards([torch.ones(2, 3), torch.ones(2, 3)]))


@scenario("An argument that every replica gets is changed")
def changed_argument():
    class Net(nn.Module):
        def forward(self, x, counts):
            counts[0] += 1
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), instep.whole(torch.zeros(10)))


@scenario("An argument is written to, and the call has to run again")
def written_twice():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            self.seen.append(len(x))
            return x.mul_(2)

    model = instep.DataParallel(Net(), ["cpu", "cpu"], state={"seen": "cat"})
    model(torch.ones(4, 3))


@scenario("A batch of graphs without its bounds")
def graphs_without_bounds():
    from torch_geometric.data import Batch

    class Net(nn.Module):
        def forward(self, graphs):
            return graphs.x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(Batch(x=torch.ones(4, 3), batch=torch.tensor([0, 0, 1, 1])))


@scenario("A batch of graphs that was made by hand")
def graphs_by_hand():
    from torch_geometric.data import Batch

    class Net(nn.Module):
        def forward(self, graphs):
            return graphs.x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(Batch(x=torch.ones(4, 3), ptr=torch.tensor([0, 2, 4])))


@scenario("An attribute of graphs that was replaced")
def graphs_replaced():
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        def forward(self, graphs):
            return graphs.x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    graphs = Batch.from_data_list([Data(x=torch.ones(2, 3)), Data(x=torch.ones(2, 3))])
    graphs.x = torch.ones(3, 3)
    model(graphs)


@scenario("An attribute of graphs that was added after batching")
def graphs_added():
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        def forward(self, graphs):
            return graphs.x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    graphs = Batch.from_data_list([Data(x=torch.ones(2, 3)), Data(x=torch.ones(2, 3))])
    graphs.weight = torch.ones(7)
    model(graphs)


@scenario("Graphs with lists of tensors")
def graphs_with_lists():
    from torch_geometric.data import Batch, Data

    class Net(nn.Module):
        def forward(self, graphs):
            return graphs.x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    graphs = [Data(x=torch.ones(2, 3), levels=[torch.ones(2), torch.ones(1)]) for _ in range(2)]
    model(Batch.from_data_list(graphs))


@scenario("Another number of graphs than samples")
def list_of_graphs():
    from torch_geometric.data import Data

    class Net(nn.Module):
        def forward(self, x, graphs):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(5, 3), [Data(x=torch.ones(2, 3)) for _ in range(3)])


@scenario("Nodes and edges without the graph of each node")
def edges_without_graphs():
    class Net(nn.Module):
        def forward(self, x, edge_index):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]]))


@scenario("An edge between two graphs")
def edge_between_graphs():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 0, 1, 1]))


@scenario("Edges of nodes that are not there")
def edges_without_nodes():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0], [9]]), torch.tensor([0, 0, 1, 1]))


@scenario("Edges in another order than the graphs")
def unsorted_edges():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[2, 0], [3, 1]]), torch.tensor([0, 0, 1, 1]))


@scenario("Nodes in another order than the graphs")
def unsorted_nodes():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0], [1]]), torch.tensor([1, 1, 0, 0]))


@scenario("A graph without nodes")
def graph_without_nodes():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0], [1]]), torch.tensor([0, 0, 2, 2]))


@scenario("Another argument with numbers of nodes")
def other_node_numbers():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch, root_index):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0], [1]]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2]))


@scenario("The bounds of the graphs beside their nodes")
def bounds_of_graphs():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch, ptr):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0], [1]]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 4]))


@scenario("Another number of graphs")
def other_number_of_graphs():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch, num_graphs):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    model(torch.ones(4, 3), torch.tensor([[0], [1]]), torch.tensor([0, 0, 1, 1]), 3)


@scenario("As many nodes as edges")
def as_many_nodes_as_edges():
    class Net(nn.Module):
        def forward(self, x, edge_index, batch, weight):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    edges, graphs = torch.tensor([[0, 1, 0, 2], [1, 0, 0, 3]]), torch.tensor([0, 0, 1, 1])
    model(torch.ones(4, 3), edges, graphs, torch.ones(4))


@scenario("A cache whose layers have different batch sizes")
def uneven_cache():
    from transformers import DynamicCache

    class Net(nn.Module):
        def forward(self, x, cache):
            return x

    model = instep.DataParallel(Net(), ["cpu", "cpu"])
    cache = DynamicCache()
    cache.update(torch.ones(4, 2, 5, 8), torch.ones(4, 2, 5, 8), 0)
    cache.update(torch.ones(3, 2, 5, 8), torch.ones(3, 2, 5, 8), 1)
    model(torch.ones(4, 3), cache)
