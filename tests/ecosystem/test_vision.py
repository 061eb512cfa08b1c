"""timm and detectors of torchvision, in a process of its own.

torchvision's wheel may be compiled for another build of torch (CUDA) than the installed one. Its import then fails, and
so does that of transformers, which imports torchvision wherever it is installed. Therefore `make` installs it in a
folder that only this process has on its path, with Python operators for those that cannot be loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent / "vision"
PACKAGES = Path(sys.prefix) / "vision"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not all((PACKAGES / name).is_dir() for name in ("torchvision", "timm")),
    reason=f"needs torchvision and timm in {PACKAGES.name}/ of the environment, where `make test-all` installs them",
)
@pytest.mark.parametrize("path", sorted(TESTS.glob("test_*.py")), ids=lambda path: path.stem)
def test_in_a_process_with_torchvision(path: Path, pytestconfig: pytest.Config) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(PACKAGES)])
    environment["TORCHDYNAMO_DISABLE"] = "1"  # torchvision compiles its Python operators, for longer than the tests run
    selected = ["-m", pytestconfig.getoption("markexpr")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected, str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
