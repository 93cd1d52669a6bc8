"""A server turns exits off that do not pay, and says so."""

from __future__ import annotations

import httpx
from openai import OpenAI

from .conftest import KEY, NAME


def test_exits_that_never_pass_go_off(serve, bundled) -> None:
    """Almost no token is that confident, so fewer layers are saved than checks cost."""
    options = ("--exit-checks", "paying", "--exit-threshold", 0.9999)
    with serve(bundled, *options) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        answers = [
            client.completions.create(
                model=NAME,
                prompt=f"def number_{number}(",
                max_tokens=80,
                extra_body={
                    "temperature": 0,
                    "ignore_eos": True,
                    "vllm_xargs": {"exit_trace": True},
                },
            )
            for number in range(4)
        ]
        stats = httpx.get(f"{server.url}/exitserve/stats", timeout=60).json()
        metrics = httpx.get(f"{server.url}/metrics", follow_redirects=True).text
    assert answers[-1].choices[0].exit_layers == [24] * 80
    (row,) = stats["exit_switch"]
    assert row["mode"] == "confidence" and row["on"] == [] and not row["drafts"]
    assert row["thresholds"] == {"6": 0.9999, "12": 0.9999, "18": 0.9999}
    assert 0.5 < row["expected_wall_speedup"] < 1.05, "from what parts cost, timed at start"
    without = stats["since_start"]["exits"]["6"]["requests_without"]
    assert 1 <= without <= 3
    name = "exitserve_requests_without_exit_total"
    assert f'{name}{{engine="0",exit_layer="6",model_name="{NAME}"}} {without:.1f}' in metrics
