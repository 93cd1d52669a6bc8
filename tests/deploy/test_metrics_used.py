"""Dashboards, rules and documentation use only metrics that the code or vLLM exports."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from exitserve.server.metrics import METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
KUBERNETES = DEPLOY / "kubernetes"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))

SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
KEYWORDS = {"and", "or", "unless", "bool", "by", "without", "on", "ignoring", "offset"}
# Prometheus adds these to what it scrapes.
SCRAPE_METRICS = {"up"}
SCRAPE_LABELS = {"job", "instance", "le", "__name__", "namespace", "pod"}
VLLM_LABELS = {"model_name", "engine"}


@cache
def vllm_names() -> frozenset[str]:
    """Series that vLLM exports, from the source of its loggers: importing vLLM takes seconds."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "v1" / "metrics" / "loggers.py"
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        kind = re.fullmatch(r"_(gauge|counter|histogram)_cls", node.func.attr)
        for keyword in node.keywords:
            # A name that is computed belongs to a metric that we do not use.
            if kind and keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                names |= {f"{keyword.value.value}{suffix}" for suffix in SUFFIXES[kind[1]]}
    # Counters of speculative decoding, made in a loop over their names.
    drafts = (Path(package.origin).parent / "v1" / "spec_decode" / "metrics.py").read_text()
    names |= {f"{name}_total" for name in re.findall(r'"(vllm:spec_decode_\w+)"', drafts)}
    return frozenset(names)


def metric_names(query: str) -> set[str]:
    """The series that a PromQL expression, or Grafana's `label_values`, reads."""
    text = re.sub(r"label_values\((.*),\s*\w+\)", r"\1", query)
    text = re.sub(r'"[^"]*"', "", text)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", text)
    words = re.findall(r"(?<![\w:.])([A-Za-z_:][\w:]*)\b(?!\s*\()", text)
    return {word for word in words if word not in KEYWORDS}


def label_names(query: str) -> set[str]:
    """The labels that a PromQL expression, or Grafana's `label_values`, names."""
    text = re.sub(r'"[^"]*"', '""', query)
    groups = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", text)
    groups += re.findall(r"label_values\(.*,\s*(\w+)\)", text)
    names = {name.strip() for group in groups for name in group.split(",")}
    for matchers in re.findall(r"\{([^}]*)\}", text):
        names |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    return names - {""}


def known(rules: dict[str, Any]) -> set[str]:
    """Every series there is: ours, vLLM's, Prometheus' own, and those that rules record."""
    recorded = {rule["record"] for g in rules["groups"] for rule in g["rules"] if "record" in rule}
    return {metric.name for metric in METRICS} | vllm_names() | recorded | SCRAPE_METRICS


def labels_of(name: str, rules: dict[str, Any]) -> set[str]:
    """The labels of a series; a recorded one has those that its rule keeps."""
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for group in rules["groups"]:
        labels |= {r["record"]: label_names(r["expr"]) for r in group["rules"] if "record" in r}
    return labels.get(name, VLLM_LABELS if name.startswith("vllm:") else set()) | SCRAPE_LABELS


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels, those inside rows included."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def dashboard_queries(dashboard: dict[str, Any]) -> list[str]:
    """Queries of panels and of variables."""
    queries = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            queries.append(variable["query"]["query"])
    return queries


def rule_queries(rules: dict[str, Any]) -> list[str]:
    """Expressions of recording rules and alerts."""
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def query_problems(queries: list[str], rules: dict[str, Any]) -> list[str]:
    """Series and labels that nothing exports."""
    found = [] if queries else ["no queries"]
    for query in queries:
        names = metric_names(query)
        if not names:
            found.append(f"no metric in {query}")
        found += [f"unknown metric {name} in {query}" for name in sorted(names - known(rules))]
        for label in sorted(label_names(query)):
            # A label must exist on every series that the expression aggregates.
            lacking = [name for name in sorted(names) if label not in labels_of(name, rules)]
            found += [f"{name} has no label {label} in {query}" for name in lacking]
    return found


def adapter_rules() -> list[dict[str, Any]]:
    """The rules by which the Prometheus adapter makes metrics of pods."""
    values = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())
    rules: list[dict[str, Any]] = values["rules"]["custom"]
    return rules


def adapter_queries(rule: dict[str, Any]) -> list[str]:
    """Both queries of a rule, the second as the adapter asks it for some pods."""
    (series,) = metric_names(rule["seriesQuery"])
    filled = {"Series": series, "LabelMatchers": 'namespace="n",pod=~"a|b"', "GroupBy": "pod"}
    query = rule["metricsQuery"]
    for name, value in filled.items():
        query = query.replace(f"<<.{name}>>", value)
    return [rule["seriesQuery"], query]


def scaling_metrics() -> dict[str, float]:
    """The metrics by which replicas are scaled, and what each replica should have of them."""
    scaler = yaml.safe_load((KUBERNETES / "monitoring" / "autoscaler.yaml").read_text())
    pods = [one["pods"] for one in scaler["spec"]["metrics"]]
    return {one["metric"]["name"]: float(one["target"]["averageValue"]) for one in pods}


def made_up(page: str) -> set[str]:
    """Metrics that a page names and nothing exports."""
    return set(re.findall(r"\bexitserve_\w+_total\b", page)) - {metric.name for metric in METRICS}


def load_rules() -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    return rules


def test_rules_use_metrics_that_exist():
    assert query_problems(rule_queries(load_rules()), load_rules()) == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_use_metrics_that_exist(path):
    assert query_problems(dashboard_queries(json.loads(path.read_text())), load_rules()) == []


def test_the_adapter_reads_metrics_that_exist():
    queries = [query for rule in adapter_rules() for query in adapter_queries(rule)]
    assert query_problems(queries, load_rules()) == []
    assert not any("<<" in query for query in queries)


def test_replicas_are_scaled_by_what_the_adapter_makes():
    made = {rule["name"]["as"] for rule in adapter_rules()}
    assert set(scaling_metrics()) <= made
    assert {"exitserve_layers_per_second", "exitserve_tokens_per_second"} <= made
    assert all(re.fullmatch(r"[a-z_]+", name) for name in made), "the metrics API takes no colons"


def test_the_liveness_probe_reads_metrics_that_exist():
    text = (KUBERNETES / "base" / "alive.py").read_text()
    joined = re.sub(r"""["']\s+r["']""", "", text)
    names = re.search(r"\^vllm:\(\?:(.+?)\)\\{", joined)
    assert names is not None
    assert {f"vllm:{name}" for name in names[1].split("|")} <= vllm_names()


def test_promql_lines_of_the_metrics_use_metrics_that_exist():
    assert query_problems([metric.promql for metric in METRICS], load_rules()) == []


def test_pages_make_up_no_metrics():
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert {page.name: found for page in pages if (found := made_up(page.read_text()))} == {}
    assert made_up("exitserve_wishes_total, exitserve_tokens_total") == {"exitserve_wishes_total"}


def test_every_metric_is_on_a_dashboard():
    queries = " ".join(
        query for path in DASHBOARDS for query in dashboard_queries(json.loads(path.read_text()))
    )
    assert [metric.name for metric in METRICS if metric.name not in queries] == []
