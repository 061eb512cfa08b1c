"""The wheel installs into a clean environment, and the command line runs from it."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import instep

ROOT = Path(__file__).parents[1]
TIMEOUT = 100


def run(*command: object, folder: Path) -> str:
    # The command must not find the checkout, and must not download anything.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "COV_"))}
    environment = {
        **clean,
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "160",
        "NO_COLOR": "1",
    }
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, ROOT, folder=folder)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment with the wheel and the dependencies of the current environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # A path file lists the packages of this environment behind the new environment's own. An editable install of the
    # checkout is a path file too, and path files of listed folders are not read: only the wheel has instep.
    (packages / "dependencies.pth").write_text("\n".join(_site_packages()) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps"]
    run(*pip, wheel, folder=folder)
    return folder / "bin"


def _site_packages() -> list[str]:
    return list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]))


def test_the_wheel_contains_only_the_package_and_its_metadata(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "instep/py.typed" in names
    assert "instep/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {"instep", f"instep-{instep.__version__}.dist-info"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_python_imports_instep_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    path = run(installed / "python", "-c", "import instep; print(instep.__file__)", folder=tmp_path)
    assert Path(path.strip()).is_relative_to(installed.parent)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["instep"], id="script"),
        pytest.param(["python", "-m", "instep"], id="module", marks=pytest.mark.slow),
    ],
)
def test_the_version(installed: Path, tmp_path: Path, command: list[str]) -> None:
    assert run(installed / command[0], *command[1:], "--version", folder=tmp_path) == f"instep {instep.__version__}\n"


@pytest.mark.slow
def test_the_demo_runs(installed: Path, tmp_path: Path) -> None:
    # The demo exits with 1 if a step differs from the plain module's.
    run(installed / "instep", "demo", "--steps", "2", "--replicas", "2", folder=tmp_path)
    assert (tmp_path / "instep-demo.pt").exists()
