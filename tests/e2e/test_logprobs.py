"""Log-probabilities of exited tokens are the exit layer's, and the response says so."""

from typing import Any

import pytest

from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

NAME = "exit-py"
PROMPT = "def read_lines(path):\n    with open(path"
LABEL = "exit_layer"


def ask(client: Any, *, chat: bool = False, stream: bool = False, **options: Any) -> Any:
    """A response as a dict, or the list of a stream's chunks."""
    create = client.chat.completions.create if chat else client.completions.create
    prompt: Any = {"prompt": PROMPT}
    if chat:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    answer = create(
        model=NAME,
        stream=stream,
        extra_body={"max_tokens": 16, "temperature": 0, **prompt, **options},
        **prompt,
    )
    return [chunk.model_dump() for chunk in answer] if stream else answer.model_dump()


@pytest.mark.parametrize("fields", [{"exit_threshold": 0.4}, {"exit_layer": 12}])
def test_they_are_those_of_the_layer_the_token_exited_at(complete, bundled, fields) -> None:
    answer = complete(PROMPT, options={"logprobs": 3}, **fields)
    (choice,) = answer["choices"]
    prompt_ids, token_ids = choice["prompt_token_ids"], choice["token_ids"]
    policy = (
        ExitPolicy.fixed(12)
        if "exit_layer" in fields
        else ExitPolicy.confidence(fields["exit_threshold"])
    )
    reference = load_reference(str(bundled))
    found = reference.trace([*prompt_ids, *token_ids], len(prompt_ids), policy)
    expected = found.logits.log_softmax(dim=-1)[len(prompt_ids) - 1 : -1]
    assert min(choice["exit_layers"]) < 24
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, token_ids, strict=True)], abs=1e-3
    )
    for row, top in zip(expected, choice["logprobs"]["top_logprobs"], strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
    assert answer["logprobs_from"] == LABEL


def test_those_of_the_prompt_are_plain_vllms(client, plain_client) -> None:
    plain = ask(plain_client, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    for fields in ({"exit_threshold": 0.4}, {"exit_layer": 6}, {}):
        answer = ask(client, prompt_logprobs=2, vllm_xargs=fields)
        ours = answer["choices"][0]["prompt_logprobs"]
        assert ours[0] is plain[0] is None
        for one, other in zip(ours[1:], plain[1:], strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert one[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=1e-4)
        assert "logprobs_from" not in answer, "a prompt runs at full depth"


@pytest.mark.parametrize("trace", [{}, {"exit_trace": True}])
@pytest.mark.parametrize(
    ("chat", "logprobs"),
    [
        (False, {"logprobs": 0}),
        (False, {"logprobs": 2}),
        (True, {"logprobs": True}),
        (True, {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_the_label(client, chat: bool, logprobs: dict[str, Any], trace: dict[str, Any]) -> None:
    early = {"vllm_xargs": {"exit_threshold": 0.4} | trace}
    answer = ask(client, chat=chat, **logprobs, **early)
    assert answer["logprobs_from"] == LABEL
    assert ("exit_metrics" in answer) is bool(trace)
    assert answer["choices"][0]["logprobs"]
    for usage in (True, False):
        chunks = ask(
            client,
            chat=chat,
            stream=True,
            stream_options={"include_usage": usage},
            **logprobs,
            **early,
        )
        assert chunks[-1]["logprobs_from"] == LABEL
        finished = [any(c["finish_reason"] for c in chunk["choices"]) for chunk in chunks]
        assert ["logprobs_from" in chunk for chunk in chunks] == [
            done or not chunk["choices"] for done, chunk in zip(finished, chunks, strict=True)
        ]
        assert chunks[-1]["choices"] == [] if usage else finished[-1]
