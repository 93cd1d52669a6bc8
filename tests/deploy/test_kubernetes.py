"""The Kubernetes manifests, against the API's schemas and each other. No cluster runs here.

Overlays are built by kustomize itself, which kubectl contains; without either, their tests are
skipped, and only what they are made of is checked.
"""

import copy
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = {"cpu": "exitserve:cpu", "gpu": "exitserve:cuda"}
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest that the manifests are for, and the newest with a schema here."""
NO_SCHEMA = ("PodMonitor",)

Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    """The manifests of a file."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def complete_files() -> list[Path]:
    """Files of whole manifests: neither patches nor kustomize's own."""
    rooms = (FOLDER / "base", FOLDER / "monitoring")
    found = [FOLDER / "models-pod.yaml", *(path for room in rooms for path in room.glob("*.yaml"))]
    return sorted(path for path in found if path.name != "kustomization.yaml")


def builder() -> list[str]:
    """The command that builds an overlay; skips the test where there is none."""
    if program := shutil.which("kustomize"):
        return [program, "build"]
    if program := shutil.which("kubectl"):
        return [program, "kustomize"]
    pytest.skip("no kustomize and no kubectl: install one of them to check the overlays")


@cache
def build(folder: Path) -> tuple[Manifest, ...]:
    """What `kubectl apply -k` sends."""
    command = [*builder(), str(folder)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(yaml.safe_load_all(built))


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def manifests(overlay: str) -> list[Manifest]:
    """Of an overlay, to be changed at will."""
    return copy.deepcopy(list(build(FOLDER / "overlays" / overlay)))


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of its kind."""
    (found,) = (one for one in manifests if one["kind"] == kind)
    return found


def pod_of(manifests: list[Manifest]) -> Manifest:
    """The specification of the Deployment's pods."""
    found: Manifest = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    return found


def container_of(manifests: list[Manifest]) -> Manifest:
    """The server's."""
    (found,) = pod_of(manifests)["containers"]
    return dict(found)


def schema_problems(manifest: Manifest, version: str) -> list[str]:
    """What Kubernetes would not take, unknown fields among it."""
    if manifest["kind"] in NO_SCHEMA:
        return []
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{manifest['kind']}: {error.message}"]
    return []


def reference_problems(manifests: list[Manifest]) -> list[str]:
    """Names and labels that lead nowhere."""
    found = []
    names = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    deployment = of_kind(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    for kind in ("Service", "PodDisruptionBudget", "PodMonitor"):
        selector = of_kind(manifests, kind)["spec"]["selector"]
        if not selector.get("matchLabels", selector).items() <= labels:
            found.append(f"{kind}: selects none of our pods")
    target = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    if (target["kind"], target["name"]) not in names:
        found.append(f"autoscaler: no {target['name']}")
    if "replicas" in deployment["spec"]:
        found.append("Deployment: its replicas undo the autoscaler's at each apply")
    pod, container = pod_of(manifests), container_of(manifests)
    for volume in pod["volumes"]:
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        config = volume.get("configMap", {}).get("name")
        for kind, name in (("PersistentVolumeClaim", claim), ("ConfigMap", config)):
            if name and (kind, name) not in names:
                found.append(f"volume {volume['name']}: no {kind} {name}")
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    if mounted != {volume["name"] for volume in pod["volumes"]}:
        found.append("volumes and mounts differ")
    ports = {port["name"] for port in container["ports"]}
    asked = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")]
    asked += [
        one["port"] for one in of_kind(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    ]
    asked += [one["targetPort"] for one in of_kind(manifests, "Service")["spec"]["ports"]]
    return found + [f"no port {port}" for port in asked if port not in ports]


def confinement_problems(manifests: list[Manifest]) -> list[str]:
    """What Pod Security's standard "restricted" forbids, and what we promise beyond it."""
    pod, container = pod_of(manifests), container_of(manifests)
    context, own = pod["securityContext"], container["securityContext"]
    rules = {
        "runs as root": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
        "no seccomp profile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
        "gains privileges": own.get("allowPrivilegeEscalation") is False,
        "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "its root can be written": own.get("readOnlyRootFilesystem") is True,
        "holds a token of the cluster": pod.get("automountServiceAccountToken") is False,
        "takes variables of services": pod.get("enableServiceLinks") is False,
        "no memory limit": "memory" in container.get("resources", {}).get("limits", {}),
    }
    return [problem for problem, holds in rules.items() if not holds]


def flags_of(container: Manifest) -> dict[str, str]:
    """Those of the server's arguments."""
    return dict(word.split("=") for word in container["args"] if word.startswith("--"))


def life_problems(manifests: list[Manifest]) -> list[str]:
    """Whether a replica has the time to start, to finish, and to show that it hangs."""
    pod, container = pod_of(manifests), container_of(manifests)
    found = []
    deployment = of_kind(manifests, "Deployment")["spec"]
    start, live = container["startupProbe"], container["livenessProbe"]
    if deployment["progressDeadlineSeconds"] <= start["periodSeconds"] * start["failureThreshold"]:
        found.append("an update is given up while its replicas start")
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    finish = int(flags_of(container).get("--shutdown-timeout", 0))
    if not finish or pod["terminationGracePeriodSeconds"] < wait + finish + 10:
        found.append("killed while it finishes requests")
    (waits,) = (word for word in live["exec"]["command"] if word.startswith("--wait="))
    # Three answers of the API process, of ten seconds each, around the wait.
    if live["timeoutSeconds"] < float(waits.partition("=")[2]) + 30:
        found.append("the liveness probe is cut off before it knows")
    return found


CHECKS = (reference_problems, confinement_problems, life_problems)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", complete_files(), ids=lambda path: path.stem)
def test_files_fit_the_schemas(path, version):
    assert [line for one in documents(path) for line in schema_problems(one, version)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_overlays_fit_the_schemas(manifests, version):
    assert [line for one in manifests for line in schema_problems(one, version)] == []


@pytest.mark.parametrize("check", CHECKS)
def test_overlays_are_sound(manifests, check):
    assert check(manifests) == []


def test_the_arguments_are_ones_that_exitserve_takes(manifests):
    from exitserve.cli import build_parser

    container = container_of(manifests)
    args, rest = build_parser().parse_known_args(["serve", *container["args"]])
    assert args.model == "/models/exit-py-19m"
    assert rest == ["--host=0.0.0.0", "--port=8000", "--shutdown-timeout=120"]
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]


def example_overlay() -> str:
    """The overlay in docs/scale.md: someone's own model, with its target of the autoscaler."""
    page = (ROOT / "docs" / "scale.md").read_text()
    whole, patch = (block.partition("```")[0] for block in page.split("```yaml\n")[1:])
    assert whole.startswith("# my-model/kustomization.yaml")
    return whole + patch


def test_the_overlay_of_the_page_builds(tmp_path):
    text = example_overlay()
    (base,) = yaml.safe_load(text)["resources"]
    # Its path is one in a checkout; kustomize takes relative ones only.
    shutil.copytree(FOLDER, tmp_path / "deploy" / "kubernetes")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "kustomization.yaml").write_text(text)
    assert (tmp_path / "my-model" / base).is_dir()
    manifests = list(build(tmp_path / "my-model"))
    assert [line for one in manifests for line in schema_problems(one, VERSIONS[0])] == []
    assert [line for check in CHECKS for line in check(manifests)] == []
    container = container_of(manifests)
    assert container["args"][0] != "/models/exit-py-19m"
    assert json.dumps(container["args"]).count("--host") == 1
    scaled = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"]
    names = {one["pods"]["metric"]["name"] for one in scaled}
    assert names == {"vllm_num_requests_waiting", "exitserve_layers_per_second"}
