"""Masked language modelling: what is hidden, and that its loss is transformers' own.

Shapes: B rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForMaskedLM

from exitserve_training.draws import Masking
from exitserve_training.forward import ExitPass, MultiExitForward, Quality
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.objectives.aligned.options import AlignedOptions, CrossEntropyOptions
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.registry import AnyObjective
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import model_parts
from exitserve_training.tasks import MaskedToken

from ..shapes import BERT, LLAMA

VOCAB, SPECIAL, MASK = 1000, (0, 1, 2, 3), 3
NUM_LAYERS, EXITS = 4, (1, 2)
DEPTHS = (*EXITS, NUM_LAYERS)
# Means of cross-entropies of about 7 nats, of the same float32 logits up to the order of sums: 10
# roundings of 6e-8 in each of 4 layers, relative.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def masking(**changes: Any) -> Masking:
    usual: dict[str, Any] = {
        "share": 0.15,
        "mask_id": MASK,
        "vocab_size": VOCAB,
        "special_ids": SPECIAL,
        "seed": 0,
    }
    return Masking(**(usual | changes))


def tokens(rows: int, length: int, seed: int = 0, first: int = len(SPECIAL)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first, VOCAB, (rows, length), generator=generator)


def everything(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


# --- what is hidden ------------------------------------------------------------------------------


def near(count: int, chance: float, total: int) -> bool:
    """Within five standard deviations of its expectation: else a chance of 6e-7."""
    return abs(count - chance * total) <= 5 * math.sqrt(chance * (1 - chance) * total)


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_share_and_what_stands_in_place(share: float) -> None:
    ids = tokens(128, 512)
    inputs, labels = masking(share=share)(0, ids, everything(ids))
    hidden = labels != IGNORED
    assert torch.equal(labels[hidden], ids[hidden])
    assert torch.equal(inputs[~hidden], ids[~hidden])
    total = int(hidden.sum())
    assert near(total, share, ids.numel())
    masked = int((inputs[hidden] == MASK).sum())
    kept = int((inputs[hidden] == ids[hidden]).sum())
    # A random token is the one it replaces with a chance of 1 / V, and special ones are not put
    # in: their 4 / V leave the token as it is too.
    by_chance = 0.1 * (1 + len(SPECIAL)) / VOCAB
    assert near(masked, 0.8, total)
    assert near(kept, 0.1 + by_chance, total)
    assert near(total - masked - kept, 0.1 - by_chance, total)


# --- a masked model ------------------------------------------------------------------------------


def bert(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.1,
    }
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **(shape | changes)))
    # Fresh gains are all one and fresh biases zero, which would hide a forgotten one.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.train()


def wrap(model: Any, objective: AnyObjective, skipping: Any = None) -> MultiExitForward:
    parts = model_parts(model)
    objectives = Objectives([objective], BuildContext(EXITS, NUM_LAYERS, 32, parts.head, seed=0))
    return MultiExitForward(model, parts, objectives, DEPTHS, skipping, MaskedToken(masking()))


def ask(model: Any, ids: Tensor, step: int = 0, *, job: Any = "train", **inputs: Tensor) -> Any:
    return model(input_ids=ids, **inputs, exit_pass=ExitPass(step=step, job=job))


@pytest.mark.parametrize("padded", [False, True])
def test_loss_is_that_of_transformers(padded: bool) -> None:
    model, ids = bert(), tokens(4, 32)
    mask = everything(ids)
    if padded:
        mask[1, 20:] = mask[3, 5:] = False
    inputs, labels = masking()(7, ids, mask)
    types = torch.zeros_like(ids)
    types[:, 16:] = 1
    expected = model(
        input_ids=inputs, labels=labels, attention_mask=mask.long(), token_type_ids=types
    ).loss
    parameters = [p for n, p in model.named_parameters() if "pooler" not in n]
    slopes = torch.autograd.grad(expected, parameters)
    wrapped = wrap(model, CrossEntropyOptions())
    loss, metrics = ask(model, ids, 7, attention_mask=mask.long(), token_type_ids=types)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(metrics["ce_loss"], expected.detach(), **CLOSE)
    found = torch.autograd.grad(loss, parameters)
    # Sums over tokens of summands that cancel: relative to the largest.
    for own, slope in zip(found, slopes, strict=True):
        bound = 1e-5 * slope.abs().max().item()
        torch.testing.assert_close(own, slope, rtol=1e-4, atol=max(bound, 1e-8))
    wrapped.remove()
    again = model(input_ids=inputs, labels=labels, attention_mask=mask.long(), token_type_ids=types)
    assert torch.equal(again.loss, expected)


def test_each_depth_is_read_by_the_models_own_head() -> None:
    model, ids = bert().eval(), tokens(3, 32)
    inputs, labels = masking()(0, ids, everything(ids))
    with torch.no_grad():
        states = model(input_ids=inputs, output_hidden_states=True).hidden_states
        expected = {
            layer: functional.cross_entropy(
                model.cls(states[layer]).flatten(0, 1), labels.flatten()
            )
            for layer in DEPTHS
        }
    wrap(model, AlignedOptions(alternate=False))
    with torch.no_grad():
        found: list[Quality] = [ask(model, ids, step, job="evaluate") for step in (0, 9)]
    for quality in found:
        # Every evaluation hides the same tokens, whatever the step.
        assert quality.tokens.item() == (labels != IGNORED).sum().item()
        for layer in DEPTHS:
            torch.testing.assert_close(
                quality.of_layers[f"loss_layer_{layer}"], expected[layer], **CLOSE
            )
    with torch.no_grad():
        loss, metrics = ask(model, ids, 0)
    weights = torch.tensor([1.0, 2.0, 4.0]) / 7
    by_hand = weights @ torch.stack([expected[layer] for layer in DEPTHS])
    torch.testing.assert_close(loss, by_hand, **CLOSE)
    assert "loss_layer_2" in metrics


@pytest.mark.parametrize("config", [BERT, LLAMA])
def test_micro_batches_count_by_their_tokens(
    make_recipe: Callable[..., Path],
    short_text: Path,
    tmp_path: Path,
    train: Callable[..., int],
    config: dict[str, Any],
) -> None:
    """Six sequences make the same step at once, and as four and the two that an epoch leaves."""
    still = {} if config is LLAMA else {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    data = {"files": [str(short_text)], "sequence_length": 64, "validation_fraction": 0.6}
    for size, more in ((6, {}), (4, {"gradient_accumulation_steps": 2})):
        recipe = make_recipe(
            config=config | still,
            data=data,
            output_dir=str(tmp_path / f"batch-{size}"),
            objectives=["ce"],
            # Plain SGD: Adam would hide a wrong scale.
            training={"num_train_epochs": 2, "per_device_train_batch_size": size, "optim": "sgd"}
            | {"learning_rate": 0.5, "max_grad_norm": 0, "disable_tqdm": True}
            | more,
        )
        assert train(recipe) == 0
    whole, split = (load_file(tmp_path / f"batch-{n}" / "model.safetensors") for n in (6, 4))
    assert len(load_from_disk(str(next((tmp_path / "batch-6/data").glob("*/train"))))) == 6
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, **CLOSE)
