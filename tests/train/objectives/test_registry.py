"""The registry of objectives: one entry is all that a new one needs."""

import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from exitserve.errors import ExitServeError
from exitserve_training.losses import OutputHead
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext, ObjectiveOptions
from exitserve_training.objectives.registry import OBJECTIVES
from exitserve_training.objectives.weighted_sum import build_objectives
from exitserve_training.recipe import load_recipe

MakeRecipe = Callable[..., Path]
Train = Callable[..., int]


class ToyOptions(ObjectiveOptions):
    implementation = "toy_objective:Toy"
    is_main = True
    excludes: ClassVar[Mapping[str, str]] = {"headless": "a toy needs a head"}

    name: Literal["toy"] = "toy"
    scale: float = 2.0


class Toy(Objective):
    """The mean square of the first layer's states."""

    def __init__(self, options: ToyOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.scale = options.scale

    def layers(self, step: int) -> Sequence[int]:
        return (1,)

    def forward(self, batch: LossInputs) -> tuple[Tensor, Metrics]:
        loss = self.scale * batch.hidden[1].square().mean()
        return loss, {"toy_loss": loss.detach()}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy objective's module, and its one entry in the registry."""
    module = types.ModuleType("toy_objective")
    module.Toy = Toy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_objective", module)
    monkeypatch.setitem(OBJECTIVES, "toy", ToyOptions)


@pytest.mark.usefixtures("toy")
def test_a_new_objective_is_one_entry(
    make_recipe: MakeRecipe, train: Train, tmp_path: Path
) -> None:
    path = make_recipe(objectives=[{"name": "toy", "scale": 3.0}])
    (options,) = load_recipe(path).objectives
    assert options == ToyOptions(scale=3.0)
    for objectives, message in (
        ("[{name: toy, scal: 1}]", "'objectives.0.scal' is unknown. Did you mean 'scale'"),
        ("[toy, headless]", "'toy' and 'headless' exclude each other: a toy needs a head"),
        ("[toyy]", "Did you mean 'toy'"),
        ("[simreg]", "add one of aligned, ce, headless, separate_classifiers, toy"),
    ):
        with pytest.raises(ExitServeError, match=message):
            load_recipe(path, [f"objectives={objectives}"])
    assert train(path, "training.max_steps=2") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["objectives"] == ["toy"]
    assert report["metrics"]["toy_loss"] > 0.0


def test_every_name_builds_its_objective() -> None:
    torch.manual_seed(0)
    head = OutputHead(nn.LayerNorm(8), nn.Linear(8, 16))
    context = BuildContext((1, 2), num_layers=4, hidden_size=8, head=head, seed=0)
    for name, options in OBJECTIVES.items():
        built = build_objectives([options()], context)
        (objective,) = built.members
        assert objective.name == name == options().name
        assert type(objective).__module__.startswith("exitserve_training.objectives.")
        assert set(objective.layers(0)) == set(options().layers_used((1, 2), 4))


def test_the_head_is_trained_as_the_options_say() -> None:
    """`trains_head` holds for each objective: the trainer freezes the head where none does."""
    vocab, width, layers = 16, 8, 4
    labels = torch.randint(0, vocab, (2, 6), generator=torch.Generator().manual_seed(0))
    embedding = nn.Embedding(vocab, width)
    for name, options in OBJECTIVES.items():
        torch.manual_seed(0)
        head = OutputHead(nn.LayerNorm(width), nn.Linear(width, vocab))
        context = BuildContext((1, 2), layers, width, head, seed=0)
        hidden = {d: torch.randn(2, 6, width, requires_grad=True) for d in range(1, layers + 1)}
        batch = LossInputs(
            step=0,
            hidden=hidden,
            labels=labels,
            mask=torch.ones(2, 6, dtype=torch.bool),
            classifier=head,
            norm=head.norm,
            embed=embedding,
            vocab_size=vocab,
        )
        options().build(context)(batch)[0].backward()
        reached = head.linear.weight.grad is not None
        assert reached == options.trains_head, name
