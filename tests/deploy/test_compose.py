"""The compose file and what it mounts, read as text."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVERS = {"exitserve-cpu": "cpu", "exitserve-cuda": "cuda"}
PORTS = {"exitserve-cpu": 8000, "exitserve-cuda": 8000, "prometheus": 9090, "grafana": 3000}


def default(text: str) -> str:
    """A value with the defaults of its `${NAME:-default}` filled in."""
    return re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda match: match[1] or "", text)


def seconds(text: str) -> int:
    """Of a duration such as 90s."""
    return int(text.removesuffix("s"))


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Source and target of each volume."""
    found = []
    for volume in service.get("volumes", []):
        if isinstance(volume, dict):
            found.append((default(volume["source"]), volume["target"]))
        else:
            source, target, *_ = default(volume).split(":")
            found.append((source, target))
    return found


def service_problems(compose: dict[str, Any]) -> list[str]:
    """Services that are missing, unpinned, unchecked or unreachable."""
    services = compose["services"]
    found = [f"no service {name}" for name in PORTS if name not in services]
    for name, service in services.items():
        repository, _, tag = service["image"].partition(":")
        if not tag or tag == "latest":
            found.append(f"{name}: image {repository} has no pinned tag")
        if "healthcheck" not in service:
            found.append(f"{name}: no health check")
        published = [default(port) for port in service.get("ports", [])]
        if published != [f"127.0.0.1:{PORTS.get(name)}:{PORTS.get(name)}"]:
            found.append(f"{name}: ports {published}")
        found += [
            f"{name}: depends on {other}, which is not there"
            for other in service.get("depends_on", {})
            if other not in services
        ]
    return found


def confinement_problems(compose: dict[str, Any]) -> list[str]:
    """What a service could do beyond its purpose, or leave behind."""
    found = []
    for name, service in compose["services"].items():
        expected = {
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "read_only": True,
            "restart": "unless-stopped",
        }
        found += [f"{name}: {key}" for key, value in expected.items() if service.get(key) != value]
        log = service.get("logging", {}).get("options", {})
        if not {"max-size", "max-file"} <= set(log):
            found.append(f"{name}: its log grows for ever")
        for variable, value in dict(environment(service)).items():
            secret = "PASSWORD" in variable
            if secret and not re.fullmatch(r"\$\{\w+:\?[^}]+\}", value):
                found.append(f"{name}: {variable} has a default, or no plain error without it")
    return found


def environment(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Variables and their values, however they are written."""
    given = service.get("environment", {})
    if isinstance(given, dict):
        return list(given.items())
    return [(name, value) for name, _, value in (line.partition("=") for line in given)]


def stop_problems(compose: dict[str, Any]) -> list[str]:
    """A server finishes what runs, and has the time for it."""
    found = []
    for name in SERVERS:
        service = compose["services"][name]
        flags = dict(word.split("=") for word in service["command"][1:] if "=" in word)
        allowed = int(flags.get("--shutdown-timeout", 0))
        grace = seconds(service.get("stop_grace_period", "10s"))
        if not allowed or grace < allowed + 10:
            found.append(f"{name}: stops within {grace} s, and may finish requests for {allowed} s")
    return found


def mount_problems(compose: dict[str, Any]) -> list[str]:
    """Mounted files and volumes that are not there."""
    found = []
    for name, service in compose["services"].items():
        for source, target in mounts(service):
            if not source.startswith("."):
                if source not in compose["volumes"]:
                    found.append(f"{name}: volume {source} is not declared")
            # The models are the user's; the configuration is ours.
            elif target != "/models" and not (DEPLOY / source).is_dir():
                found.append(f"{name}: {source} is not in deploy/")
    return found


def server_problems(compose: dict[str, Any]) -> list[str]:
    """What makes the two builds of the server interchangeable."""
    found = []
    for name, target in SERVERS.items():
        service = compose["services"][name]
        build = service["build"]
        if not (DEPLOY / build["context"] / build["dockerfile"]).is_file():
            found.append(f"{name}: no {build['dockerfile']}")
        if build["target"] != target or service["profiles"] != [target]:
            found.append(f"{name}: target {build['target']}, profiles {service['profiles']}")
        command = " ".join(service["command"])
        found += [
            f"{name}: no ${v}" for v in ("MODEL", "EXIT_THRESHOLD") if f"${{{v}:-" not in command
        ]
        if "exitserve" not in service["networks"]["default"]["aliases"]:
            found.append(f"{name}: Prometheus does not find it")
    devices = compose["services"]["exitserve-cuda"].get("deploy", {}).get("resources", {})
    if devices.get("reservations", {}).get("devices", [{}])[0].get("capabilities") != ["gpu"]:
        found.append("exitserve-cuda: reserves no GPU")
    return found


CHECKS = (service_problems, confinement_problems, stop_problems, mount_problems, server_problems)


@pytest.mark.parametrize("check", CHECKS)
def test_the_compose_file_is_sound(check):
    assert check(COMPOSE) == []


def test_the_command_is_one_that_exitserve_takes():
    from exitserve.cli import build_parser

    command = [default(word) for word in COMPOSE["services"]["exitserve-cpu"]["command"]]
    args, rest = build_parser().parse_known_args(["serve", *command])
    assert args.model == "/models/exit-py-19m"
    assert 0 < args.exit_threshold < 1
    assert rest == ["--host=0.0.0.0", "--port=8000", "--shutdown-timeout=60"]
