"""The share of the machine's products that training reaches: what is counted, and what is said."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from exitserve_training import throughput
from exitserve_training.arguments import training_arguments
from exitserve_training.forward import ExitPass, MultiExitForward
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import model_parts
from exitserve_training.recipe import Recipe, parse_recipe

LAYERS = 6


class Products(TorchDispatchMode):
    """Counts the operations of matrix products. (Torch's own counter hooks modules, which the
    losses' gradients in forward do not bear.)"""

    flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            one, other = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.flops += 2.0 * one.numel() * other.shape[-1]
        return func(*args, **(kwargs or {}))


def test_a_busy_moment_is_not_the_machine() -> None:
    calls = itertools.count()

    def work() -> None:
        if next(calls) == 0:
            time.sleep(0.4)  # as long as it is timed; five calls are made all the same

    assert throughput._seconds(work, torch.device("cpu")) < 0.01


KL = {"name": "kl_to_last"}


def a_recipe(objectives: list[Any], **keys: Any) -> Recipe:
    data = {"files": ["-"], "sequence_length": 64}
    exits = {"exit_layers": [2, 4]}
    return parse_recipe(
        {"output_dir": "-", "model": "-", "data": data, "objectives": objectives, **exits, **keys}
    )


@pytest.mark.parametrize(
    "objectives",
    [
        ["ce"],
        ["aligned"],
        [{"name": "aligned", "sample": 1}],
        [{"name": "aligned", "sample": 1, "alternate": False}, KL],
        [{"name": "aligned", "layers": "all", "sample": 2}, {**KL, "layers": [3]}],
        [{"name": "aligned", "sample": 1, "alternate": False}, {**KL, "teacher": "other"}],
    ],
)
def test_products_are_those_of_a_step(
    objectives: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Against a count of all products, forward and backward, over two steps that may alternate."""
    recipe = a_recipe(objectives)
    torch.manual_seed(0)
    # Wide, so that what is left out (norms, rotations, masks) is small.
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=700,
        attn_implementation="eager",  # of which torch counts all products, masked ones too
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(
        "exitserve_training.objectives.aligned.options.KLToLastOptions.teacher_path",
        lambda self, _model: self.teacher and str(tmp_path),
    )
    parts = model_parts(model)
    built = Objectives(recipe.objectives, BuildContext([2, 4], LAYERS, 128, parts.head, seed=0))
    forward = MultiExitForward(model, parts, built, (LAYERS,))
    ids = torch.randint(700, (2, 64))
    steps = 2
    with Products() as counter:
        for step in range(steps):
            loss, _ = model(input_ids=ids, exit_pass=ExitPass(step, total_steps=steps))
            loss.backward()
    forward.remove()
    expected = throughput.flops_per_token(recipe, model_parts(model), config) * ids.numel() * steps
    # Eager attention computes the masked half too (2 % here); of what is drawn, two steps may draw
    # another number of layers than the mean.
    assert counter.flops == pytest.approx(expected, rel=0.06)


def test_a_slow_gpu_is_told_why_once() -> None:
    recipe = a_recipe(["aligned"], training={"per_device_train_batch_size": 2})
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, hidden_size=32, vocab_size=90))
    arguments: Any = training_arguments(recipe)
    meter = throughput.Throughput(recipe, arguments, model_parts(model), model.config)
    assert meter.share(0) is None
    shares = [meter.share(tokens) for tokens in (10, 20)]
    assert all(share is not None and share > 0 for share in shares)
    assert meter.warning(0.01) is None, "a CPU is not told"
    on_gpu = SimpleNamespace(
        device=torch.device("cuda"),
        world_size=1,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
    )
    meter._arguments = on_gpu
    assert meter.warning(0.2) is None
    said = meter.warning(0.01)
    assert said is not None
    for part in ("1% of this GPU", "128 tokens", "compile_layers=true", "bf16=true"):
        assert part in said
    meter.share(30)
    assert meter.warning(0.01) is None, "said once"
