"""accelerate, Lightning, peft and torchmetrics with a wrapped module, against the plain one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import instep

ENGINES = ["threads", pytest.param("processes", marks=pytest.mark.slow)]
no_bf16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # of a CPU without bf16


def wrap(module: nn.Module, engine: str, **options: Any) -> Any:
    return instep.DataParallel(module, ["cpu"] * 2, engine=engine, **options)


def network() -> nn.Module:
    """Without a bias before the batch norm: its gradient is rounding error, which AdamW would turn into steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(22, 6, generator=generator), torch.randint(0, 3, (22,), generator=generator))


def batches() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=6)


def assert_same_state(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    states = actual.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=tolerance, atol=tolerance)


# accelerate


@pytest.fixture(autouse=True)
def new_accelerator_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def train_with_accelerate(module: nn.Module, precision: str) -> tuple[Accelerator, Any, list[float]]:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer, loader = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), 1e-2), batches())
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return accelerator, model, losses


@no_bf16
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_accelerate_prepares_a_wrapped_model(engine: str, precision: str) -> None:
    tolerance = 1e-5 if precision == "no" else 2e-2
    expected, module = network(), network()
    _, _, losses = train_with_accelerate(expected, precision)
    with wrap(module, engine) as wrapped:
        accelerator, model, actual = train_with_accelerate(wrapped, precision)
        assert actual == pytest.approx(losses, rel=tolerance)
        assert_same_state(model, expected, tolerance)
        assert accelerator.unwrap_model(model) is module
        outputs = model(torch.zeros(4, 6))
        assert outputs.dtype == torch.float32  # accelerate converts the outputs of its autocast region


