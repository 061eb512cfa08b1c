"""Values of transformers, tensordict and torch_geometric: cut, joined, and differentiated through both."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from instep.errors import MergeError, StructureError
from instep.structure import optional_kinds, torch_kinds
from instep.structure.cache_kind import CACHE
from instep.structure.tree import map_tensors, tensors_in
from instep.structure.types import Kind, kind_of

SIZES = [(3, 2, 2), (7,), (1,) * 7, (1, 6)]
sizes_of_seven = pytest.mark.parametrize("sizes", SIZES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    torch_kinds.install()
    optional_kinds.install()


def kind_for(value: Any) -> Kind:
    kind = kind_of(type(value))
    assert kind is not None
    return kind


def assert_same(one: Any, other: Any) -> None:
    """Equal in type, in every tensor and in every other leaf, through objects, lists and dictionaries."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif kind_of(type(one)) is CACHE or type(one).__module__ == "transformers.cache_utils":
        assert_same(vars(one), vars(other))
    else:
        assert one == other


def test_installing_imports_no_optional_package() -> None:
    code = (
        "import sys; from instep.structure import optional_kinds; optional_kinds.install();"
        "print([name for name in ('transformers', 'tensordict', 'torch_geometric') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.strip() == "[]"


# Hugging Face encodings


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c", "d"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")


TEXTS = ["a", "a b", "c d a", "b", "d d d d", "a c", "c"]


@sizes_of_seven
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_encodings_round_trip_with_what_the_tokenizer_knows(
    tokenizer: Any, tensors: str | None, sizes: tuple[int, ...]
) -> None:
    value = tokenizer(TEXTS, padding=True, return_tensors=tensors)
    kind = kind_for(value)
    assert kind.size(value) == 7
    parts = kind.split(value, sizes)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        assert type(part) is type(value)
        assert kind.size(part) == size
        assert part.n_sequences == value.n_sequences
        assert [part.tokens(i) for i in range(size)] == [value.tokens(start + i) for i in range(size)]
        start += size
    merged = kind.merge(parts)
    assert_same(merged.data, value.data)
    assert merged.encodings == value.encodings
    assert merged.n_sequences == value.n_sequences


def test_an_encoding_of_one_text_without_tensors_is_not_a_batch(tokenizer: Any) -> None:
    value = tokenizer("a b c")
    assert kind_for(value).size(value) is None


def test_items_of_an_encoding_that_belong_to_no_sample_stay_whole(tokenizer: Any) -> None:
    value = tokenizer(TEXTS, padding=True, return_tensors="pt")
    value["scale"], value["bias"], value["name"] = torch.tensor(2.0), torch.zeros(1, 4), "texts"
    value["labels"] = [f"label {i}" for i in range(7)]
    value["targets"], value["sizes"] = list(range(7)), [224, 224]
    kind = kind_for(value)
    parts = kind.split(value, (3, 4))
    assert parts[1]["scale"] is value["scale"]
    assert parts[1]["bias"] is value["bias"]
    assert parts[1]["labels"] == value["labels"][3:]
    assert (parts[1]["targets"], parts[1]["sizes"]) == ([3, 4, 5, 6], [224, 224])
    assert_same(kind.merge(parts).data, value.data)
    value["pixel_values"] = torch.zeros(2, 3)
    with pytest.raises(StructureError, match="pixel_values"):
        kind.size(value)


def test_mapping_an_encoding_leaves_it_alone(tokenizer: Any) -> None:
    value = tokenizer(TEXTS, padding=True, return_tensors="pt")
    before = dict(value.data)
    new = map_tensors(lambda tensor: tensor + 1, value)
    assert new.data is not value.data
    assert all(value[key] is before[key] for key in before)
    assert torch.equal(new["input_ids"], value["input_ids"] + 1)
    assert new.encodings == value.encodings


# Hugging Face caches


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    return transformers.GPT2LMHeadModel(config).double().eval()


