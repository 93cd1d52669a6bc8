"""The server over HTTP with the official client: completions, chat, streams, traces, counts."""

import time

import httpx
import psutil
import pytest

from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

NAME = "exit-py"
PROMPT = "def read_lines(path):\n    with open(path"
LAYERS = {6, 12, 18, 24}


@pytest.mark.parametrize("threshold", [0.4, 0.7])
def test_a_completion_is_the_oracles(complete, bundled, threshold: float) -> None:
    answer = complete(PROMPT, 48, exit_threshold=threshold)
    (choice,) = answer["choices"]
    reference = load_reference(str(bundled))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled)
    policy = ExitPolicy.confidence(threshold)
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
        "accepted_drafts": {},
    }


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


def test_full_depth_is_plain_vllm_over_http(client, plain_client) -> None:
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "logprobs": 2}
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
