"""Recipes: one YAML file describes one training run; `key=value` on the command line overrides.

This module imports neither torch nor transformers, so that a recipe can be checked at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from exitserve.errors import ExitServeError
from exitserve_training.data_recipe import DataRecipe, TokenizerRecipe
from exitserve_training.mistakes import explain
from exitserve_training.objectives.aligned.options import AlignedOptions
from exitserve_training.objectives.registry import AnyObjective, check_objectives
from exitserve_training.strict import Listed, Place, Strict


class ExitAware(Strict):
    """Freeze positions at exit layers during the forward pass, as serving does."""

    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of sequences with frozen positions. (docs/training.md compares.)"""
    thresholds: tuple[float, float] = (0.3, 0.95)
    """Freeze where an exit is more confident than a threshold, drawn by each sequence from here."""
    longest_prompt: float = Field(default=0.25, ge=0.0, le=1.0)
    """A random part of each sequence, up to this share, is prompt and runs at full depth."""
    start: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Begin after this share of the steps."""

    @model_validator(mode="after")
    def _consistent(self) -> ExitAware:
        low, high = self.thresholds
        if not 0.0 <= low <= high < 1.0:
            raise ValueError(
                f"exit_aware.thresholds {list(self.thresholds)} must be two numbers in "
                f"0..1, ascending, the second below 1"
            )
        return self


class Lora(Strict):
    """Train low-rank adapters, which are merged into the checkpoint at the end."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | list[str] = "all-linear"
    """As PEFT takes them; `all-linear` is every linear map but the head."""


class AdaGCClipping(Strict):
    """AdaGC instead of clipping by the global norm; the SimReg paper's lambda and beta."""

    ratio: float = Field(default=1.04, ge=1.0, allow_inf_nan=False)
    beta: float = Field(default=0.99, ge=0.0, lt=1.0)
    warmup_steps: int = Field(default=100, ge=0)


def _aligned() -> list[AnyObjective]:
    return [AlignedOptions()]