def dynamic_cache() -> Any:
    return gpt2()(torch.randint(0, 11, (7, 5)), use_cache=True).past_key_values


def static_cache() -> Any:
    transformers = pytest.importorskip("transformers")
    model = gpt2()
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(torch.randint(0, 11, (7, 5)), past_key_values=cache, use_cache=True)
    return cache


def sliding_cache() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=8, intermediate_size=8,
        vocab_size=11, sliding_window=4,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    return model(torch.randint(0, 11, (7, 6)), use_cache=True).past_key_values


def encoder_decoder_cache() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=11, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(0, 11, (7, 5))
    return model(input_ids=ids, decoder_input_ids=ids[:, :3], use_cache=True).past_key_values


def list_cache() -> Any:
    """The layout of older releases: a list of keys and a list of values, with gaps for layers that have none."""
    transformers = pytest.importorskip("transformers")

    class ListCache(transformers.Cache):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.key_cache = [torch.randn(7, 2, 5, 4, requires_grad=True), [], torch.randn(7, 2, 5, 4)]
            self.value_cache = [torch.randn(7, 2, 5, 4), torch.tensor([]), torch.randn(7, 2, 5, 4)]
            self._seen_tokens = 5
            self.flags = torch.tensor([True] * 7)

    return ListCache()


CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": dynamic_cache,
    "static": static_cache,
    "sliding": sliding_cache,
    "encoder and decoder": encoder_decoder_cache,
    "lists": list_cache,
}


@sizes_of_seven
@pytest.mark.parametrize("name", CACHES)
def test_caches_round_trip(name: str, sizes: tuple[int, ...]) -> None:
    value = CACHES[name]()
    kind = kind_for(value)
    assert kind.size(value) == 7
    parts = kind.split(value, sizes)
    assert [kind.size(part) for part in parts] == list(sizes)
    assert all(type(part) is type(value) for part in parts)
    assert_same(kind.merge(parts), value)


@sizes_of_seven
@pytest.mark.parametrize("static", [False, True])
def test_decoding_over_parts_of_a_cache_goes_on_as_over_the_whole(static: bool, sizes: tuple[int, ...]) -> None:
    model = gpt2()
    transformers = pytest.importorskip("transformers")
    cache = transformers.StaticCache(config=model.config, max_cache_len=12) if static else None
    ids, step = torch.randint(0, 11, (7, 5)), torch.randint(0, 11, (7, 1))
    with torch.no_grad():
        cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
        kind = kind_for(cache)
        parts = kind.split(copy.deepcopy(cache), sizes)
        whole = model(step, past_key_values=cache, use_cache=True)
        outs = [model(some, past_key_values=part) for some, part in zip(step.split(list(sizes)), parts, strict=True)]
    torch.testing.assert_close(torch.cat([out.logits for out in outs]), whole.logits)
    merged = kind.merge([out.past_key_values for out in outs])
    assert int(merged.get_seq_length()) == 6
    torch.testing.assert_close(list(tensors_in(merged)), list(tensors_in(whole.past_key_values)))


@sizes_of_seven
def test_gradients_pass_through_a_cache(sizes: tuple[int, ...]) -> None:
    model = gpt2()
    ids, step = torch.randint(0, 11, (7, 5)), torch.randint(0, 11, (7, 1))

    def grads(whole: bool) -> tuple[Tensor, ...]:
        cache = model(ids, use_cache=True).past_key_values
        if not whole:
            kind = kind_for(cache)
            cache = kind.merge(kind.split(cache, sizes))
        loss = model(step, past_key_values=cache).logits.square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    torch.testing.assert_close(grads(whole=False), grads(whole=True))


@pytest.mark.parametrize("name", CACHES)
def test_mapping_a_cache_leaves_it_alone(name: str) -> None:
    value = CACHES[name]()
    before = list(tensors_in(value))
    new = map_tensors(lambda tensor: tensor.detach() + 1, value)
    assert type(new) is type(value)
    assert all(one is two for one, two in zip(tensors_in(value), before, strict=True))
    torch.testing.assert_close(list(tensors_in(new)), [tensor.detach() + 1 for tensor in before])


