"""What is installed: the wheel, from the source distribution, in an environment without this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--quiet", "--no-index", "--no-deps"]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program away from the repository, and return what it printed."""
    dropped = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    env = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_is_complete_and_runs_without_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")  # of the dev extra: then nothing is downloaded
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("zeroshard-*.tar.gz")
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    (wheel,) = tmp_path.glob("zeroshard-*.whl")

    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/zeroshard").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= packed  # text, kernels and templates too
    assert {Path(name).suffix for name in packed} >= {".c", ".html", ".xz"}
    assert not [name for name in packed if not name.startswith("zeroshard")]
    with tarfile.open(sdist) as archive:
        archived = {name.partition("/")[2] for name in archive.getnames()}
    assert {"mkdocs.yml", "README.md", "Makefile", "tests/test_wheel.py", "src/zeroshard/py.typed"} <= archived

    # A fresh environment that finds torch and the other requirements here. The .pth adds a folder, whose own .pth files
    # (this repository's, if it is installed as editable) are not read.
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    run(*PIP, "--python", python, "install", *OFFLINE, wheel, cwd=tmp_path)
    where = run(python, "-c", "import zeroshard; print(zeroshard.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    command = home / "bin" / "zeroshard"
    assert "zeroshard 0." in run(command, "--version", cwd=tmp_path)
    small = "--layers 1 --width 32 --heads 2 --sequence 16 --vocabulary 300 --sample-tokens 4 --device cpu --ranks 1"
    run(command, "train", "--plain", "--steps", "2", *small.split(), cwd=tmp_path)
    assert (tmp_path / "runs").is_dir() and next((tmp_path / "runs").glob("*/report.html")).stat().st_size > 2e4
    picture = tmp_path / "plan.svg"
    assert "stage" in run(
        command, "plan", "tiny", "--devices", "8", "--machine", "a100", "--svg", picture, cwd=tmp_path
    )
    assert picture.stat().st_size > 1e4
