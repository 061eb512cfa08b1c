"""`transformers.Trainer` with a wrapped model: the log history, predictions and checkpoints of the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import instep

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier() -> nn.Module:
    return BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES, **NO_DROPOUT))


def causal_lm() -> nn.Module:
    """Its output layer and its embedding share one weight."""
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config)


def masked_lm() -> nn.Module:
    return BertForMaskedLM(BertConfig(vocab_size=50, **SIZES, **NO_DROPOUT))


def lora() -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(causal_lm(), config)


def translator() -> Any:
    config = T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def labeled(count: int = 22) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 50, (count, 7), generator=generator)
    return [{"input_ids": row, "labels": torch.tensor(i % 2), "idx": i} for i, row in enumerate(rows)]


def tokens(count: int = 22) -> list[dict[str, Any]]:
    """The labels of each sample have another number of ignored tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 50, (count, 9), generator=generator)
    labels = [row.masked_fill(torch.arange(9) >= 9 - i % 6, -100) for i, row in enumerate(rows)]
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


class Run:
    """One training run: what the trainer logged and what the model predicts."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[], nn.Module],
        data: list[dict[str, Any]],
        engine: str | None,
        *,
        n_gpu: int = 1,
        resume_from: Path | None = None,
        compute_loss_func: Any = None,
        classes: tuple[Any, Any] = (Trainer, TrainingArguments),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.module = make()
        self.model: Any = (
            self.module if engine is None else instep.DataParallel(self.module, ["cpu"] * 2, engine=engine)
        )
        settings = {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 6,
            "per_device_eval_batch_size": 6,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            **options,
        }
        trainer, arguments = classes
        arguments = arguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **settings)
        arguments._n_gpu = n_gpu
        self.trainer = trainer(
            self.model, arguments, train_dataset=data, eval_dataset=data, compute_loss_func=compute_loss_func
        )
        self.trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        self.predictions = torch.as_tensor(self.trainer.predict(data).predictions)
        if engine is not None:
            self.model.close()

    @property
    def history(self) -> list[dict[str, float]]:
        """The logged numbers, without durations."""
        kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step")
        return [{name: entry[name] for name in kept if name in entry} for entry in self.trainer.state.log_history]


def assert_same(plain: Run, wrapped: Run, tolerance: float = 1e-5) -> None:
    assert [entry.keys() for entry in plain.history] == [entry.keys() for entry in wrapped.history]
    for expected, actual in zip(plain.history, wrapped.history, strict=True):
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(wrapped.predictions, plain.predictions, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "data", "engine"),
    [
        pytest.param(classifier, labeled(), "threads", id="cls-threads"),
        pytest.param(classifier, labeled(), "processes", id="cls-processes", marks=pytest.mark.slow),
        pytest.param(causal_lm, tokens(), "threads", id="clm-threads"),
        pytest.param(causal_lm, tokens(), "processes", id="clm-processes", marks=pytest.mark.slow),
        pytest.param(masked_lm, tokens(), "threads", id="mlm-threads", marks=pytest.mark.slow),
        pytest.param(masked_lm, tokens(), "processes", id="mlm-processes", marks=pytest.mark.slow),
    ],
)
def test_training_logs_the_same_history(
    make: Callable[[], nn.Module], data: list[dict[str, Any]], engine: str, tmp_path: Path
) -> None:
    assert_same(Run(tmp_path / "plain", make, data, None), Run(tmp_path / "wrapped", make, data, engine))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing", marks=pytest.mark.slow),
        pytest.param({"label_smoothing_factor": 0.1}, id="smoothing", marks=pytest.mark.slow),
        pytest.param(
            {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
            id="clipping",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"eval_accumulation_steps": 1, "dataloader_drop_last": True}, id="evaluation", marks=pytest.mark.slow
        ),
    ],
)
def test_options_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", causal_lm, tokens(), None, **options)
    assert_same(plain, Run(tmp_path / "wrapped", causal_lm, tokens(), "threads", **options))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # of a CPU without bf16
def test_bf16(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", classifier, labeled(), None, bf16=True)
    assert_same(plain, Run(tmp_path / "wrapped", classifier, labeled(), "threads", bf16=True), tolerance=2e-2)


def test_a_trainer_that_sees_two_gpus_does_not_wrap_the_model_again(tmp_path: Path) -> None:
    """It would divide `num_items_in_batch` by the number of GPUs, and multiply the loss by it."""
    plain = Run(tmp_path / "plain", causal_lm, tokens(), None)
    wrapped = Run(tmp_path / "wrapped", causal_lm, tokens(), "threads", n_gpu=2)
    assert_same(plain, wrapped)
    assert wrapped.trainer.model_wrapped is wrapped.model


def test_save_and_resume(tmp_path: Path) -> None:
    """A checkpoint of a wrapped model is one of the plain model, and training goes on from it."""
    options = {"save_strategy": "epoch"}
    plain = Run(tmp_path / "plain", causal_lm, tokens(), None, **options)
    wrapped = Run(tmp_path / "wrapped", causal_lm, tokens(), "threads", **options)
    assert_same(plain, wrapped)
    folder = tmp_path / "wrapped" / "checkpoint-4"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    for resumed in (tmp_path / "plain" / "checkpoint-4", folder):
        again = Run(tmp_path / "again", causal_lm, tokens(), "threads", resume_from=resumed, **options)
        torch.testing.assert_close(again.predictions, plain.predictions, rtol=1e-5, atol=1e-5)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "wrapped" / "checkpoint-8")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, value in wrapped.module.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value)


def mean_over_samples(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the user, outside of the model."""
    losses = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum() / num_items_in_batch if num_items_in_batch is not None else losses.mean()


@pytest.mark.parametrize("n_gpu", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loss_function_of_the_user(n_gpu: int, tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", causal_lm, tokens(), None, compute_loss_func=mean_over_samples)
    options = {"compute_loss_func": mean_over_samples, "n_gpu": n_gpu}
    assert_same(plain, Run(tmp_path / "wrapped", causal_lm, tokens(), "threads", **options))


@pytest.mark.parametrize("engine", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_peft_model(engine: str, tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", lora, tokens(), None, save_strategy="epoch", label_names=["labels"])
    wrapped = Run(tmp_path / "wrapped", lora, tokens(), engine, save_strategy="epoch", label_names=["labels"])
    assert_same(plain, wrapped)
    assert (tmp_path / "wrapped" / "checkpoint-8" / "adapter_model.safetensors").exists()
    loaded: Any = PeftModel.from_pretrained(causal_lm(), tmp_path / "wrapped" / "checkpoint-8")
    for name, value in wrapped.module.state_dict().items():
        if "lora_" in name:
            torch.testing.assert_close(loaded.state_dict()[name], value)


@pytest.mark.parametrize("engine", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_generation_in_evaluation(engine: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "classes": (Seq2SeqTrainer, Seq2SeqTrainingArguments),
        "predict_with_generate": True,
        "generation_max_length": 6,
        "generation_num_beams": 2,
        "num_train_epochs": 1,
    }
    plain = Run(tmp_path / "plain", translator, tokens(9), None, **options)
    assert_same(plain, Run(tmp_path / "wrapped", translator, tokens(9), engine, **options))