def test_a_layer_knows_where_its_tensors_were_moved() -> None:
    value = dynamic_cache()
    kind = kind_for(value)
    assert kind.move is not None
    moved = kind.move(value, "meta")
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    assert {layer.device.type for layer in moved.layers} == {"meta"}
    assert {layer.device.type for layer in value.layers} == {"cpu"}
    assert {layer.dtype for layer in map_tensors(torch.Tensor.half, value).layers} == {torch.float16}


def test_parts_of_a_cache_have_counters_and_containers_of_their_own() -> None:
    value = static_cache()
    kind = kind_for(value)
    counts = [layer.cumulative_length for layer in value.layers]
    assert kind.move is not None
    for part in (*kind.split(value, (3, 4)), kind.move(value, "cpu")):
        assert part.layers is not value.layers
        for layer, count in zip(part.layers, counts, strict=True):
            layer.cumulative_length.add_(1)
            assert int(count) == 5


def test_empty_caches_are_not_batches() -> None:
    transformers = pytest.importorskip("transformers")
    for value in (
        transformers.DynamicCache(),
        transformers.StaticCache(config=gpt2().config, max_cache_len=4),
        transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache()),
    ):
        assert kind_for(value).size(value) is None


def test_caches_of_different_lengths_are_not_joined() -> None:
    model = gpt2()
    parts = [model(torch.randint(0, 11, (2, n)), use_cache=True).past_key_values for n in (3, 4)]
    with pytest.raises(MergeError, match="keys has different lengths"):
        kind_for(parts[0]).merge(parts)


# TensorDict


def tensor_dict(device: str | None = None) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict(
        {
            "x": torch.randn(7, 3, requires_grad=True),
            "inner": {"y": torch.arange(7), "z": torch.randn(7, 2, 2).half()},
            "name": "seven",
        },
        batch_size=[7],
        device=device,
    )


def tensor_class() -> Any:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Sample:
        x: Tensor
        name: str

    return Sample(x=torch.randn(7, 3, requires_grad=True), name="seven", batch_size=[7])


@sizes_of_seven
@pytest.mark.parametrize("make", [tensor_dict, tensor_class])
def test_tensor_dicts_round_trip_and_are_differentiable(make: Callable[[], Any], sizes: tuple[int, ...]) -> None:
    value = make()
    kind = kind_for(value)
    assert kind.size(value) == 7
    parts = kind.split(value, sizes)
    assert [kind.size(part) for part in parts] == list(sizes)
    merged = kind.merge(parts)
    assert type(merged) is type(value)
    assert merged.batch_size == value.batch_size
    assert (merged["name"] if make is tensor_dict else merged.name) == "seven"
    for one, other in zip(tensors_in(merged), tensors_in(value), strict=True):
        assert_same(one, other)
    wanted = torch.autograd.grad(value.get("x").square().sum(), value.get("x"))
    found = torch.autograd.grad(merged.get("x").square().sum(), value.get("x"))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_mapping_a_tensor_dict_leaves_it_alone(device: str | None) -> None:
    value = tensor_dict(device)
    new = map_tensors(lambda tensor: tensor.detach().to("meta"), value)
    assert type(new) is type(value)
    assert (new.device, value.device) == (
        (None, None) if device is None else (torch.device("meta"), torch.device("cpu"))
    )
    assert {tensor.device.type for tensor in tensors_in(value)} == {"cpu"}
    assert [tensor.device.type for tensor in tensors_in(new)] == ["meta"] * 3
    assert new["name"] == "seven"


