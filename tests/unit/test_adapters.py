"""`--adapter`: LoRA adapters are merged into their base, and bring their own exits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from exitserve.checkpoint.adapters import merged_checkpoint
from exitserve.checkpoint.block import MultiExit, read_multi_exit, write_multi_exit
from exitserve.checkpoint.exit_rows import load_exit_rows, save_exit_rows
from exitserve.checkpoint.hub import BLOCK_FILE
from exitserve.checkpoint.weights import weight_files
from exitserve.cli import main
from exitserve.errors import ExitServeError

MakeAdapter = Callable[..., Path]
SCALE = 7.0 / 3
"""Of `make_adapter`."""


@pytest.fixture
def base(make_checkpoint: Any) -> Path:
    path: Path = make_checkpoint("llama")
    return path


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for name in weight_files(folder) for k, v in load_file(folder / name).items()}


def expected(base: Path, adapter: Path, scale: float = SCALE) -> dict[str, Tensor]:
    """In float64."""
    found = {name: tensor.double() for name, tensor in tensors_of(base).items()}
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, a in factors.items():
        if ".lora_A." in name:
            b = factors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            found[weight] += scale * (b.double() @ a.double())
    return found


def test_weights_are_the_bases_and_what_is_added(
    base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """In shards and bfloat16, as large bases are."""
    adapter, large = make_adapter(base), tmp_path / "large"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(large, max_shard_size="200KB")
    AutoTokenizer.from_pretrained(base).save_pretrained(large)
    assert len(weight_files(large)) > 2
    merged = merged_checkpoint(str(large), str(adapter))
    assert merged.name == "large+mine"
    before, after, right = tensors_of(large), tensors_of(merged), expected(large, adapter)
    assert after.keys() == before.keys() and weight_files(merged) == weight_files(large)
    adapted = [name for name in before if name.endswith(("q_proj.weight", "down_proj.weight"))]
    for name in adapted:
        assert after[name].dtype == torch.bfloat16
        assert not torch.equal(after[name], before[name])
        # One rounding: only what lies within float32's error of the middle may go the other way.
        assert after[name].ne(right[name].bfloat16()).float().mean() < 0.001
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - set(adapted))
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    assert torch.equal(loaded.state_dict()[adapted[0]].bfloat16(), after[adapted[0]])
    assert AutoTokenizer.from_pretrained(merged).encode("a") == [ord("a")]


def test_exits_are_the_adapters_and_looked_up_at_every_start(
    base: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(base, exits=(3,))
    folder = merged_checkpoint(str(base), str(adapter))
    assert f"merging '{adapter}' into '{base}': {folder}" in capsys.readouterr().err
    block = read_multi_exit(folder)
    assert block == MultiExit(exit_layers=(3,)), "not the base's, which are 2 and 4, with rows"
    assert not list(folder.glob("exit_rows/*"))
    written = (folder / "model.safetensors").stat().st_mtime_ns

    # As a calibration leaves it.
    for exits in ((1, 5), (5,)):
        name = save_exit_rows(adapter, list(exits))
        write_multi_exit(adapter, MultiExit(exit_layers=exits, rows=name))
        assert merged_checkpoint(str(base), str(adapter)) == folder
        block = read_multi_exit(folder)
        assert block is not None and block.rows_file is not None
        assert load_exit_rows(folder, block.rows_file).tolist() == list(exits)
        assert len(list(folder.glob("exit_rows/*"))) == 1
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    (adapter / BLOCK_FILE).unlink()
    assert read_multi_exit(merged_checkpoint(str(base), str(adapter))) is None
    assert capsys.readouterr().err == "", "merged once"

    tensors = load_file(adapter / "adapter_model.safetensors")
    halves = {name: tensor / 2 for name, tensor in tensors.items()}
    save_file(halves, adapter / "adapter_model.safetensors")
    again = merged_checkpoint(str(base), str(adapter))
    assert again != folder and again.name == folder.name
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(*(tensors_of(one)[name] for one in (again, folder)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora True"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"lora_alpha": None}, "lora_alpha None"),
    ],
)
def test_what_is_more_than_plain_lora_is_named(
    base: Path, make_adapter: MakeAdapter, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExitServeError, match=f"{message}.*Merge it with PEFT"):
        merged_checkpoint(str(base), str(make_adapter(base, **config)))


def _more_tensors(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, file)


def _cut_short(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _as_pickles(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def _inside(adapter: Path) -> None:
    files = list(adapter.iterdir())
    (adapter / "adapter").mkdir()
    for file in files:
        file.rename(adapter / "adapter" / file.name)


def _deep_exits(adapter: Path) -> None:
    write_multi_exit(adapter, MultiExit(exit_layers=(2, 6)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_more_tensors, r"holds 'base_model.model.lm_head.weight'.*plain LoRA"),
        (_cut_short, "not a complete safetensors file"),
        (_as_pickles, "has no adapter_model.safetensors"),
        (_inside, r"has no adapter_config.json.*give '.*mine/adapter'"),
        (_deep_exits, "multi_exit.json': exit layer 6 is out of range"),
    ],
)
def test_adapters_that_cannot_be_read(
    base: Path, make_adapter: MakeAdapter, spoil: Callable[[Path], None], message: str
) -> None:
    adapter = make_adapter(base)
    spoil(adapter)
    with pytest.raises(ExitServeError, match=message):
        merged_checkpoint(str(base), str(adapter))


def test_an_adapter_of_another_model_is_refused(
    base: Path, make_checkpoint: Any, make_adapter: MakeAdapter, quantised: Path
) -> None:
    other = make_checkpoint("gpt2")
    with pytest.raises(ExitServeError, match=r"for another model.*no map 'transformer\.h\.0\."):
        merged_checkpoint(str(base), str(make_adapter(other, name="gpt2", fan_in_fan_out=True)))
    wide = make_checkpoint("llama", hidden_size=64)
    adapter = make_adapter(wide, name="wide")
    with pytest.raises(ExitServeError, match=r"another model.*\[64, 3\] and .* do not fit"):
        merged_checkpoint(str(base), str(adapter))
    with pytest.raises(ExitServeError, match=r"is of type I8, and adapters are merged into F64"):
        merged_checkpoint(str(quantised), str(make_adapter(quantised, name="int8")))
    with pytest.raises(ExitServeError, match=r"no whole model but an adapter; give its base"):
        merged_checkpoint(str(adapter), str(adapter))


def test_a_cache_that_cannot_be_written_to(
    base: Path, make_adapter: MakeAdapter, merged_cache: Path
) -> None:
    adapter = make_adapter(base)
    merged_cache.write_text("a file")
    with pytest.raises(ExitServeError, match="HF_ASSETS_CACHE or HF_HOME"):
        merged_checkpoint(str(base), str(adapter))


COMMANDS = {
    "serve": "",
    "bench": "--out OUT",
    "calibrate": "--data FILE",
    "eval": "--data FILE --out OUT",
    "truncate": "--layers 3 --out OUT",
    "import": "--exit-layers 2 --out OUT",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a b c")
    more = COMMANDS[command].replace("OUT", str(tmp_path / "out")).replace("FILE", str(file))
    assert main([command, str(base), "--adapter", "nowhere", *more.split()]) == 2
    assert "no adapter directory at 'nowhere'" in capsys.readouterr().err


def test_its_exits_are_cut(
    base: Path, make_adapter: MakeAdapter, merged_cache: Path, tmp_path: Path
) -> None:
    adapter, out = make_adapter(base, exits=(3, 5)), tmp_path / "out"
    more = ["--adapter", str(adapter), "--out", str(out)]
    assert main(["truncate", str(base), "--layers", "4", *more]) == 0
    block, tensors = read_multi_exit(out), tensors_of(out)
    assert block is not None and block.exit_layers == (3,)
    right = {k: v for k, v in expected(base, adapter).items() if k in tensors}
    assert any("layers.3.mlp.down_proj" in name for name in right)
    for name, tensor in right.items():
        torch.testing.assert_close(tensors[name], tensor.float())  # one rounding in float32
    assert "`" + f"{base.name}+mine" + "`" in (out / "README.md").read_text()
