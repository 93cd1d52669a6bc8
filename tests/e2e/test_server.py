"""The server over HTTP with the official client: completions, chat, streams, traces, counts."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from exitserve.cli import main
from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference
from exitserve.tracing.format import VERSION

NAME = "exit-py"
PROMPT = "def read_lines(path):\n    with open(path"
LAYERS = {6, 12, 18, 24}


@pytest.mark.parametrize("mode", ["confidence", "defer"])
@pytest.mark.parametrize("threshold", [0.4, 0.7])
def test_a_completion_is_the_oracles(complete, bundled, threshold: float, mode: str) -> None:
    answer = complete(PROMPT, 48, exit_threshold=threshold, exit_mode=mode)
    (choice,) = answer["choices"]
    reference = load_reference(str(bundled))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled)
    policy = ExitPolicy.confidence(threshold, mode=mode)
    expected = reference.decode(tokenizer.encode(PROMPT), 48, policy)
    assert choice["exit_layers"] == expected.exit_layers
    assert choice["text"] == tokenizer.decode(expected.token_ids, skip_special_tokens=True)


def test_trace_and_totals_fit_together(complete) -> None:
    answer = complete(PROMPT, exit_threshold=0.4)
    layers = answer["choices"][0]["exit_layers"]
    assert len(layers) == answer["usage"]["completion_tokens"]
    assert set(layers) <= LAYERS and layers[0] == 24 and min(layers) < 24
    assert answer["exit_metrics"] == {
        "tokens": len(layers),
        "mean_depth": pytest.approx(sum(layers) / len(layers)),
        "depth_speedup": pytest.approx(24 * len(layers) / sum(layers)),
    }


def test_token_ids_come_only_where_asked_for(complete) -> None:
    """A trace needs them, but that is the server's own business."""
    for asked in (True, False):
        answer = complete(PROMPT, 4, exit_layer=12, options={"return_token_ids": asked})
        assert ("token_ids" in answer["choices"][0]) is asked


def test_several_prompts_and_samples_get_their_own_traces(complete) -> None:
    alone = [complete(p, exit_layer=layer) for p, layer in ((PROMPT, 12), ("import os\n", 12))]
    both = complete([PROMPT, "import os\n"], exit_layer=12)
    for index, one in enumerate(alone):
        assert both["choices"][index]["exit_layers"] == one["choices"][0]["exit_layers"]
    samples = complete(
        [PROMPT, "x"], exit_threshold=0.4, options={"n": 3, "temperature": 0.9, "seed": 1}
    )
    assert [choice["index"] for choice in samples["choices"]] == list(range(6))
    assert len({tuple(choice["exit_layers"]) for choice in samples["choices"]}) > 1
    total = sum(len(choice["exit_layers"]) for choice in samples["choices"])
    assert total == samples["usage"]["completion_tokens"] == samples["exit_metrics"]["tokens"]


def test_a_stream_ends_with_the_trace(client, complete) -> None:
    whole = complete(PROMPT, exit_threshold=0.4)
    stream = client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {"exit_threshold": 0.4, "exit_trace": True}},
    )
    chunks = [chunk.model_dump() for chunk in stream]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    (layers,) = [
        choice["exit_layers"]
        for chunk in chunks
        for choice in chunk["choices"]
        if "exit_layers" in choice
    ]
    assert layers == whole["choices"][0]["exit_layers"]
    assert chunks[-1]["exit_metrics"] == whole["exit_metrics"]


