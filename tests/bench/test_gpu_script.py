"""What the script for GPUs says of itself and of what it found, and the main job on a CPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exitserve.checkpoint.exit_rows import save_exit_rows
from exitserve_training.recipe import load_recipe

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the script, which are no package."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> Any:
        return __import__(name)

    yield load
    for name in {path.stem for path in FOLDER.glob("*.py")} & set(sys.modules):
        del sys.modules[name]


def test_the_plan_has_four_calls_of_nine_minutes(script) -> None:
    lines = script("run").plan().splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["--call", name] for name in ("right", "fast", "kernels", "real")
    ]
    for line in lines[:4]:
        minutes = re.search(r"at most ([\d.]+) minutes", line)
        assert minutes is not None and float(minutes[1]) <= 9
    assert re.search(r"the checkout \d+ MiB", lines[4])


def test_the_verdict_is_ten_lines(script) -> None:
    run, outcome = script("run"), script("stages").StageOutcome
    good = outcome(verdict=["fine"])
    assert run.verdict({"branches": good}) == ["VERDICT: all is well", "branches: fine"]
    bad = outcome(failures=["it broke.\n" + "    a line\n" * 20])
    lines = run.verdict({"branches": good, "answers": bad})
    assert len(lines) == 10 and lines[0] == "VERDICT: FAILED: answers"
    assert lines[2] == "answers: it broke." and lines[-1] == "and 14 lines more, above"


def call(folder: Path) -> Any:
    """One whose minutes do not end."""
    return SimpleNamespace(folder=folder, left=lambda most: most)


WAITS = """import time
try:
    print("waits", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("found so far")
"""


def test_a_command_that_is_interrupted_says_what_it_found(script, tmp_path: Path) -> None:
    command, log = script("stages").command, tmp_path / "waits.log"
    given = (call(tmp_path), "waits", ["-S", "-c", WAITS])
    status, said = command(*given, most=60, until=lambda: log.read_text() == "waits\n")
    assert status is None
    assert said.read_text() == "waits\nfound so far\n"
    assert command(*given, most=0.1)[0] is None


LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"


def test_what_a_command_has_started_ends_with_it(script, tmp_path: Path) -> None:
    """A server that went on would keep the card's memory from all that follows."""

    status, said = script("stages").command(call(tmp_path), "leaves", ["-S", "-c", LEAVES], most=60)
    assert status == 0
    left = Path("/proc", said.read_text().strip(), "stat")
    for _ in range(100):  # it is ended, not waited for
        if not left.is_file() or left.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the process goes on")


# --- the main job --------------------------------------------------------------------------------


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it. Its modules lie beside it, where Python's safe path does not look."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )


@pytest.mark.timeout(600)
def test_the_main_job_on_a_tiny_chat_model(script, tmp_path: Path) -> None:
    """All stages, by the commands of users: a tokenizer without padding token, a chat template,
    tied embeddings."""
    out = tmp_path / "out"
    given = ("--call", "real", "--tiny", "--minutes", "9", "--out", str(out))
    done = run_script(*given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT: all is well" in done.stdout
    stages = json.loads((out / "gpu.json").read_text(encoding="utf-8"))["stages"]
    assert tuple(stages) == script("run").CALLS["real"]
    trained = stages["train"]["report"]
    assert list(trained["layers"]) == ["1", "2", "3", "4"]
    assert stages["train"]["base_loss"] == trained["initial_layers"]["4"]["loss"]
    assert stages["train"]["tokens_in_all"] == trained["tokens_seen"] > 0
    assert stages["train"]["progress"].startswith("step 4 of 4 | ")
    traced = stages["request"]["traced"]
    assert len(traced["choices"][0]["exit_layers"]) == traced["usage"]["completion_tokens"]
    drafting = stages["eval"]["report"]["drafting"]
    assert [one["exit_layer"] for one in drafting] == [1, 2, 3]
    assert {case["mode"] for case in stages["bench"]["report"]["cases"]} == {
        "plain",
        "off",
        "defer",
    }
    # At most eight files, small enough to be carried.
    left = {path.name for path in out.iterdir()}
    assert left == {"gpu.json", "gpu.md", "gpu.log", "chats.jsonl.gz", "delta.0"}


def saved(folder: Path, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_changes_are_left_in_files_and_taken_up_again(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences, error = script("differences"), script("stages").StageError
    monkeypatch.setattr(differences, "FILE_BYTES", 16_000)
    old = {"b": torch.randn(300, 200).bfloat16(), "a": torch.ones(64).bfloat16()}
    new = {name: tensor.float() + 0.01 * torch.randn(tensor.shape) for name, tensor in old.items()}
    exits = {"version": 1, "exit_layers": [2]}
    base = saved(tmp_path / "base", old, num_hidden_layers=4)
    trained = saved(tmp_path / "trained", new, num_hidden_layers=4, multi_exit=exits)
    rows = save_exit_rows(trained, [3, 5])
    out = tmp_path / "out"
    out.mkdir()
    fine = differences.leave(base, trained, out)
    sizes = [path.stat().st_size for path in differences.parts_of(out, "delta")]
    assert len(sizes) == 2 and max(sizes) <= 16_000 and sum(sizes) == fine["bytes"]
    differences.take_up(base, out, tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert config == {"num_hidden_layers": 4, "multi_exit": exits}
    assert (tmp_path / "again" / "exit_rows" / f"{rows}.safetensors").is_file()
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in new.items():
        assert again[name].dtype == torch.bfloat16
        # Half a step of 0.4 times 0.01, and bfloat16's 8 bits.
        torch.testing.assert_close(again[name].float(), tensor, rtol=2.0**-8, atol=0.0025)
    coarse = differences.leave(base, trained, out, most_bytes=round(0.8 * fine["bytes"]))
    assert coarse["step"] > fine["step"] and coarse["bytes"] <= 0.8 * fine["bytes"]
    with pytest.raises(error, match="at any step"):
        differences.leave(base, trained, out, most_bytes=1000)
    other = saved(tmp_path / "other", {"a": old["a"]}, num_hidden_layers=4)
    with pytest.raises(error, match="another base"):
        differences.take_up(other, out, tmp_path / "none")
    with pytest.raises(error, match="other tensors"):
        differences.leave(other, trained, out)


@pytest.fixture
def main_job(script, tmp_path: Path) -> Any:
    """A call whose base has one matrix."""

    class Run:
        folder, tiny = tmp_path, False
        job = script("stages").MainJob(
            model=None,
            recipe=Path("training/recipes/smollm2-135m.yaml").resolve(),
            chats=None,
            continue_from=tmp_path / "earlier",
            out=tmp_path / "out",
        )

    saved(tmp_path / "base", {MATRIX: torch.zeros(4, 4)}, num_hidden_layers=4)
    return Run()


MATRIX = "model.layers.0.mlp.up_proj.weight"


def test_a_call_that_goes_on_keeps_the_base_as_teacher(
    script, main_job: Any, tmp_path: Path
) -> None:
    real = script("real")
    given = real._training(main_job, model=tmp_path / "start", output_dir=tmp_path / "run")
    recipe, *overrides = given[3:]
    overrides.append(f"objectives={json.dumps(real._objectives(main_job))}")
    found = load_recipe(recipe, overrides)
    assert found.model == str(tmp_path / "start")
    before = load_recipe(recipe).objectives
    assert [one.name for one in found.objectives] == [one.name for one in before]
    for one, other in zip(found.objectives, before, strict=True):
        if one.name == "kl_to_last":
            assert one.teacher == str(tmp_path / "base")
            one = one.model_copy(update={"teacher": "initial"})
        assert one == other
    (tmp_path / "earlier").mkdir()
    earlier = {"stages": {"train": {"base_loss": 1.25, "tokens_in_all": 3_000_000}}}
    (tmp_path / "earlier" / "gpu.json").write_text(json.dumps(earlier), encoding="utf-8")
    quality = {"4": {"loss": 1.5, "accuracy": 0.5}}
    report = {"initial_layers": quality, "layers": quality, "num_layers": 4, "steps": 10}
    report |= {"tokens_seen": 2_000_000, "seconds": 20.0}
    page = script("real_tables").training_page(report, real._earlier(main_job), "")
    assert page.data["tokens_in_all"] == 5_000_000
    assert page.verdict[0].endswith("5.00 M in all")
    assert page.verdict[1].endswith("of full depth +20.0% from the base's 1.250")
