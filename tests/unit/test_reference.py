"""The oracle: one parallel pass and the decode loop are the same, and both are what design says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exitserve.checkpoint.decoder import FAMILIES
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference, roomy_device

from ..written import ROOT, blocks

PROMPT = [ord(c) for c in "the quick brown dog"]


@pytest.fixture(scope="module")
def llama(make_checkpoint) -> Reference:
    return load_reference(str(make_checkpoint("llama")))


def test_logits_that_are_freed_go_back_to_the_system() -> None:
    code = """
import ctypes, torch, exitserve.reference
class Memory(ctypes.Structure): _fields_ = [(str(place), ctypes.c_size_t) for place in range(10)]
(ask := ctypes.CDLL(None).mallinfo2).restype = Memory
exitserve.reference._give_memory_back()
torch.ones(30 << 20, dtype=torch.uint8)  # by itself glibc would keep what is smaller from now on
before, logits = getattr(ask(), "4"), torch.ones(8 << 20, dtype=torch.uint8)
assert getattr(ask(), "4") - before >= logits.nbytes
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _surely(true: bool) -> None:
    assert true


def _agree(
    reference: Reference,
    prompt: list[int],
    policy: ExitPolicy,
    tokens: int,
    suppose: Callable[[bool], object] = _surely,
) -> list[int]:
    """Checks that both ways agree, given what they may suppose; returns the exit layers."""
    decoded = reference.decode(prompt, tokens, policy, ignore_eos=True)
    trace = reference.trace(prompt + decoded.token_ids[:-1], len(prompt), policy)
    # Both ways round differently, so two logits that are as good as equal may change places.
    best = trace.logits[len(prompt) - 1 :].topk(2, dim=-1).values
    suppose(bool((best[:, 0] - best[:, 1]).min() > 1e-4))
    assert trace.token[len(prompt) - 1 :].tolist() == decoded.token_ids
    assert trace.depth[len(prompt) - 1 :].tolist() == decoded.exit_layers
    return decoded.exit_layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [ExitPolicy.confidence(0.1), ExitPolicy.confidence(0.15), ExitPolicy.fixed(4)],
    ids=["low", "high", "fixed"],
)
def test_one_pass_equals_decoding(make_checkpoint, family: str, policy: ExitPolicy) -> None:
    reference = load_reference(str(make_checkpoint(family)))
    layers = _agree(reference, PROMPT, policy, 24)
    assert layers[0] == 6, "the first token comes from the prompt, which runs full depth"
    assert min(layers) < 6, "no exit fired, so the test shows nothing"


def test_full_depth_is_the_plain_model(llama: Reference) -> None:
    trace = llama.trace(PROMPT, 3, ExitPolicy.off())
    plain = llama.model(torch.tensor([PROMPT])).logits[0]
    assert torch.equal(trace.logits, plain)
    assert trace.depth.tolist() == [6] * len(PROMPT)


def test_prompt_tokens_never_exit(llama: Reference) -> None:
    trace = llama.trace(PROMPT, len(PROMPT), ExitPolicy.fixed(2))
    assert trace.depth.tolist() == [6] * len(PROMPT)


def test_fixed_logits_are_those_of_the_truncated_model(llama: Reference) -> None:
    """With no prompt every row exits at layer 4, so the upper layers cannot matter."""
    trace = llama.trace(PROMPT, 0, ExitPolicy.fixed(4))
    hidden = llama.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[4]
    torch.testing.assert_close(trace.logits, llama.parts.classify(hidden)[0])


def test_propagated_keys_and_values_reach_later_tokens(llama: Reference) -> None:
    """A frozen row changes what a later full-depth row sees: compare with it un-frozen."""
    frozen = llama.trace(PROMPT, len(PROMPT) - 4, ExitPolicy.fixed(2))
    full = llama.trace(PROMPT, len(PROMPT) - 4, ExitPolicy.off())
    boundary = len(PROMPT) - 4
    assert torch.equal(frozen.logits[:boundary], full.logits[:boundary])
    assert not torch.allclose(frozen.logits[-1], full.logits[-1])


def test_end_of_sequence_stays_longer(make_checkpoint) -> None:
    """Declaring every token to end the sequence raises every threshold, so rows exit later."""
    plain = load_reference(str(make_checkpoint("llama")))
    careful = Reference(plain.model, plain.exit_layers, eos_token_ids=range(128))
    policy = ExitPolicy.confidence(0.1, eos_threshold=0.9)
    ids = PROMPT * 2
    assert careful.trace(ids, 4, policy).depth.sum() > plain.trace(ids, 4, policy).depth.sum()


def test_a_checkpoint_without_exits_runs_full_depth(tmp_path: Path, make_checkpoint) -> None:
    reference = load_reference(str(make_checkpoint("llama")), exit_layers=())
    assert reference.trace(PROMPT, 0, ExitPolicy.confidence(0.01)).depth.unique().tolist() == [6]


def test_a_checkpoint_whose_weights_do_not_load_is_named(tmp_path: Path, make_checkpoint) -> None:
    (tmp_path / "config.json").symlink_to(make_checkpoint("llama") / "config.json")
    with pytest.raises(ValueError, match="does not load: Error no file named"):
        load_reference(str(tmp_path))


def test_the_example_of_the_documentation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks(ROOT / "docs" / "reference" / "python.md", "python")
    monkeypatch.chdir(ROOT)
    exec(example, {})
    depths = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(depths) == 16 and depths[0] == 24 and min(depths) < 24


@pytest.mark.parametrize(("free", "chosen"), [(10**9, "cuda"), (10**5, "cpu")])
def test_a_gpu_is_used_where_it_has_room(
    monkeypatch: pytest.MonkeyPatch, free: int, chosen: str
) -> None:
    """A server on the same GPU may have taken its memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 10**10))
    assert roomy_device(torch.nn.Linear(1000, 1000)).type == chosen
