"""`exitserve plan` from the command line, on a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exitserve.cli import main
from exitserve.costs.devices import DEVICES

from ..shapes import LLAMA_3_8B, TINY


def written(folder: Path, config: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path, LLAMA_3_8B)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a fraction of a second."""
    monkeypatch.setattr("exitserve.costs.timing.SECONDS", 0.05)


def test_the_plan_of_a_table(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["plan", str(llama.parent), "--device", "h200", "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "A check costs 0.4 layers" in printed
    assert "unverified" in printed
    assert "Batch 1: exits that skip layers can pay" in printed
    assert "Batch 32: exits that skip layers CANNOT pay" in printed
    assert (
        "Batch 32: serve in mode verify (or defer), where the first 6 layers draft 1 at a time"
        in printed
    )
    assert (out / "plan.png").stat().st_size > 10_000
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "CANNOT" in page
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["schema_version"] == 1
    assert not data["measured"]
    assert data["way"] == "masked"
    assert data["recommended"] == [6], "whatever is recommended is what is to be served"
    assert {one["exit_layer"] for one in data["advice"]} == {6}
    eighth = data["exit_layers"][7]
    assert eighth["exit_layer"] == 8
    # 24 of 32 layers, each 2 * 8 heads * 128 numbers of 2 bytes.
    assert eighth["kv_copy_bytes_per_token"] == 24 * 4096
    first = eighth["batches"][0]
    assert first["best_speedup"] == pytest.approx(2.99, abs=0.01)
    assert first["break_even_share"] == pytest.approx(0.015, abs=0.001)
    assert first["speedup_at_share"] == pytest.approx(1.49, abs=0.01)


def test_a_file_of_any_name_is_a_model_and_any_card_has_figures(tmp_path: Path, capsys) -> None:
    path = written(tmp_path, LLAMA_3_8B, "llama.json")
    figures = ["--bandwidth", "864", "--tflops", "362"]
    steps = []
    for device in (["--device", "L40S"], figures):
        assert main(["plan", str(path), *device, "--batch-sizes", "2"]) == 0
        steps.append(capsys.readouterr().out.split(" takes ")[1].split(" ms")[0])
    assert steps[0] == steps[1]


def test_the_plan_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny shape, timed; its checkpoint's own exit layers are judged too."""
    path, out = written(tmp_path, TINY), tmp_path / "out"
    arguments = [str(path), "--batch-sizes", "1,3", "--context", "64", "--out", str(out)]
    assert main(["plan", *arguments]) == 0
    assert "1, 2 (the checkpoint's), batch 3" in capsys.readouterr().out
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["measured"]
    assert data["dtype"] == "bfloat16"
    assert data["declared"]["layers"] == [1, 2]
    for cost in data["costs"]:
        parts = ("layer_ms", "fill_ms", "check_ms", "head_ms", "full_depth_ms")
        assert all(cost[part] > 0 for part in parts)
        assert cost["check_ms"] > cost["head_ms"]
        full = 4 * cost["layer_ms"] + cost["head_ms"] + cost["rest_ms"]
        assert cost["full_depth_ms"] == pytest.approx(full, rel=1e-3)


@pytest.mark.parametrize(("counted", "words"), [({}, "assumed"), ({"2": 0.9}, "as calibrated")])
def test_a_checkpoint_s_own_exits_are_served_by_what_was_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counted: dict[str, float], words: str
) -> None:
    point = {"agreement": 0.9, "thresholds": {"2": 0.5}, "eos_thresholds": {"2": 1.0}}
    about = {"target": "agreement>=0.9", "mode": "defer", "criterion": "max_prob"}
    found = {**point, **about, "confidence_level": 0.9, "num_layers": 4, "agreement_at": counted}
    block = {**TINY["multi_exit"], "calibration": found}
    path = written(tmp_path, LLAMA_3_8B | {"multi_exit": block | {"exit_layers": [2, 4]}})
    assert main(["plan", str(path), "--device", "h100", "--batch-sizes", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Recommended exit layers: 2, 4 (the checkpoint's)" in printed
    assert f"drafts are accepted ({words}" in printed


def test_a_small_model_waits_for_launches(tmp_path: Path, capsys) -> None:
    path = written(tmp_path, TINY | {"multi_exit": None, "num_hidden_layers": 2})
    assert main(["plan", str(path), "--device", "h100", "--batch-sizes", "1,32"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 layers of 0.035 ms (bound by launches)" in printed
    assert "launching kernels is what takes time" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h300"], ["h300", "Did you mean", *DEVICES]),
        (["--batch-sizes", "0"], ["--batch-sizes must be at least 1"]),
        (["--batch-sizes", "1,1"], ["each once"]),
        (["--batch-sizes", "one"], ["numbers separated by commas"]),
        (["--batch-sizes", "1000"], ["at most 512"]),
        (["--context", "9000"], ["--context 9000", "0..8192"]),
        (["--context", "-1"], ["--context -1"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--dtype", "float32", "--device", "h100"], ["--dtype bfloat16"]),
        (["--exit-share", "0"], ["--exit-share"]),
        (["--bandwidth", "900"], ["--bandwidth and --tflops"]),
        (["--bandwidth", "0", "--tflops", "1"], ["above 0"]),
        (["--bandwidth", "9", "--tflops", "9", "--device", "l4"], ["no --device"]),
    ],
)
def test_bad_arguments_give_one_line(
    llama: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(llama), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "num_attention_heads = None"),
        ([1], "must hold a JSON object"),
        ({**TINY, "num_hidden_layers": 1, "multi_exit": None}, "one layer"),
        ({**TINY, "multi_exit": {"version": 1, "exit_layers": [2, 4]}}, "exit layer 4"),
        ({**TINY, "num_experts_per_tok": 2}, "give --batch-sizes 1"),
        ({**TINY, "hidden_size": 10**7}, "GiB"),
    ],
)
def test_bad_models_give_one_line(
    tmp_path: Path, config: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(written(tmp_path, config))]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
