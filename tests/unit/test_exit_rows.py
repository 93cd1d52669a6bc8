"""Exit rows: which tokens they are, a file that changes with thresholds, and the oracle's rule."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exitserve.calibration.outcomes import Piece
from exitserve.calibration.rows import compare_rows, count_rows
from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.checkpoint.decoder import capture_hidden
from exitserve.checkpoint.exit_rows import load_exit_rows, most_frequent, save_exit_rows
from exitserve.costs.byte_costs import exit_rows_for, shape_of
from exitserve.errors import ExitServeError
from exitserve.policy import ExitPolicy
from exitserve.reference import load_reference

SCRIPT = Path(__file__).with_name("killed_while_writing.py")


def test_frequent_tokens_come_first_then_low_numbers() -> None:
    assert most_frequent([[9, 9, 7], [9, 7, 3]], 4, 10, always=[8]) == [3, 7, 8, 9]
    assert most_frequent([[9]], 3, 10, always=[]) == [0, 1, 9]


def test_written_and_read(tmp_path: Path) -> None:
    file = f"exit_rows/{save_exit_rows(tmp_path, [3, 5, 8])}.safetensors"
    assert load_exit_rows(tmp_path, file).tolist() == [3, 5, 8]
    (tmp_path / file).write_bytes(b"no tensors")
    with pytest.raises(ExitServeError, match=r"cannot be read.*calibrate again"):
        load_exit_rows(tmp_path, file)
    (tmp_path / file).unlink()
    with pytest.raises(ExitServeError, match="copy that folder along"):
        load_exit_rows(tmp_path, file)


def test_a_kill_at_any_step_leaves_rows_and_thresholds_that_match(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    for kind, left in json.loads(done.stdout).items():
        old = None if kind == "linked" else 0.25
        assert left == sorted(left, key=lambda value: value == 0.75), "one moment of change"
        assert set(left) == {old, 0.75} and len(left) > 5, "before it and after it"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 6}')
    return tmp_path


def block(name: str | None) -> MultiExit:
    return MultiExit(exit_layers=(2, 4), rows=name)


def test_rows_of_another_checkpoint_are_refused(folder: Path) -> None:
    """As where a folder was copied by hand, or a copy was cut off."""
    one, other = (save_exit_rows(folder, rows) for rows in ([1, 5], [1, 7]))
    place = folder / "exit_rows"
    shutil.copyfile(place / f"{other}.safetensors", place / f"{one}.safetensors")
    with pytest.raises(ExitServeError, match="not what was written"):
        load_exit_rows(folder, f"exit_rows/{one}.safetensors")


def test_what_linked_rows_point_to_stays(folder: Path) -> None:
    """As in the cache of a model hub; the same rows again, and then others."""
    name = save_exit_rows(folder, [1, 5])
    write_multi_exit(folder, block(name))
    file, blob = folder / "exit_rows" / f"{name}.safetensors", folder / "blob"
    before = file.read_bytes()
    file.rename(blob)
    file.symlink_to(blob)
    for rows in ([1, 5], [1, 7]):
        write_multi_exit(folder, block(save_exit_rows(folder, rows)))
    assert blob.read_bytes() == before and not file.exists()


@pytest.mark.parametrize(
    ("hidden", "width", "heads", "kv_heads", "vocab", "rows"),
    [
        (576, 1536, 9, 3, 49_152, 4096),  # SmolLM2-135M
        (1024, 3072, 16, 8, 151_936, 4096),  # Qwen3-0.6B, nearly
        (4096, 14_336, 32, 8, 128_256, 8192),  # Llama-3-8B
        (256, 768, 4, 2, 4096, None),  # the bundled model
    ],
)
def test_how_many_follows_from_the_shape(
    hidden: int, width: int, heads: int, kv_heads: int, vocab: int, rows: int | None
) -> None:
    shape = shape_of(
        {
            "num_hidden_layers": 8,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
        },
        "bfloat16",
    )
    assert exit_rows_for(shape) == shape.exit_rows == rows
    read = vocab if rows is None else rows
    assert shape.check_bytes == read * hidden * 2


@pytest.fixture(scope="module")
def model(make_checkpoint) -> str:
    return str(make_checkpoint("llama"))


def test_tokens_and_confidence_are_those_of_the_rows(model: str) -> None:
    """Beside a plain computation of the first exit, whose states no other exit has changed."""
    reference, rows = load_reference(model), torch.arange(1, 128, 2)
    assert reference.exit_rows is not None and reference.exit_rows.tolist() == rows.tolist()
    ids = torch.randint(2, 128, (60,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), capture_hidden(reference.parts.layers, [2]) as hidden:
        reference.model.base_model(input_ids=ids[None])
        logits = reference.model.lm_head(reference.parts.norm(hidden[2][0]))
    chances = logits[:, rows].softmax(dim=-1)
    exits = chances.amax(dim=-1) > 0.15
    exits[:10] = False
    policy = ExitPolicy(mode="defer", by_layer=((2, 0.15, 0.15),))
    trace = reference.trace(ids.tolist(), 10, policy)
    assert 5 < exits.sum() < 45
    assert trace.depth.tolist() == torch.where(exits, 2, 6).tolist()
    assert trace.token[exits].tolist() == rows[chances.argmax(dim=-1)][exits].tolist()
    torch.testing.assert_close(trace.logits[exits], logits[exits])
    assert (trace.token[exits] != logits.argmax(dim=-1)[exits]).any(), "else nothing is shown"


def test_more_rows_say_more(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exitserve.calibration.rows.COMPARED", (32, 64))
    reference = load_reference(model, exit_rows="all")
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 128, (6, 40), generator=drawn).tolist()
    pieces = [Piece(tuple(row), 10, "text") for row in ids]
    shape = shape_of(reference.model.config.to_dict(), "float32")
    table = compare_rows(reference, pieces[:3], pieces[3:], shape)
    assert {one.rows for one in table if one.chosen} == {128}, "a small vocabulary is read whole"
    assert all(one.same_token == 1.0 for one in table if one.rows == 128 and one.passes)
    passes = [[one.passes for one in table if one.rows == size] for size in (32, 64, 128)]
    assert sum(passes[0]) > sum(passes[2]) > 0, "confidence is over fewer tokens"
    rows = count_rows(reference, pieces, 32)
    assert 1 in rows and rows.tolist() == sorted(set(rows.tolist()))