def test_accelerate_accumulates_gradients() -> None:
    def run(model: nn.Module) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batches())
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    expected, module = network(), network()
    run(expected)
    with wrap(module, "threads") as wrapped:
        run(wrapped)
    assert_same_state(module, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_accelerate_saves_and_loads_the_state_of_training(engine: str, tmp_path: Any) -> None:
    """A state that was saved with a wrapped model is that of the plain one, and the other way round."""

    def prepare(module: nn.Module) -> Any:
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(module, torch.optim.AdamW(module.parameters(), 1e-2))

    def step(model: Any, optimizer: Any, count: int) -> None:
        for inputs, targets in list(batches())[:count]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    expected = network()
    accelerator, model, optimizer = prepare(expected)
    step(model, optimizer, 2)
    accelerator.save_state(tmp_path / "plain")
    with wrap(network(), engine) as wrapped:
        accelerator, model, optimizer = prepare(wrapped)
        step(model, optimizer, 2)
        accelerator.save_state(tmp_path / "wrapped")
        assert_same_state(accelerator.unwrap_model(model), expected)
    for source in ("plain", "wrapped"):
        module = network()
        with wrap(module, engine) as wrapped:
            accelerator, model, optimizer = prepare(wrapped)
            step(model, optimizer, 4)
            accelerator.load_state(tmp_path / source)
            assert_same_state(module, expected)
    accelerator, plain, optimizer = prepare(network())
    accelerator.load_state(tmp_path / "wrapped")
    assert_same_state(plain, expected)


# Lightning


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_lightning_trains_a_module_that_holds_a_wrapped_network(engine: str, tmp_path: Any) -> None:
    def fit(net: nn.Module) -> tuple[Classifier, Any]:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=True,
        )
        module = Classifier(net)
        trainer.fit(module, batches(), batches())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module, trainer.callback_metrics

    expected, metrics = fit(network())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    with wrap(network(), engine) as wrapped:
        actual, wrapped_metrics = fit(wrapped)
        assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
        assert wrapped_metrics["accuracy"] == metrics["accuracy"]
        assert torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"].keys() == saved.keys()
        assert_same_state(actual, expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@no_bf16
def test_fabric_sets_up_a_wrapped_model(precision: Any) -> None:
    def run(module: nn.Module) -> tuple[Any, list[float]]:
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
        losses = []
        for inputs, targets in fabric.setup_dataloaders(batches()):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return model, losses

    tolerance = 1e-5 if precision == "32-true" else 2e-2
    expected = network()
    _, losses = run(expected)
    with wrap(network(), "threads") as wrapped:
        model, actual = run(wrapped)
        assert actual == pytest.approx(losses, rel=tolerance)
        assert_same_state(model, expected, tolerance)


# peft


def lora(module: nn.Module) -> Any:
    torch.manual_seed(3)
    return get_peft_model(module, LoraConfig(target_modules=["0", "3"], r=2, lora_dropout=0.0, init_lora_weights=False))


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("engine", ENGINES)
def test_lora_before_wrapping(engine: str, tmp_path: Any) -> None:
    expected, module = lora(network()), lora(network())
    losses = train(expected)
    with wrap(module, engine) as model:
        assert train(model) == pytest.approx(losses, rel=1e-5)
        assert_same_state(model, expected)
        assert model.peft_config.keys() == {"default"}
        model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(network(), tmp_path)
    loaded.base_model.model[1].load_state_dict(module.base_model.model[1].state_dict())
    x = torch.randn(5, 6)
    torch.testing.assert_close(loaded.eval()(x), module.eval()(x))


@pytest.mark.parametrize("engine", ENGINES)
def test_lora_after_wrapping(engine: str) -> None:
    expected = lora(network())
    losses = train(expected)
    with wrap(network(), engine) as wrapped:
        model = lora(wrapped)
        assert train(model) == pytest.approx(losses, rel=1e-5)
        assert_same_state(model, expected)


# torchmetrics


class Measured(nn.Module):
    """Updates a metric inside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.net(inputs)
        self.accuracy.update(logits, targets)
        self.mean.update(logits)
        return logits


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_inside_of_forward(engine: str) -> None:
    expected, module = Measured(), Measured()
    rules = {"accuracy.*": "sum", "mean.*": "sum"}
    with wrap(module, engine, state=rules) as model:
        for inputs, targets in batches():
            torch.testing.assert_close(model(inputs, targets), expected(inputs, targets))
        torch.testing.assert_close(model.accuracy.compute(), expected.accuracy.compute())
        torch.testing.assert_close(model.mean.compute(), expected.mean.compute())


def test_metrics_outside_of_forward() -> None:
    metric, other = (torchmetrics.Accuracy("multiclass", num_classes=3) for _ in range(2))
    expected = network().eval()
    with wrap(network().eval(), "threads") as model:
        for inputs, targets in batches():
            metric.update(model(inputs), targets)
            other.update(expected(inputs), targets)
    assert metric.compute() == other.compute()


# torch's own tools


@pytest.mark.parametrize("engine", ENGINES)
def test_averaged_model(engine: str) -> None:
    def run(module: nn.Module) -> Any:
        averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)
        for inputs, targets in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            averaged.update_parameters(module)
        return averaged.eval()

    expected = run(network())
    with wrap(network(), engine) as model:
        averaged = run(model)
        x = torch.randn(7, 6)
        torch.testing.assert_close(averaged(x), expected(x), rtol=1e-5, atol=1e-5)
        averaged.module.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_grad_scaler(engine: str) -> None:
    def run(module: nn.Module) -> nn.Module:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return module

    expected = run(network())
    with wrap(network(), engine) as model:
        assert_same_state(run(model), expected)


def test_data_loader_workers() -> None:
    """A loader whose workers are forked while replicas run."""
    expected, module = network(), network()
    losses = train(expected)
    with wrap(module, "threads") as model:
        model(torch.randn(4, 6))
        module.load_state_dict(network().state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        actual = []
        for inputs, targets in DataLoader(dataset(), batch_size=6, num_workers=2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            actual.append(loss.item())
    assert actual == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_the_profiler_sees_the_operators_of_replicas(engine: str) -> None:
    with wrap(network(), engine) as model:
        model(torch.randn(4, 6))
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every_thread) as profile:
            model(torch.randn(4, 6)).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::linear"] == 4  # two layers, two replicas


# A forward that is set on the wrapper


def test_forward_that_is_set_on_the_wrapper_may_call_the_former_one() -> None:
    module = network().eval()
    with wrap(module, "threads") as model:
        former = model.forward
        model.forward = lambda x: former(x) * 2
        x = torch.randn(5, 6)
        torch.testing.assert_close(model(x), module(x) * 2)
        del model.forward
        torch.testing.assert_close(model(x), module(x))


def test_class_of_the_wrapper() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

        def gather(self) -> str:
            return "own"

    with wrap(Net(), "threads") as model:
        assert isinstance(model, instep.DataParallel)
        assert isinstance(model, nn.DataParallel)
        assert type(model).__name__ == "Net"
        assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
        assert list(inspect.signature(type(model).forward).parameters) == ["self", "x", "scale"]
        assert model.gather() == "own"
        assert not hasattr(model, "scatter")
        assert model.device_ids == [torch.device("cpu")] * 2
        clone = copy.deepcopy(model)
        assert isinstance(clone, instep.DataParallel)
        assert type(clone).__name__ == "Net"
        clone.close()
