"""instep in a notebook: classes, functions and globals defined in cells, and errors."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

DEFINE = """
import torch, instep
from dataclasses import dataclass
from torch import nn
torch.set_num_threads(1)

@dataclass
class Answer:
    scores: torch.Tensor
    names: list

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch):
        return Answer(self.layer(batch["x"]), [name.upper() for name in batch["names"]])

plain, model = Net(), instep.DataParallel(Net(), ["cpu"] * 2)
model.load_state_dict(plain.state_dict())
batch = {"x": torch.randn(5, 4), "names": list("abcde")}
"""
TRAIN = """
for net in (plain, model):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        answer = net(batch)
        answer.scores.square().mean().backward()
        optimizer.step()
    print(type(answer).__name__, answer.names)
print(torch.allclose(plain.layer.weight, model.layer.weight, atol=1e-6))
"""
CHANGE_A_CLASS = """
class Net(Net):
    def forward(self, batch):
        return super().forward(batch).scores * 2

model = instep.DataParallel(Net(), ["cpu"] * 2)
print(torch.equal(model(batch), model.module(batch)))
"""
IN_PROCESSES = """
GAIN = 1.0

class Scaled(Net):
    def forward(self, batch):
        print("here", len(batch["names"]))
        return Answer(super().forward(batch) * GAIN, batch["names"])

model = instep.DataParallel(Scaled(), ["cpu"] * 2, engine="processes")
out = model(batch)
"""
CHANGE_A_GLOBAL = """
GAIN = 2.0
again = model(batch)
model.close()
print(type(again) is Answer, torch.allclose(again.scores, 2 * out.scores))
"""
MISTAKE = """
model = instep.DataParallel(Net(), ["cpu"] * 2, in_dims={"batch": 0})
model({"x": torch.randn(5, 4), "names": list("abc"), "more": torch.randn(3)})
"""


def run(*cells: str) -> list[str]:
    """Run cells as a notebook and return the output of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    return ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_classes_and_globals_of_cells_reach_worker_processes() -> None:
    *_, in_processes, after_change = run(DEFINE, CHANGE_A_CLASS, IN_PROCESSES, CHANGE_A_GLOBAL)
    assert "[replica 1 on cpu] here 2\n" in in_processes
    assert after_change.endswith("True True\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_in_cells_and_redefining_a_class() -> None:
    printed = run(DEFINE, TRAIN, CHANGE_A_CLASS)
    assert printed == ["", "Answer ['A', 'B', 'C', 'D', 'E']\n" * 2 + "True\n", "True\n"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_structure_error_in_a_cell_names_the_leaf() -> None:
    with pytest.raises(CellExecutionError, match=r"StructureError.*'batch\.(x|more)'"):
        run(DEFINE, MISTAKE)
