"""Small models of the transformers library: losses, outputs and weights equal the plain module's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

transformers = pytest.importorskip("transformers")

# The library warns about these small configurations.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

B, T, WORDS = 5, 6, 30
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
Batch = dict[str, Tensor]


def ids(length: int = T) -> Tensor:
    return torch.randint(3, WORDS, (B, length))


def mask(length: int = T) -> Tensor:
    """A mask with a different length per sample, so that shards have different numbers of valid tokens."""
    return (torch.arange(length) < torch.tensor([length, 2, length - 1, 3, 2])[:B, None]).long()


def padded(labels: Tensor, kept: Tensor) -> Tensor:
    return labels.masked_fill(kept == 0, -100)


def bert() -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=T, **SMALL, **NO_DROPOUT)
    words, kept = ids(), mask()
    batch = {"input_ids": words, "attention_mask": kept, "labels": padded(words, kept)}
    return transformers.BertForMaskedLM(config), batch


def bert_classifier() -> tuple[nn.Module, Batch]:
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=T, num_labels=3, **SMALL, **NO_DROPOUT)
    batch = {"input_ids": ids(), "attention_mask": mask(), "labels": torch.randint(3, (B,))}
    return transformers.BertForSequenceClassification(config), batch


def gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=T,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    words, kept = ids(), mask()
    batch = {"input_ids": words, "attention_mask": kept, "labels": padded(words, kept)}
    return transformers.GPT2LMHeadModel(config), batch


def t5() -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    kept = mask(4)
    batch = {"input_ids": ids(), "attention_mask": mask(), "labels": padded(ids(4), kept)}
    return transformers.T5ForConditionalGeneration(config), batch


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=3, num_labels=4, **SMALL, **NO_DROPOUT)
    batch = {"pixel_values": torch.randn(B, 3, 8, 8), "labels": torch.randint(4, (B,))}
    return transformers.ViTForImageClassification(config), batch


def whisper() -> tuple[nn.Module, Batch]:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=8,
        max_target_positions=8,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    batch = {"input_features": torch.randn(B, 8, 16), "labels": padded(ids(4), mask(4))}
    return transformers.WhisperForConditionalGeneration(config), batch


MODELS: list[Callable[[], tuple[nn.Module, Batch]]] = [bert, bert_classifier, gpt2, t5, vit, whisper]


def double(batch: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@pytest.mark.parametrize("engine", [pytest.param("serial", marks=pytest.mark.slow), "threads", "processes"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_training_equals_the_plain_models(make: Callable[[], tuple[Any, Batch]], engine: str) -> None:
    plain, batch = make()
    plain, batch = plain.double(), double(batch)
    net = copy.deepcopy(plain)
    theirs, ours = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, net))
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for size in (B, B, 3):
            shorter = {name: value[:size] for name, value in batch.items()}
            outputs = []
            for module, optimizer in ((plain, theirs), (model, ours)):
                optimizer.zero_grad()
                output = module(**shorter)
                output.loss.backward()
                optimizer.step()
                outputs.append(output)
            expected, got = outputs
            assert type(got) is type(expected)
            # Some of these models always compute their loss in float32.
            torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-6)
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_attentions_hidden_states_and_caches_are_merged(engine: str) -> None:
    plain, batch = gpt2()
    batch.pop("labels")
    options = {"output_attentions": True, "output_hidden_states": True, "use_cache": True}
    plain.set_attn_implementation("eager")  # type: ignore[operator]
    with instep.DataParallel(plain, ["cpu"] * 2, engine=engine) as model, torch.no_grad():
        got, expected = model.eval()(**batch, **options), plain.eval()(**batch, **options)
    for name in ("hidden_states", "attentions"):
        for mine, other in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(mine, other)
    assert type(got.past_key_values) is type(expected.past_key_values)
    assert got.past_key_values.get_seq_length() == T
