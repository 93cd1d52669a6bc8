"""The Dockerfile, read as text: no engine for containers runs where these tests do."""

import json
import re
import runpy
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORE = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
SERVED = ("cpu", "cuda")

Instructions = list[tuple[str, str]]


def parse(text: str) -> tuple[dict[str, str], dict[str, Instructions]]:
    """Global arguments, and the instructions of each named stage with its FROM first."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Instructions] = {}
    current: Instructions | None = None
    for line in filter(str.strip, joined.splitlines()):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            image, _, name = rest.partition(" AS ")
            current = stages[name] = [("FROM", image)]
        elif current is None:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            current.append((keyword, rest))
    return arguments, stages


def values(stage: Instructions, keyword: str) -> list[str]:
    return [rest for word, rest in stage if word == keyword]


def ignored(path: str, patterns: str) -> bool:
    """Whether a dockerignore keeps `path` from the builder: the last pattern that fits decides."""
    result = False
    for line in patterns.splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and fnmatch(path, pattern.lstrip("!")):
            result = not pattern.startswith("!")
    return result


def image_problems(text: str) -> list[str]:
    """Base images that are not pinned, or not defined."""
    arguments, stages = parse(text)
    found = []
    for name, stage in stages.items():
        image = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], ""), stage[0][1])
        tag = image.partition(":")[2]
        if image not in stages and (not tag or tag == "latest"):
            found.append(f"{name}: image {image!r} has no pinned tag")
    return found


def copy_problems(text: str, patterns: str = IGNORE) -> list[str]:
    """Sources of COPY, and mounted stages, that a build would not find."""
    _, stages = parse(text)
    found = []
    for name, stage in stages.items():
        for copied in values(stage, "COPY"):
            words = shlex.split(copied)
            origin = [word.partition("=")[2] for word in words if word.startswith("--from=")]
            if origin:
                found += [f"{name}: no stage {o}" for o in origin if o not in stages]
                continue
            for source in words[:-1]:
                if not (ROOT / source).exists():
                    found.append(f"{name}: {source} is not in the repository")
                if ignored(source, patterns):
                    found.append(f"{name}: {source} is kept out by the dockerignore")
        for mount in re.findall(r"from=([\w-]+)", " ".join(values(stage, "RUN"))):
            found += [] if mount in stages else [f"{name}: no stage {mount}"]
    return found


def server_problems(text: str) -> list[str]:
    """What a stage that people run must have."""
    _, stages = parse(text)
    found = []
    for name in SERVED:
        stage = stages.get(name)
        if stage is None:
            found.append(f"no target {name}")
            continue
        users = values(stage, "USER")
        if not users or users[-1].split(":")[0] in ("0", "root"):
            found.append(f"{name}: runs as root")
        environment = " ".join(values(stage, "ENV")).split()
        if "PYTHONSAFEPATH=1" not in environment:
            found.append(f"{name}: PYTHONSAFEPATH is not set")
        if "TORCHINDUCTOR_CACHE_DIR=/home/exitserve/.cache/torchinductor" not in environment:
            found.append(f"{name}: what it compiles is not kept in the volume")
        check = " ".join(values(stage, "HEALTHCHECK"))
        if "/health'" not in check or "ProxyHandler({})" not in check:
            found.append(f"{name}: no health check on /health, without proxies")
        if [json.loads(entry) for entry in values(stage, "ENTRYPOINT")] != [["exitserve", "serve"]]:
            found.append(f"{name}: the entry point is not `exitserve serve`")
    return found


def install_problems(text: str) -> list[str]:
    """Complete lists go in whole and alone, and all but torch by the hashes of their files."""
    _, stages = parse(text)
    found = []
    for stage, needed in (
        ("cpu-environment", ["==", "--require-hashes -r /tmp/cpu-hashes.txt", "/wheels/"]),
        ("cuda", ["-r /tmp/cuda.txt /wheels/"]),
    ):
        commands = re.split("&&", " && ".join(values(stages[stage], "RUN")))
        installs = [command.strip() for command in commands if "pip install" in command]
        found += [
            f"{stage}: {command!r} lacks --no-deps"
            for command in installs
            if "--no-deps" not in command
        ]
        found += [
            f"{stage}: {what} is not installed"
            for what in needed
            if not any(what in command for command in installs)
        ]
    return found


CHECKS = (image_problems, copy_problems, server_problems, install_problems)


@pytest.mark.parametrize("check", CHECKS)
def test_the_dockerfile_is_sound(check):
    assert check(DOCKERFILE) == []


def pins(name: str) -> dict[str, str]:
    """Versions by package, of a list in which each has one; what follows a version is dropped."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    packages = [line.split()[0] for line in lines if line and not line.startswith("#")]
    pairs = [package.split("==") for package in packages]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_the_list_with_hashes_is_the_cpu_list():
    versions = pins("cpu.txt")
    namespace = runpy.run_path(str(ROOT / "requirements" / "with_hashes.py"))
    for left_out in namespace["LEFT_OUT"]:
        assert versions.pop(left_out.replace("_", "-"))
    assert pins("cpu-hashes.txt") == versions
    lines = (ROOT / "requirements" / "cpu-hashes.txt").read_text().splitlines()[1:]
    assert [line for line in lines if not re.search(r" --hash=sha256:[0-9a-f]{64}$", line)] == []


def test_the_cuda_list_has_what_the_gpu_extra_asks_for():
    """And the versions that are tested on CPUs, where packages share them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    versions = pins("cuda.txt")
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement
    assert versions["transformers"] == pins("cpu.txt")["transformers"]