def test_a_tensor_class_is_mapped_and_a_tensor_dict_without_batch_is_not_one() -> None:
    value = tensor_class()
    new = map_tensors(lambda tensor: tensor * 2, value)
    assert type(new) is type(value)
    torch.testing.assert_close(new.x, value.x * 2)
    empty = pytest.importorskip("tensordict").TensorDict({"x": torch.zeros(3)}, batch_size=[])
    assert kind_for(empty).size(empty) is None


# PyTorch Geometric


def graphs(count: int = 7, x: bool = True) -> list[Any]:
    data = pytest.importorskip("torch_geometric.data")
    found = []
    for i in range(count):
        nodes, edges = 1 + i % 4, 2 + i % 3
        graph = data.Data(edge_index=torch.randint(0, nodes, (2, edges)), edge_attr=torch.randn(edges, 2), y=float(i))
        if x:
            graph.x = torch.randn(nodes, 3, dtype=torch.float64)
        else:
            graph.num_nodes = nodes
        graph.name = f"graph {i}"
        graph.table = torch.randn(1, 4)
        graph.levels = [torch.randn(2), torch.randn(i + 1, 2)]
        graph.extra = {"some": torch.randn(nodes), "some_index": torch.randint(0, nodes, (3,))}
        found.append(graph)
    return found


def homogeneous() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list(graphs(), follow_batch=["edge_attr", "levels", "extra"])


def without_features() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list(graphs(x=False))


def by_pointers_only() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    found = graphs()
    for graph in found:
        graph.node_h = graph.x
        del graph.x, graph.extra
        nodes = len(graph.node_h)
        graph.edge_index = torch.stack([torch.arange(nodes), torch.arange(nodes)])
        graph.edge_attr = torch.randn(nodes, 2)
    return data.Batch.from_data_list(found)


def heterogeneous() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    found = []
    for i in range(7):
        graph = data.HeteroData()
        graph["user"].x = torch.randn(i + 1, 3)
        graph["item"].x = torch.randn(2, 3)
        graph["user", "likes", "item"].edge_index = torch.stack(
            [torch.randint(0, i + 1, (i + 2,)), torch.randint(0, 2, (i + 2,))]
        )
        graph["user", "likes", "item"].edge_attr = torch.randn(i + 2, 1)
        graph.y = torch.tensor([i])
        found.append(graph)
    return data.Batch.from_data_list(found)


def pairs() -> Any:
    """A class with rules of its own for what is concatenated and raised."""
    data = pytest.importorskip("torch_geometric.data")

    class Pair(data.Data):  # type: ignore[misc, name-defined]
        def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            if key == "edge_index":
                return torch.tensor([[self.left.size(0)], [self.right.size(0)]])
            return super().__inc__(key, value, *args, **kwargs)

        def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return None if key == "image" else super().__cat_dim__(key, value, *args, **kwargs)

    found = []
    for i in range(7):
        edges = torch.stack([torch.randint(0, i + 1, (3,)), torch.randint(0, 2, (3,))])
        pair = Pair(left=torch.randn(i + 1, 2), right=torch.randn(2, 2), edge_index=edges, image=torch.randn(2, 2))
        pair.num_nodes = i + 3
        found.append(pair)
    return data.Batch.from_data_list(found)


BATCHES: dict[str, Callable[[], Any]] = {
    "homogeneous": homogeneous,
    "without features": without_features,
    "by pointers only": by_pointers_only,
    "heterogeneous": heterogeneous,
    "pairs": pairs,
}


def assert_batches_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.num_graphs == other.num_graphs
    for left, right in zip(one.stores, other.stores, strict=True):
        assert left._key == right._key
        assert_same(dict(left.items()), dict(right.items()))
        assert vars(left).get("_num_nodes") == vars(right).get("_num_nodes")
    assert_same(one._slice_dict, other._slice_dict)
    assert_same(one._inc_dict, other._inc_dict)