def test_a_full_trace_is_the_oracles(complete, bundled, tmp_path) -> None:
    """As `exitserve trace` writes it, but for layers that a server does not look at."""
    answer = complete(PROMPT, 32, exit_threshold=0.4, exit_trace="full")["choices"][0]
    out = tmp_path / "trace.json"
    arguments = ["--prompt", PROMPT, "--max-tokens", "32", "--exit-threshold", "0.4"]
    assert main(["trace", str(bundled), *arguments, "--out", str(out)]) == 0
    assert answer["exit_trace"]["version"] == VERSION
    told = answer["exit_trace"]["tokens"]
    assert "".join(token["text"] for token in told) == answer["text"]
    assert [token["depth"] for token in told] == answer["exit_layers"]
    for mine, theirs in zip(told, json.loads(out.read_text())["tokens"], strict=True):
        for layer, expected in zip(mine.pop("layers"), theirs.pop("layers"), strict=True):
            looked = layer["outcome"] in ("went_on", "stopped")
            kept = expected if looked else {k: expected[k] for k in ("layer", "outcome")}
            if looked:
                kept |= {"confidence": pytest.approx(expected["confidence"], abs=1e-4)}
            assert layer == kept
        assert mine == theirs


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_full_trace_comes_with_the_stream(client, kind: str) -> None:
    request = {
        "model": NAME,
        "max_tokens": 48,
        "temperature": 0,
        "extra_body": {"vllm_xargs": {"exit_threshold": 0.4, "exit_trace": "full"}},
    }
    if kind == "chat":
        create = client.chat.completions.create
        request["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        create, request["prompt"] = client.completions.create, PROMPT
    whole = create(**request).model_dump()["choices"][0]
    chunks = [one.model_dump()["choices"][0] for one in create(stream=True, **request)]
    parts = [one["exit_trace"]["tokens"] for one in chunks if one.get("exit_trace")]
    assert len(parts) > 1, "they come while the stream goes on"
    told = [token for part in parts for token in part]
    assert [one["index"] for one in told] == list(range(48))
    expected = whole["exit_trace"]["tokens"]
    close = [pytest.approx(_numbers(one), abs=1e-4) for one in expected]
    assert [_numbers(one) for one in told] == close
    text = whole["message"]["content"] if kind == "chat" else whole["text"]
    assert "".join(one["text"] for one in told) == text


def _numbers(token: dict) -> list[float]:
    """A traced token as numbers, which two runs may round differently."""
    layers = [(one.get("token_id", -1), one.get("confidence", -1)) for one in token["layers"]]
    return [token["token_id"], token["depth"], *(number for pair in layers for number in pair)]


def test_chat_whole_and_streamed(client) -> None:
    request = {
        "model": NAME,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 16,
        "temperature": 0,
        "extra_body": {"vllm_xargs": {"exit_threshold": 0.5, "exit_trace": True}},
    }
    whole = client.chat.completions.create(**request).model_dump()
    layers = whole["choices"][0]["exit_layers"]
    assert len(layers) == whole["usage"]["completion_tokens"]
    chunks = [c.model_dump() for c in client.chat.completions.create(stream=True, **request)]
    text = "".join(choice["delta"]["content"] or "" for c in chunks for choice in c["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["exit_layers"] == layers
    assert chunks[-1]["exit_metrics"] == whole["exit_metrics"]


def test_a_stop_string_cuts_the_trace_with_the_text(complete) -> None:
    free = complete(PROMPT, exit_threshold=0.4)
    stop = free["choices"][0]["text"][6:9]
    cut = complete(PROMPT, exit_threshold=0.4, options={"stop": [stop]})
    layers = cut["choices"][0]["exit_layers"]
    assert len(layers) == cut["usage"]["completion_tokens"] < 24
    assert layers == free["choices"][0]["exit_layers"][: len(layers)]


def test_without_a_trace_the_response_is_vllms(client) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0)
    assert "exit_metrics" not in answer.model_dump()
    assert "exit_layers" not in answer.model_dump()["choices"][0]


def test_full_depth_is_plain_vllm_over_http(client, plain_client) -> None:
    request = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": 32,
        "temperature": 0,
        "logprobs": 2,
    }
    plain = plain_client.completions.create(**request).choices[0]
    fields = {"extra_body": {"vllm_xargs": {"exit_threshold": 1}}}
    for answer in (
        client.completions.create(**request),
        client.completions.create(**request, **fields),
    ):
        ours = answer.choices[0]
        assert ours.text == plain.text
        assert ours.logprobs.tokens == plain.logprobs.tokens
        # float32 rounding, see tests/engine/test_identity.py
        assert ours.logprobs.token_logprobs == pytest.approx(
            plain.logprobs.token_logprobs, abs=1e-4
        )


def test_neighbours_change_nothing(complete) -> None:
    fields = [{"exit_threshold": t} for t in (0.3, 0.5, 0.7, 0.9)] + [{"exit_layer": 6}] * 2
    prompts = [PROMPT, "import os\n", "x", "class A:\n    def", "for i in range(", "return"]
    alone = [complete(p, **f)["choices"][0] for p, f in zip(prompts, fields, strict=True)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(complete, p, **f) for p, f in zip(prompts, fields, strict=True)]
        together = [job.result()["choices"][0] for job in jobs]
    for one, other in zip(alone, together, strict=True):
        assert (one["text"], one["exit_layers"]) == (other["text"], other["exit_layers"])


def test_a_full_depth_turn_after_an_early_exit_conversation(complete, plain_client) -> None:
    """Longer than a cache block, so that the conversation's blocks could be reused."""
    opening = "def f(x):\n    return x\n\n\n" * 10
    early = complete(opening, max_tokens=150, exit_layer=6)["choices"][0]["text"]
    request = {"model": NAME, "prompt": opening + early, "max_tokens": 16, "temperature": 0}
    answer = complete(opening + early, max_tokens=16, exit_threshold=1)
    assert (
        answer["choices"][0]["text"] == plain_client.completions.create(**request).choices[0].text
    )


def test_stats_and_metrics_count_what_was_served(server, complete) -> None:
    def counts() -> dict[str, int]:
        return httpx.get(f"{server.url}/exitserve/stats").json()["since_start"]

    before = counts()
    layers = complete(PROMPT, exit_threshold=0.4)["choices"][0]["exit_layers"]
    after = counts()
    assert after["tokens"] - before["tokens"] == len(layers)
    for layer in LAYERS:
        grown = after["tokens_by_exit_layer"].get(str(layer), 0) - before[
            "tokens_by_exit_layer"
        ].get(str(layer), 0)
        assert grown == layers.count(layer)
    page = httpx.get(f"{server.url}/metrics", follow_redirects=True).text
    for layer, tokens in after["tokens_by_exit_layer"].items():
        labels = f'engine="0",exit_layer="{layer}",model_name="{NAME}"'
        assert f"exitserve_tokens_total{{{labels}}} {tokens}.0" in page


def test_models_and_health(client, server) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_idle_server_leaves_the_processor_alone(server, complete) -> None:
    """Asking the worker for counts keeps it awake, so an idle server must not be asked."""
    complete("x", exit_threshold=0.5)
    time.sleep(5)  # a last sample is taken, and the worker's own second of polling is over
    leader = psutil.Process(server.pid)
    family = [leader, *leader.children(recursive=True)]
    before = sum(sum(one.cpu_times()[:2]) for one in family)
    time.sleep(6)
    used = sum(sum(one.cpu_times()[:2]) for one in family) - before
    assert used < 3, f"{used:.1f} s of processor time in 6 idle seconds"
