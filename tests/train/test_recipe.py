"""Recipes: what is allowed, and how a mistake is answered."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml

from exitserve.cli import main
from exitserve.errors import ExitServeError
from exitserve_training.arguments import training_arguments
from exitserve_training.models import build_config, build_model, task_for
from exitserve_training.recipe import load_recipe

from .conftest import logged

RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").rglob("*.yaml"))
MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_committed_recipes_can_start_and_bound_their_data(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.output_dir.startswith("runs/")
    data = recipe.data
    if data.dataset is not None and data.format == "text":
        assert data.order == "source", "a corpus is read as a stream"
    if path.parent.name == "papers":
        assert data.max_bytes or data.max_rows
    if recipe.config is not None:
        config = build_config(recipe.config)
        with torch.device("meta"):
            build_model(config, task_for(config.model_type, data.format))


def test_overrides_replace_nested_keys(make_recipe: MakeRecipe) -> None:
    recipe = load_recipe(
        make_recipe(),
        ["seed=7", "training.learning_rate=2e-3", "data.max_bytes=10", "exit_layers=8,15"],
    )
    assert recipe.seed == 7
    assert recipe.training["learning_rate"] == pytest.approx(2e-3)
    assert recipe.training["max_steps"] == 4, "the other keys of the section stay"
    assert recipe.data.max_bytes == 10
    assert recipe.exit_layers == [8, 15]
    assert load_recipe(make_recipe(), ["exit_layers=all"]).exit_layers == "all"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objectve=[ce]", "'objectve' is unknown. Did you mean 'objectives'"),
        ("warmup=3", "'warmup' is unknown. The fields of .* under 'training'"),
        ("learning_rate=1e-4", "'learning_rate' is unknown. Did you mean 'training.learning_rate'"),
        ("base_model=x", "Did you mean 'model'"),
        ("dataset=x", "Did you mean 'data.dataset'"),
        ("lora.r=8", "'lora.r' is unknown. Did you mean 'lora.rank'"),
        ("exit_layers=some", "'exit_layers': Input should be 'all' .* or: .* a valid integer"),
        ("lora={rank:4}", "'lora.rank:4' is unknown. YAML wants a space after a colon"),
        ("objectives=[]", "'objectives': List should have at least 1 item"),
        ("objectives=[alligned]", "'alligned' is unknown. Did you mean 'aligned'"),
        ("objectives=[{weight: 1}]", "objective None is unknown. Allowed: ce, aligned"),
        ("objectives=[{name: aligned, wieght: 1}]", "wieght' is unknown. Did you mean 'weight'"),
        ("objectives=[ce, {name: simreg, weight: -1}]", "'objectives.1.weight': .*greater than"),
        ("objectives=[ce, {name: simreg, weight: lots}]", "'objectives.1.weight'"),
        ("objectives=[ce, {name: dispersion, layers: some}]", "'objectives.1.layers'"),
        ("objectives=[{name: aligned, weights: square}]", "'objectives.0.weights'"),
        ("objectives=[ce, ce]", "'ce' is given twice; give it once"),
        ("objectives=[ce, simreg, simreg]", "twice; give it once, or with other layers"),
        ("objectives=[simreg]", "do not train the model for its task; add one of aligned, ce"),
        ("objectives=[{name: ce, weight: 0}]", "do not train the model"),
        ("objectives=[ce, aligned]", "both train the last layer"),
        ("objectives=[{name: ce, balanced: true}]", "'ce': balanced is for classifiers"),
        ("objectives=[headless, separate_classifiers]", "choose one"),
        ("exit_aware={share: 2}", "'exit_aware.share'"),
        ("exit_aware={shar: 1}", "'exit_aware.shar' is unknown. Did you mean 'share'"),
        ("exit_aware={thresholds: [0.5, 0.3]}", "ascending"),
        ("lora={rank: 4}", "lora adapts a model"),
        ("data.loss_on=all", "data.loss_on has no effect with data.format=text, only with chat"),
        ("mask_share=0", "'mask_share'"),
        ("data.file=[a]", "'data.file' is unknown. Did you mean 'files'"),
        ("tokenizer.train_bpe.vocabsize=300", "Did you mean 'vocab_size'"),
        ("seed=minus", "'seed'"),
        ("data.validation_fraction=1.5", "'data.validation_fraction'"),
        ("data.files=[]", "data needs one of data.files"),
        ("model=gpt2", "exactly one of model"),
        ("config.architecture=null", "architecture"),
        ("tokenizer=null", "from scratch. needs a tokenizer"),
        ("tokenizer.path=x", "exactly one of tokenizer.path"),
        ("resume", "not key=value"),
        ("=3", "not key=value"),
        ("a..b=3", "not key=value"),
        ("seed=[1", "not valid YAML"),
    ],
)
def test_mistakes_are_named(make_recipe: MakeRecipe, override: str, message: str) -> None:
    with pytest.raises(ExitServeError, match=message) as caught:
        load_recipe(make_recipe(), [override])
    assert "\n" not in str(caught.value)


def test_what_home_and_names_of_arguments_mean(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, train: Train
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["output_dir=~/out", "training.metric_for_best_model=eval_loss_layer_1"]
    recipe = load_recipe(make_recipe(), given)
    assert recipe.output_dir == str(tmp_path / "out")
    assert not training_arguments(recipe).greater_is_better, "its name does not end in loss"
    training_arguments(load_recipe(make_recipe(), ["training.save_strategy=no"]))
    with pytest.raises(ExitServeError, match=r"set 'training\.gradient_checkpointing' instead"):
        train(make_recipe(), "training.activation_checkpointing=true")
    with pytest.raises(ExitServeError, match="no 'bleu', only eval_loss"):
        train(make_recipe(), *given, "training.metric_for_best_model=bleu")


def test_all_mistakes_are_named_at_once(make_recipe: MakeRecipe, train: Train) -> None:
    with pytest.raises(ExitServeError) as caught:
        load_recipe(make_recipe(), ["lr=3", "lora.r=8", "seed=x"])
    for message in ("'lr' is unknown", "Did you mean 'lora.rank'", "'seed': .*given: 'x'"):
        assert re.search(message, str(caught.value))
    with pytest.raises(ExitServeError) as caught:
        train(make_recipe(), "training.seed=1", "training.max_steps=3.7", "training.lr=1")
    for message in ("set 'seed' instead", "'training.max_steps': ", "'training.learning_rate'?"):
        assert message in str(caught.value)


def test_editors_get_a_schema(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    good = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RECIPES]
    for recipe in good:
        jsonschema.validate(recipe, schema)
    for bad in ({"objectives": ["alligned"]}, {"training": {"lr": 1}}, {"data": {"packing": 3}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good[0], **bad}, schema)


CONTRADICTIONS = {
    r"adagc replaces training\.max_grad_norm": ["adagc={}", "training.max_grad_norm=1.0"],
    r"adagc compares gradients.*training\.fp16 scales": ["adagc={}", "training.fp16=true"],
    "exit_aware freezes positions at exit layers": ["exit_aware={}", "exit_layers=[]"],
    "which lora does not": ["config=null", "model=x", "lora={}", "head_from_embeddings=true"],
    "exclude each other": ["resume=true", "overwrite=true"],
    "greater than or equal to 2": ["data.own_chats={count: 1}"],
    "data.own_chats has no effect with data.format=text": ["data.own_chats={count: 9}"],
    "trained model writes; give model": ["data.own_chats={count: 9}", "data.format=chat"],
    "names a split of data.dataset": ["data.validation_split=test"],
    "both say what": ["data.dataset=x", "data.validation_split=a", "data.validation_files=[b]"],
    "must be linear or cosine": ["max_minutes=1", "training.lr_scheduler_type=constant"],
    "'max_minutes': .*greater than 0": ["max_minutes=0"],
    r"config\.num_hidden_layers instead": ["grow_to_layers=8"],
    "lr_milestones excludes": ["lr_milestones=[0.5]", "max_minutes=1"],
    "set bf16: true": ["weights=bfloat16"],
    "AdamW with Kahan sums": ["weights=bfloat16", "bf16=true", "optimizer=muon"],
    "leave optimizer and training.optim out": [
        "weights=bfloat16",
        "bf16=true",
        "training.optim=adafactor",
    ],
    "needs all lines in memory": ["data.order=source", "data.max_repeated_lines=0.5"],
    "data.order has no effect with data.format=chat": ["data.order=source", "data.format=chat"],
}


def test_the_rate_falls_at_milestones(
    make_recipe: MakeRecipe, train: Train, tmp_path: Path
) -> None:
    training = {"max_steps": 8, "learning_rate": 1.0, "logging_steps": 1}
    train(make_recipe(lr_milestones=[0.5, 0.75], training=training))
    rates = [entry["learning_rate"] for entry in logged(tmp_path / "out")]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_between_keys(make_recipe: MakeRecipe, message: str) -> None:
    with pytest.raises(ExitServeError, match=message):
        load_recipe(make_recipe(), CONTRADICTIONS[message])


def test_a_recipe_lies_over_its_base(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    make_recipe()
    above = tmp_path / "above.yaml"
    above.write_text("base: recipe.yaml\nexit_layers: [3]\ntraining: {max_steps: 9}\n")
    recipe = load_recipe(above, ["seed=5"])
    assert recipe.exit_layers == [3], "lists are replaced"
    assert recipe.training["max_steps"] == 9
    assert recipe.training["learning_rate"] == pytest.approx(1e-3), "mappings go key by key"
    assert recipe.seed == 5
    for content, message in (
        ("base: absent.yaml", r"no recipe at '.*absent\.yaml' \(base of"),
        ("base: above.yaml", "is its own base"),
    ):
        above.write_text(content)
        with pytest.raises(ExitServeError, match=message):
            load_recipe(above)


@pytest.mark.parametrize(
    ("content", "message"),
    [("a: [", "not valid YAML"), ("- a", "keys and values"), ("", "keys and values")],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ExitServeError, match=message):
        load_recipe(path)
    with pytest.raises(ExitServeError, match="no recipe at"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=[absent/*.txt]", "no data file matches 'absent/"),
        ("data.text_field=body", None),
        ("training.lerning_rate=1", "'training.lerning_rate' is unknown. Did you mean 'learning"),
        ("training.learning_rate=abc", "'training.learning_rate': Input should be a valid number"),
        ("training.per_device_train_batch_size=0", "greater than or equal to 1"),
        ("training.per_device_eval_batch_size=0", "greater than or equal to 1"),
        ("training.learning_rate=-1", "greater than or equal to 0"),
        ("training.lr_scheduler_type=cosine_with_min_lr", "'training': One of min_lr or"),
        ("training.save_strategy=best", "best needs metric_for_best_model, such as eval_loss"),
        ("seed=4294967296", "less than 4294967296"),
        ("training.push_to_hub=true", "would upload the data too"),
        ("training.gradient_checkpointing=maybe", "should be a valid boolean"),
        ("training.use_liger_kernel=true", "use_liger_kernel needs `pip install liger-kernel`"),
        ("training.optim=grokadamw", "'training': Please install grokadamw"),
        ("training.eval_strategy=sometimes", "'training'"),
        ("training.label_names=[classes]", r"label_names' is always \['labels'\] here"),
        (
            "training.report_to=tensorbord",
            "'tensorbord' is unknown, or .* choose among tensorboard.*Did you mean 'tensorboard'",
        ),
        ("training.report_to=wandb", "its package is not installed; choose among tensorboard"),
        ("training.deepspeed=zero3.json", "DeepSpeed is not supported; shard with FSDP 2"),
        ("config.hiden_size=8", "'config.hiden_size' is unknown to llama. Did you mean 'hidden"),
        ("config.hidden_act=sillu", "'config': KeyError: 'sillu'"),
        ("config.num_attention_heads=3", "'config': .* not a multiple of"),
        ("config.architecture=lama", "not supported; allowed: .* Did you mean 'llama'"),
        ("exit_layers=[4, 9]", "exit layer 9 is out of range: the model has 4 layers"),
        ("objectives=[{name: aligned, layers: [9]}]", "'aligned': layer 9 is out of range"),
        ("objectives=[ce, {name: simreg, layers: [5]}]", "'simreg': layer 5 is out of range"),
        ("objectives=[ce, {name: nitp, target_layer: 0}]", "'nitp': layer 0 is out of range"),
        ("objectives=[ce, {name: dispersion, layers: []}]", "layers is empty"),
        ("objectives=[{name: aligned, weights: [1, 2]}]", r"weights has 2 numbers.*\[1, 2, 4\]"),
        ("objectives=[{name: aligned, weights: [.inf, 1, 1]}]", "must be finite, non-negative"),
        ("objectives=[ce, {name: kl_to_last, layers: last}]", "needs a layer below the last"),
        ("mask_share=0.2", "'mask_share' is for masked models"),
        ("data.sequence_length=128", "longer than the model's context of 64 tokens"),
        ("data.sequence_length=100000", "fewer than data.sequence_length=100000 tokens"),
        ("config.vocab_size=100", r"only 100; .*resize_token_embeddings\(292\)"),
        ("resume=true", "no checkpoint in"),
    ],
)
def test_runs_that_cannot_be_done_leave_no_folder(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train, override: str, message: str | None
) -> None:
    if message is None:
        assert train(make_recipe(), override, "training.max_steps=1") == 0
        return
    with pytest.raises(ExitServeError, match=message) as caught:
        train(make_recipe(), override)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_trained(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    recipe = make_recipe(config=None, tokenizer={"train_bpe": {"vocab_size": 300}}, model="absent")
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ExitServeError, match="no model directory at"):
        train(recipe, "model=./absent")
    with pytest.raises(ExitServeError, match=r"has no config\.json"):
        train(recipe, f"model={folder}")
    for config, message in (
        ({"model_type": "t5", "architectures": ["T5Model"]}, "'t5'; supported"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel, not a masked"),
        ({"model_type": "llama"}, "weights of .* could not be loaded"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification, not a causal",
        ),
    ):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(ExitServeError, match=message):
            train(recipe, f"model={folder}")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ExitServeError, match=r"weights of .* could not be loaded: .*header"):
        train(recipe, f"model={folder}")


def test_a_used_output_folder_is_not_touched(
    make_recipe: MakeRecipe, tmp_path: Path, train: Train
) -> None:
    (tmp_path / "out").mkdir()
    keep = tmp_path / "out" / "precious.txt"
    keep.write_text("mine", encoding="utf-8")
    with pytest.raises(ExitServeError, match="exists and is not empty"):
        train(make_recipe())
    with pytest.raises(ExitServeError, match="holds no earlier training run"):
        train(make_recipe(), "overwrite=true")
    with pytest.raises(ExitServeError, match=r"cannot be written, for '.*precious.txt' refuses"):
        train(make_recipe(), f"output_dir={keep}/deeper")
    keep.unlink()
    assert train(make_recipe(), "training.max_steps=1") == 0
    weights = tmp_path / "out" / "model.safetensors"
    with pytest.raises(ExitServeError, match="no data file"):
        train(make_recipe(), "overwrite=true", "data.files=[absent.txt]")
    assert weights.is_file(), "nothing is deleted for a run that fails"
    first = weights.stat().st_mtime_ns
    assert train(make_recipe(), "overwrite=true", "training.max_steps=1") == 0
    assert weights.stat().st_mtime_ns > first
    with pytest.raises(ExitServeError, match=r"'seed' \(4 instead of 0\) differs"):
        train(make_recipe(), "resume=true", "seed=4")