class Recipe(Strict):
    """Everything about one training run."""

    output_dir: Place
    data: DataRecipe
    model: Place | None = None
    """Directory or hub id of a model to fine-tune."""
    config: dict[str, Any] | None = None
    """From scratch instead: `architecture` (llama, qwen2, ...) and that family's sizes."""
    tokenizer: TokenizerRecipe | None = None
    """Default: the one of `model`."""
    objectives: Annotated[list[AnyObjective], Listed] = Field(
        default_factory=_aligned, min_length=1
    )
    """What to minimise: names, or names with options; see `docs/training.md`."""
    exit_layers: Literal["all"] | Annotated[list[int], Listed] = "all"
    """Where the model may stop: written into the checkpoint, and evaluated."""
    exit_aware: ExitAware | None = None
    lora: Lora | None = None
    adagc: AdaGCClipping | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw`: what `training.optim` says. `muon`: Muon for the matrices inside the layers."""
    lr_milestones: list[Annotated[float, Field(gt=0.0, lt=1.0)]] = Field(default_factory=list)
    """Divide the learning rate by 10 after each of these shares of the steps (MultiStepLR)."""
    grow_to_layers: int | None = Field(default=None, ge=2)
    """Make `model` deeper before training: so many layers, a multiple of its own."""
    head_from_embeddings: bool = False
    """Begin with the input embeddings as LM head: recovers the head of a headless model."""
    mask_share: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Masked language models: share of tokens that are masked."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Fields of Hugging Face `TrainingArguments`."""
    max_minutes: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """End training after this time; the learning rate falls by the clock, and is 0 at the end."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    bf16: bool = False
    """Compute in bfloat16 by autocast; weights and optimizer stay float32."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: weights and AdamW's states too, with Kahan sums (torch-optimi); needs `bf16`."""
    attn_implementation: (
        Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] | None
    ) = None
    """As transformers calls them; null: what it chooses. Checkpoints do not keep it."""
    compile_layers: bool = False
    """`torch.compile` each decoder layer; needs a C compiler, pays on runs of minutes or more."""
    resume: bool = False
    """Continue from the newest checkpoint in `output_dir`."""
    overwrite: bool = False
    """Empty `output_dir` first if it exists."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.model is None) == (self.config is None):
            raise ValueError("give exactly one of model (to fine-tune) and config (from scratch)")
        if self.config is not None and not isinstance(self.config.get("architecture"), str):
            raise ValueError("config needs architecture, for example config.architecture=llama")
        images = self.data.format == "images"
        if images and self.tokenizer is not None:
            raise ValueError("tokenizer has no effect on images; leave it out")
        if self.config is not None and self.tokenizer is None and not images:
            raise ValueError(
                "config (from scratch) needs a tokenizer, "
                "for example tokenizer.train_bpe.vocab_size=4096"
            )
        check_objectives(self.objectives, self.data.is_classification)
        for key in ("exit_aware", "lora", "head_from_embeddings"):
            if self.data.is_classification and getattr(self, key):
                raise ValueError(f"{key} is for language models, not for classifiers; leave it out")
        if self.exit_aware is not None and self.exit_layers == []:
            raise ValueError("exit_aware freezes positions at exit layers; set exit_layers")
        self._check_model_only()
        if self.lora is not None and self.head_from_embeddings:
            raise ValueError("head_from_embeddings trains the head, which lora does not")
        self._check_optimizer()
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other; set one of them to false")
        return self

    def _check_model_only(self) -> None:
        """Raises `ValueError` for what is done to a trained model, where there is none."""
        if self.data.own_chats is not None and self.model is None:
            raise ValueError("data.own_chats is what a trained model writes; give model")
        if self.lora is not None and self.config is not None:
            raise ValueError("lora adapts a model; give model instead of config, or leave lora out")
        if self.grow_to_layers is not None and self.config is not None:
            raise ValueError(
                "grow_to_layers makes a trained model deeper; give model, or say "
                "config.num_hidden_layers instead"
            )

    def _check_optimizer(self) -> None:
        """Raises `ValueError` for two keys that say what only one can."""
        shape = self.training.get("lr_scheduler_type", "linear")
        if self.max_minutes is not None and shape not in ("linear", "cosine"):
            raise ValueError(
                f"max_minutes lets the learning rate fall by the clock, so "
                f"training.lr_scheduler_type must be linear or cosine, not {shape}"
            )
        others = {"lr_scheduler_type", "warmup_steps"} & self.training.keys()
        if self.lr_milestones and (others or self.max_minutes):
            raise ValueError("lr_milestones excludes max_minutes and other schedules and warm-ups")
        if self.adagc is not None and self.training.get("max_grad_norm"):
            raise ValueError("adagc replaces training.max_grad_norm; leave one of them out")
        if self.adagc is not None and self.training.get("fp16"):
            raise ValueError(
                "adagc compares gradients with those of earlier steps, and training.fp16 scales "
                "them; use bf16: true, or leave adagc out"
            )
        if self.weights == "bfloat16":
            self._check_small_weights()
        if self.optimizer == "muon" and {"optim", "optim_args"} & self.training.keys():
            raise ValueError(
                "optimizer=muon is Muon with AdamW, and training.optim another optimizer; "
                "leave one of them out"
            )

    def _check_small_weights(self) -> None:
        """Raises `ValueError` for what cannot update weights of 8 bits' precision."""
        if not self.bf16:
            raise ValueError("weights=bfloat16 computes in bfloat16 too; set bf16: true")
        if self.optimizer != "adamw" or {"optim", "optim_args"} & self.training.keys():
            raise ValueError(
                "weights=bfloat16 is updated by AdamW with Kahan sums, because others lose small "
                "steps; leave optimizer and training.optim out, or weights"
            )


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `dotted.key=value` overrides (values are YAML).

    `base: other.yaml`, beside the recipe, gives the keys that it does not set itself.

    Raises:
        ExitServeError: no such file, invalid YAML, unknown keys (with the nearest valid ones), or
            bad values.
    """
    tree = _read(Path(path), ())
    for override in overrides:
        _apply(tree, override)
    return parse_recipe(tree)


def _read(file: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A recipe's keys, laid over those of the recipe it names as `base`."""
    if not file.is_file():
        needs = f" (base of '{above[-1]}')" if above else ""
        raise ExitServeError(
            f"no recipe at '{file}'{needs}; give a YAML file, see `exitserve train -h`."
        )
    if file.resolve() in above:
        raise ExitServeError(f"recipe '{file}' is its own base, by way of '{above[-1]}'.")
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"recipe '{file}' is not valid YAML: {reason}") from error
    if not isinstance(tree, dict):
        raise ExitServeError(f"recipe '{file}' must hold keys and values, such as `output_dir: x`.")
    base = tree.pop("base", None)
    if base is None:
        return tree
    return _laid_over(_read(file.parent / str(base), (*above, file.resolve())), tree)


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The keys of `above`, and those of `below` that it lacks; nested mappings likewise."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            value = _laid_over(under, value)
        merged[key] = value
    return merged


def parse_recipe(tree: dict[str, Any]) -> Recipe:
    """Checks a recipe given as a dictionary; raises `ExitServeError` with all mistakes."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ExitServeError(explain(error, Recipe)) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ExitServeError(f"override {override!r} is not key=value, such as seed=1.")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ExitServeError(f"the value of override {override!r} is not valid YAML.") from error
    # YAML 1.1 reads 1e-3 (no dot) as text; a number is meant.
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    node[parts[-1]] = value