@sizes_of_seven
@pytest.mark.parametrize("name", BATCHES)
def test_parts_of_a_batch_of_graphs_are_what_batching_them_alone_gives(name: str, sizes: tuple[int, ...]) -> None:
    data = pytest.importorskip("torch_geometric.data")
    value = BATCHES[name]()
    kind = kind_for(value)
    assert kind.size(value) == 7
    follow = [key.removesuffix("_ptr") for key in value.keys() if key.endswith("_ptr")]  # noqa: SIM118
    examples = value.to_data_list()
    parts = kind.split(value, sizes)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        wanted = data.Batch.from_data_list(examples[start : start + size], follow_batch=follow)
        assert_batches_equal(part, wanted)
        start += size
    assert_batches_equal(kind.merge(parts), value)


@sizes_of_seven
def test_a_graph_network_over_parts_gives_outputs_and_gradients_of_the_whole(sizes: tuple[int, ...]) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    conv = geometric.GCNConv(3, 4).double()
    value = homogeneous()
    value.x.requires_grad_()
    kind = kind_for(value)

    def forward(batch: Any) -> Tensor:
        out: Tensor = geometric.global_mean_pool(conv(batch.x, batch.edge_index), batch.batch, batch.num_graphs)
        return out

    def grads(out: Tensor) -> tuple[Tensor, ...]:
        weights = torch.arange(1.0, out.numel() + 1).reshape(out.shape)
        return torch.autograd.grad((out * weights).sum(), [value.x, *conv.parameters()])

    whole = forward(value)
    found = torch.cat([forward(part) for part in kind.split(value, sizes)])
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(grads(found), grads(whole))


def test_attributes_added_after_batching_follow_nodes_edges_or_graphs() -> None:
    value = homogeneous()
    nodes, edges = value.num_nodes, value.num_edges
    value.h, value.w, value.g = torch.randn(nodes, 2), torch.randn(edges), torch.randn(7, 5)
    value.scale, value.note = torch.tensor(3.0), "a note"
    kind = kind_for(value)
    first, second = kind.split(value, (3, 4))
    assert (len(first.h), len(first.w), len(first.g)) == (first.num_nodes, first.num_edges, 3)
    assert second.scale is value.scale
    assert_batches_equal(kind.merge([first, second]), value)
    value.lost = torch.zeros(nodes + edges + 1)
    with pytest.raises(StructureError, match="lost"):
        kind.split(value, (3, 4))
    del value.lost
    value.edge_index = value.edge_index[:, :-1]
    with pytest.raises(StructureError, match="edge_index"):
        kind.split(value, (3, 4))


def test_graphs_and_batches_are_mapped_into_new_ones() -> None:
    graph, batch = graphs(1)[0], homogeneous()
    assert kind_for(graph).size(graph) is None
    for value in (graph, batch, heterogeneous()):
        before = list(tensors_in(value))
        new = map_tensors(lambda tensor: tensor + 1, value)
        assert type(new) is type(value)
        assert all(one is two for one, two in zip(tensors_in(value), before, strict=True))
        torch.testing.assert_close(list(tensors_in(new)), [tensor + 1 for tensor in before])
    assert kind_for(batch).size(map_tensors(lambda tensor: tensor, batch)) == 7


def test_one_graph_is_neither_split_nor_joined() -> None:
    graph = graphs(1)[0]
    with pytest.raises(StructureError, match="from_data_list"):
        kind_for(graph).split(graph, (1,))
    with pytest.raises(MergeError, match="Batch"):
        kind_for(graph).merge([graph])


def test_a_batch_of_unknown_origin_says_what_to_write() -> None:
    data = pytest.importorskip("torch_geometric.data")
    value = data.Batch(x=torch.zeros(3, 1), batch=torch.tensor([0, 0, 1]))
    with pytest.raises(StructureError, match="from_data_list"):
        kind_for(value).size(value)
    value.ptr = torch.tensor([0, 2, 3])
    assert kind_for(value).size(value) == 2
    with pytest.raises(StructureError, match="from_data_list"):
        kind_for(value).split(value, (1, 1))


def test_modules_are_left_alone() -> None:
    assert kind_of(nn.Linear) is None
