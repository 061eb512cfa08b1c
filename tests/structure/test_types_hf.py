"""Values of transformers: cut, joined, and differentiated through both."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import instep
from instep.errors import MergeError, StructureError
from instep.structure import types_hf, types_torch
from instep.structure.tree import map_tensors, tensors_in

from .type_helpers import assert_same, kind_for, sizes_of_seven


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    types_torch.register_torch_types()
    types_hf.register_optional_types()


def test_installing_imports_no_optional_package() -> None:
    code = (
        "import sys; from instep.structure import types_hf; types_hf.register_optional_types();"
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


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_encodings_round_trip_with_their_tokens(tokenizer: Any, tensors: str | None, parts: int) -> None:
    value = tokenizer(TEXTS, padding=True, return_tensors=tensors)
    split = instep.split(value, parts)
    start = 0
    for part, size in zip(split, split.sizes, strict=True):
        assert type(part) is type(value)
        assert part.n_sequences == value.n_sequences
        assert [part.tokens(i) for i in range(size)] == [value.tokens(start + i) for i in range(size)]
        start += size
    merged = instep.merge(split)
    assert_same(merged.data, value.data)
    assert merged.encodings == value.encodings
    assert merged.n_sequences == value.n_sequences


def test_items_of_an_encoding_follow_the_rules_of_dictionaries(tokenizer: Any) -> None:
    value = tokenizer(TEXTS, padding=True, return_tensors="pt")
    value["scale"], value["bias"], value["name"] = torch.tensor(2.0), torch.zeros(1, 4), "texts"
    value["labels"] = [f"label {i}" for i in range(7)]
    value["targets"], value["sizes"] = list(range(7)), [224, 224]
    parts = instep.split(value, 2)
    assert parts[1]["scale"] is value["scale"]
    assert parts[1]["bias"] is value["bias"]
    assert parts[1]["labels"] == value["labels"][4:]
    assert (parts[1]["targets"], parts[1]["sizes"]) == ([4, 5, 6], [224, 224])
    assert_same(instep.merge(parts).data, value.data)
    value["pixel_values"] = torch.zeros(2, 3)
    with pytest.raises(StructureError, match="pixel_values"):
        instep.split(value, 2)


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


def reformer_cache() -> Any:
    """No subclass of `Cache`. A layer of local attention has no buckets."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        attn_layers=["local", "lsh"], hidden_size=8, num_attention_heads=2, attention_head_size=4, feed_forward_size=8,
        axial_pos_embds=False, max_position_embeddings=16, vocab_size=11, local_attn_chunk_length=4,
        lsh_attn_chunk_length=4, num_buckets=2, num_hashes=1, hash_seed=0, is_decoder=True,
    )  # fmt: skip
    model = transformers.ReformerModel(config).eval()
    return model(torch.randint(1, 11, (7, 8)), use_cache=True).past_buckets_states


CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": dynamic_cache,
    "static": static_cache,
    "sliding": sliding_cache,
    "encoder and decoder": encoder_decoder_cache,
    "lists": list_cache,
    "reformer": reformer_cache,
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
    assert kind.to_device is not None
    moved = kind.to_device(value, "meta")
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    assert {layer.device.type for layer in moved.layers} == {"meta"}
    assert {layer.device.type for layer in value.layers} == {"cpu"}
    assert {layer.dtype for layer in map_tensors(torch.Tensor.half, value).layers} == {torch.float16}


def test_parts_of_a_cache_have_counters_and_containers_of_their_own() -> None:
    value = static_cache()
    kind = kind_for(value)
    counts = [layer.cumulative_length for layer in value.layers]
    assert kind.to_device is not None
    for part in (*kind.split(value, (3, 4)), kind.to_device(value, "cpu")):
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


# What parts cannot be made one of


def hand_made(**attributes: Any) -> Any:
    """A cache of a class of the program's own, with these attributes beside one tensor of keys."""
    transformers = pytest.importorskip("transformers")

    class HandMade(transformers.Cache):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.keys = torch.zeros(2, 1, 3)
            vars(self).update(attributes)

    return HandMade()


def twins(one: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    first, second = hand_made(**one), hand_made(**other)
    second.__class__ = type(first)
    return [first, second]


UNJOINABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "types": (
        {"state": torch.zeros(2, 1, 3)},
        {"state": None},
        r"^HandMade\.state is of different types: \['Tensor', 'NoneType'\]$",
    ),
    "keys": (
        {"table": {"a": 1}},
        {"table": {"b": 1}},
        r"^HandMade\.table\.a is in the cache of part 0 and not in that of part 1$",
    ),
    "attributes": (
        {},
        {"state": torch.zeros(2, 1, 3)},
        r"^HandMade\.state is in the cache of part 1 and not in that of part 0$",
    ),
    "lengths of lists": (
        {"layers": [{"seen": [1, 2]}]},
        {"layers": [{"seen": [1]}]},
        r"^HandMade\.layers\.0\.seen\.1 is in the cache of part 0 and not in that of part 1$",
    ),
    "counters": (
        {"count": torch.tensor(3)},
        {"count": torch.tensor(4)},
        r"^HandMade\.count differs between the parts: \[3, 4\]$",
    ),
    "settings": (
        {"layers": [{"step": 5}]},
        {"layers": [{"step": 6}]},
        r"^HandMade\.layers\.0\.step differs between the parts: \[5, 6\]$",
    ),
    "lengths of tensors": (
        {"values": torch.zeros(2, 1, 3)},
        {"values": torch.zeros(2, 1, 4)},
        r"^HandMade\.values has different lengths .*\(2, 1, 3\), \(2, 1, 4\).*pad the inputs to one length, or "
        r"leave the cache out of the outputs$",
    ),
    "quantized": (
        {"_quantized_keys": torch.zeros(2, 1, 3)},
        {"_quantized_keys": torch.zeros(2, 1, 3)},
        r"^a quantized HandMade \(_quantized_keys\) can be neither split nor merged; use a DynamicCache$",
    ),
}


@pytest.mark.parametrize(("one", "other", "message"), UNJOINABLE.values(), ids=UNJOINABLE.keys())
def test_parts_of_a_cache_that_do_not_fit_each_other(one: dict[str, Any], other: dict[str, Any], message: str) -> None:
    parts = twins(one, other)
    with pytest.raises(MergeError, match=message):
        kind_for(parts[0]).merge(parts)


def test_a_cache_of_batches_of_different_sizes_is_not_split() -> None:
    value = hand_made(values=torch.zeros(3, 1, 3))
    with pytest.raises(
        StructureError,
        match=r"a HandMade holds batches of different sizes \(2 samples in keys, 3 samples in values\); fill every",
    ):
        kind_for(value).size(value)


def test_a_quantized_cache_is_not_split() -> None:
    value = hand_made(_quantized_values=torch.zeros(2, 1, 3))
    with pytest.raises(
        StructureError, match=r"a quantized HandMade \(_quantized_values\) can be neither split nor merged"
    ):
        kind_for(value).split(value, (1, 1))
