"""What an installation contains, what importing it costs, and what the repository must not hold."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "numpy", "matplotlib", "datasets")


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import exitserve",
        "from exitserve.cli import build_parser; build_parser()",
        "import exitserve.planning.command, exitserve.costs.sources",
        "import exitserve_training.commands, exitserve_training.recipe",
        "import exitserve_kernels",
    ],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert not _loaded_by(statement) & set(HEAVY)


@pytest.mark.parametrize(
    "module",
    [
        "exitserve.policy",
        "exitserve.reference",
        "exitserve.checkpoint.block",
        "exitserve.checkpoint.decoder",
        "exitserve.truncation.run",
    ],
)
def test_the_core_works_without_vllm(module: str) -> None:
    assert "vllm" not in _loaded_by(f"import {module}")


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"exitserve", "exitserve_kernels", "exitserve_training"}
    assert not [name for name in names if name.endswith(".safetensors")]
    page = {f"exitserve/server/playground/page/{name}" for name in ("index.html", "main.js")}
    assert page < set(names)
    assert wheel.stat().st_size < 1_000_000


@pytest.mark.parametrize("name", ["cpu.txt", "docs.txt"])
def test_pins_name_no_host(name: str) -> None:
    pins = (ROOT / "requirements" / name).read_text().splitlines()
    for pin in pins:
        assert pin.startswith("#") or re.fullmatch(
            r"[A-Za-z0-9_.\-\[\]]+==[A-Za-z0-9_.\-]+", pin
        ), pin


def test_the_environment_is_the_pinned_one() -> None:
    pins = [
        line.split("==")
        for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
        if "==" in line
    ]
    for name, version in pins:
        assert importlib.metadata.version(name).split("+")[0] == version, name


def test_the_readme_starts_with_the_two_commands() -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    blocks = re.findall(r"```\w*\n(.*?)```", head, flags=re.DOTALL)
    assert "make demo" in blocks[0]
    assert any("make test" in block for block in blocks[:2])
