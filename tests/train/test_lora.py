"""LoRA: adapters alone are trained, runs resume, and the result is an ordinary checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from exitserve.checkpoint.adapters import merged_checkpoint
from exitserve.checkpoint.block import read_multi_exit
from exitserve.errors import ExitServeError
from exitserve_training.models import build_config, build_model
from exitserve_training.parts import model_parts
from exitserve_training.tokenization import train_bpe
from exitserve_training.trainer import MultiExitTraining

from ..shapes import LLAMA

Train = Callable[..., int]
MakeRecipe = Callable[..., Path]

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2}
BASES: dict[str, dict[str, Any]] = {
    "tied llama": {**LLAMA, "tie_word_embeddings": True},
    "untied llama": {**LLAMA, "tie_word_embeddings": False},
    "gpt2": {"architecture": "gpt2", "max_position_embeddings": 64, **SIZES},
}


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[str, Path]:
    """Untrained small models by kind, each with the same tokenizer."""
    tokenizer = train_bpe(text_file.read_text(encoding="utf-8").splitlines(), 300, 64)
    folders = {}
    for name, sizes in BASES.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp("base")
        build_model(build_config(sizes, tokenizer)).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture
def lora_recipe(make_recipe: MakeRecipe, bases: dict[str, Path]) -> MakeRecipe:
    """A recipe that fine-tunes a small model with adapters."""

    def make(base: str = "tied llama", **lora: Any) -> Path:
        given = {"config": None, "tokenizer": None, "model": str(bases[base])}
        return make_recipe(**given, lora={"rank": 4, **lora})

    return make


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The trained model's tensors just before the adapters are merged."""
    states: list[dict[str, Tensor]] = []
    save = MultiExitTraining.save_result

    def spy(trainer: MultiExitTraining, *given: Any) -> None:
        model: Any = trainer.model
        trained = [name for name, tensor in model.named_parameters() if tensor.requires_grad]
        assert all("lora_" in name or "exit_objectives" in name for name in trained)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        save(trainer, *given)

    monkeypatch.setattr(MultiExitTraining, "save_result", spy)
    return states


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as transformers loads them."""
    state: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


@torch.no_grad()
def plain_losses(folder: Path, depths: list[int]) -> dict[int, float]:
    """Loss by depth on the kept validation data, from transformers' own hidden states."""
    data = load_from_disk(str(next((folder / "data").glob("*/"))))["validation"]
    ids = torch.tensor(data["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    parts = model_parts(model)
    states = model(ids, output_hidden_states=True).hidden_states
    losses = {}
    for depth in depths:
        # transformers puts the last state behind the norm already.
        normed = states[depth] if depth == parts.num_layers else parts.norm(states[depth])
        logits = model.get_output_embeddings()(normed)[:, :-1]
        losses[depth] = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    return losses


@pytest.mark.parametrize("base", ["tied llama", "untied llama", "gpt2"])
def test_the_result_is_an_ordinary_checkpoint(
    lora_recipe: MakeRecipe,
    bases: dict[str, Path],
    seen: list[dict[str, Tensor]],
    tmp_path: Path,
    train: Train,
    merged_cache: Path,
    base: str,
) -> None:
    assert train(lora_recipe(base), "training.max_steps=10", "training.learning_rate=0.01") == 0
    out = tmp_path / "out"

    # Before merging, the model's own tensors are those of the base, bit for bit.
    before = weights(bases[base])
    own = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in seen[0].items()
        if "lora_" not in name
    }
    assert own.keys() == before.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in before.items())

    # After it, the maps inside the layers differ, and nothing else does.
    after = weights(out)
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    adapted = {name for name in seen[0] if ".base_layer.weight" in name}
    prefix = "base_model.model."
    assert changed == {name.removeprefix(prefix).replace(".base_layer.", ".") for name in adapted}
    assert len(changed) == 4 * (4 if base == "gpt2" else 7)

    # The files are a base model's: the same tensors, and nothing of PEFT's.
    stored, theirs = (load_file(folder / "model.safetensors") for folder in (out, bases[base]))
    assert {name: t.shape for name, t in stored.items()} == {n: t.shape for n, t in theirs.items()}
    assert [*out.glob("adapter_*"), *out.rglob("README.md")] == [out / "README.md"]
    block = read_multi_exit(out)
    assert block is not None and block.exit_layers == (1, 2)
    model = AutoModelForCausalLM.from_pretrained(out)
    tied = base != "untied llama"
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    # And its losses, without code of ours, are those of the report.
    report = read(out, "report.json")
    depths = [1, 2, 4]
    for depth, loss in plain_losses(out, depths).items():
        assert report["layers"][str(depth)]["loss"] == pytest.approx(loss, rel=1e-4)
        assert loss < report["initial_layers"][str(depth)]["loss"]

    # Beside it is the adapter: PEFT's, which transformers puts on the base that it names, ...
    adapter = out / "adapter"
    assert read(adapter, "adapter_config.json")["base_model_name_or_path"] == str(bases[base])
    assert not (adapter / "tokenizer.json").exists(), "its base's"
    adapted = AutoModelForCausalLM.from_pretrained(adapter)
    assert any("lora_" in name for name, _ in adapted.named_parameters())
    ids = torch.arange(20)[None]
    # Of (W + BA) x and Wx + BAx, float32 rounds every sum of some 64 numbers otherwise.
    torch.testing.assert_close(adapted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    # ... and ours, with the exits. What we merge is what PEFT merged.
    merged = merged_checkpoint(str(bases[base]), str(adapter))
    assert read_multi_exit(merged) == block
    for name, tensor in load_file(merged / "model.safetensors").items():
        # One rounding of float32 of each weight, and one of what is added, which is smaller.
        torch.testing.assert_close(tensor, stored[name], rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("base", ["tied llama", "gpt2"])
def test_a_resumed_run_makes_the_same_steps(
    resumes: Callable[..., None], bases: dict[str, Path], base: str
) -> None:
    resumes(
        model=str(bases[base]),
        config=None,
        tokenizer=None,
        objectives=["aligned", {"name": "nitp", "weight": 0.5}],
        lora={"rank": 4, "dropout": 0.2},
    )


BAD_TARGETS: dict[str, Any] = {
    "no such map": (["foo_proj"], r"lora.target_modules.*foo_proj"),
    "one of two": (["q_proj", "o_prj"], r"no module is called 'o_prj'. Did you mean 'o_proj'"),
    "no such pattern": ("foo_.*", r"lora.target_modules.*foo_"),
    "broken pattern": ("(", r"lora.target_modules"),
    "head": (["q_proj", "lm_head"], r"lm_head.* includes the embeddings or the head"),
    "embeddings": (["embed_tokens"], r"includes the embeddings or the head"),
}


# PEFT warns of tied embeddings as it adapts them; what is tested refuses them.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("case", BAD_TARGETS)
def test_target_modules_that_do_not_fit_are_refused(
    lora_recipe: MakeRecipe, train: Train, tmp_path: Path, case: str
) -> None:
    targets, message = BAD_TARGETS[case]
    with pytest.raises(ExitServeError, match=message) as error:
        train(lora_recipe(target_modules=targets))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
