"""A first notebook: data, model and training in cells, and the same cells with a wrapped model."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

DATA = """
import torch, instep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(22, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)
"""
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)

torch.manual_seed(1)
model = Net()
"""
WRAP = "model = instep.DataParallel(model, ['cpu'] * 2, engine='{engine}')"
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, target in loader:
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
"""
CHANGE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(5, 1)

    def forward(self, x):
        return self.layers(x) * 0.5

torch.manual_seed(1)
model = Net()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_cells_print_the_same_losses(engine: str) -> None:
    """The model is defined, trained, defined anew and trained again; every time plain and wrapped."""
    wrap = WRAP.format(engine=engine)
    cells = [DATA, MODEL, TRAIN, MODEL, wrap, TRAIN, CHANGE, TRAIN, CHANGE, wrap, TRAIN]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    printed = [
        "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout") for cell in notebook.cells
    ]
    assert printed[2].count("\n") == printed[7].count("\n") == 8
    assert printed[5] == printed[2]
    assert printed[10] == printed[7] != printed[2]
