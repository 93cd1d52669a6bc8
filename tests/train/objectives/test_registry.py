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
from exitserve_training.objectives.nitp.options import NITPOptions
from exitserve_training.objectives.objective import LossInputs, Metrics, Objective
from exitserve_training.objectives.options import BuildContext, ObjectiveOptions
from exitserve_training.objectives.registry import OBJECTIVES
from exitserve_training.objectives.simreg.options import SimRegOptions
from exitserve_training.objectives.weighted_sum import Objectives
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


LAYERS, WIDTH, VOCAB = 4, 8, 16


def example() -> tuple[BuildContext, LossInputs]:
    """What objectives are built for, and a batch of random states."""
    torch.manual_seed(0)
    head = OutputHead(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
    states = {d: torch.randn(2, 6, WIDTH, requires_grad=True) for d in range(1, LAYERS + 1)}
    batch = LossInputs(
        step=0,
        hidden=states,
        labels=torch.randint(0, VOCAB, (2, 6)),
        mask=torch.ones(2, 6, dtype=torch.bool),
        classifier=head,
        norm=head.norm,
        embed=nn.Embedding(VOCAB, WIDTH),
    )
    return BuildContext((1, 2), LAYERS, WIDTH, head, seed=0), batch


def test_every_name_builds_its_objective() -> None:
    context, _ = example()
    for name, options in OBJECTIVES.items():
        built = Objectives([options()], context)
        (objective,) = built.members
        assert objective.name == name == options().name
        assert type(objective).__module__.startswith("exitserve_training.objectives.")
        assert set(objective.layers(0)) == set(options().layers_used((1, 2), LAYERS))


def test_the_head_is_trained_as_the_options_say() -> None:
    """`trains_head` holds for each objective: the trainer freezes the head where none does."""
    for name, options in OBJECTIVES.items():
        context, batch = example()
        options().build(context)(batch)[0].backward()
        reached = batch.classifier.linear.weight.grad is not None
        assert reached == options.trains_head, name


def test_several_layers_are_a_mean_and_an_objective_can_be_given_twice() -> None:
    context, batch = example()
    at = {one: SimRegOptions(layers=one).build(context) for one in ("last", "exits")}
    each = [SimRegOptions(layers=[layer]).build(context)(batch)[0] for layer in (1, 2, 4)]
    found = {one: objective(batch)[0] for one, objective in at.items()}
    torch.testing.assert_close(found["exits"], torch.stack(each).mean())
    assert found["last"] == each[-1]
    chosen = [SimRegOptions(weight=0.5), SimRegOptions(weight=0.1, layers="exits")]
    both = Objectives([*chosen, NITPOptions(), NITPOptions(target_layer=2)], context)
    total, metrics = both(batch)
    losses = [metrics[f"{name}_loss{n}"] for name in ("simreg", "nitp") for n in ("", "_2")]
    assert losses[:2] == [found["last"], found["exits"]]
    torch.testing.assert_close(total, 0.5 * losses[0] + 0.1 * losses[1] + losses[2] + losses[3])
    parameters = {name.rpartition(".projector.")[0] for name, _ in both.named_parameters()}
    assert parameters == {"parts.nitp", "parts.nitp_2"}
    assert {"simreg_loss_2", "effective_rank_2"} <= set(both.train(False).measure(batch))
