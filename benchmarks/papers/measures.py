"""What studies keep of a trained checkpoint: small numbers, by depth."""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from exitserve.calibration.outcomes import Piece
from exitserve.calibration.scores import ExitScores, PieceReading, all_scores, read_exits
from exitserve.checkpoint.decoder import capture_hidden
from exitserve.evaluation.acceptance import DraftTally
from exitserve.reference import load_reference
from exitserve.windows import load_tokenizer
from exitserve_training.classification import evaluation as classification
from exitserve_training.classification.inputs import batch_rows, encoder
from exitserve_training.classification.labelled import class_numbers, read_examples
from exitserve_training.data_recipe import data_from
from exitserve_training.inspect.condensation import trend
from exitserve_training.inspect.data import InspectionSettings, load_inspection_data
from exitserve_training.inspect.inspection import inspect
from exitserve_training.inspect.measurements import measure_layers
from exitserve_training.inspect.probe import linear_probe
from exitserve_training.inspect.similarity import centred, cos_matrix, cosines
from exitserve_training.models import load_model, model_config
from exitserve_training.parts import model_parts

Measured = dict[str, Any]
Measure = Callable[[Path], Measured]
DRAFTS = 3
"""Of a step, where tokens a step are counted."""


def quality(folder: Path) -> Measured:
    """Held-out loss and accuracy by depth, as the training report has them."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    kept = {
        depth: {"loss": round(layer["loss"], 5), "accuracy": round(layer["accuracy"], 5)}
        for depth, layer in report["layers"].items()
    }
    return {"layers": kept, "training_seconds": report["seconds"]}


def curve(folder: Path) -> Measured:
    """The last layer's held-out loss along training, and at its end."""
    logs = EventAccumulator(str(folder / "logs"))
    logs.Reload()
    depth = json.loads((folder / "report.json").read_text(encoding="utf-8"))["num_layers"]
    measured = {
        str(event.step): round(event.value, 5) for event in logs.Scalars(f"eval/loss_layer_{depth}")
    }
    return {"loss": list(measured.values())[-1], "curve": measured}


def spread_of_states(folder: Path, texts: Sequence[str], rows: int = 32) -> Measured:
    """Mean cosine and effective rank by depth, and the trend of the cosines."""
    data = load_inspection_data(InspectionSettings(str(folder), texts, rows=rows, length=256))
    model = load_model(str(folder))
    model.train(False)
    measured = measure_layers(model, data, 1, 0)
    means = measured.condensation.means()
    rho, tau = trend(means) if len(means) > 1 else (0.0, 0.0)
    return {
        "states": {
            str(depth): {
                "mean_cosine": round(means[depth], 4),
                "effective_rank": round(measured.means(depth)["effective_rank"], 3),
            }
            for depth in means
        },
        "spearman": round(rho, 4),
        "kendall": round(tau, 4),
    }


def last_words(
    folder: Path, texts: Sequence[str], embeddings_as_head: bool = False, passages: int = 2000
) -> Measured:
    """How well a decoder predicts the last word of a sentence that its passage has had before.

    A stand-in for LAMBADA, most of whose words its passages have had: accuracy is of words whose
    tokens are all the most likely ones, perplexity of whole words.

    Args:
        folder: the decoder.
        texts: files that were held out.
        embeddings_as_head: put the input embeddings in the head's place.
        passages: how many, drawn with a fixed seed.
    """
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    model.train(False)
    if embeddings_as_head:
        model_parts(model).head.linear.weight = model.get_input_embeddings().weight
    every = [one for text in texts for one in _passages(Path(text).read_text("utf-8-sig"))]
    nats, right = [], []
    for passage, word in random.Random(0).sample(every, min(passages, len(every))):
        before, target = (
            tokenizer(one, add_special_tokens=False)["input_ids"] for one in (passage, f" {word}")
        )
        ids = torch.tensor([[*before, *target][-model.config.max_position_embeddings :]])
        with torch.no_grad():
            logits = model(ids).logits[0, -len(target) - 1 : -1]
        found = torch.tensor(target)
        nats.append(float(torch.nn.functional.cross_entropy(logits, found, reduction="sum")))
        right.append(bool((logits.argmax(-1) == found).all()))
    return {
        "passages": len(right),
        "word_accuracy": round(sum(right) / len(right), 5),
        "word_perplexity": round(math.exp(sum(nats) / len(nats)), 2),
    }


def _passages(text: str) -> Iterator[tuple[str, str]]:
    """The 70 words up to the end of a sentence, and its last word, which is among them."""
    words = text.split()
    for end in range(70, len(words)):
        passage, closed = words[end - 70 : end], words[end].rstrip("\"'")
        word = closed.rstrip(".!?")
        if closed != word and len(word) > 3 and word.isalpha() and word in passage:
            yield " ".join(passage), word


def exits_of_texts(folder: Path, texts: Sequence[str], rows: int = 32) -> Measured:
    """By depth loss and agreement with the last layer, and tokens a step of `DRAFTS` drafts; depth
    speedup at some agreements.

    Keys and values are exact, and checks free.
    """
    data = load_inspection_data(InspectionSettings(str(folder), texts, rows=rows, length=256))
    reference = load_reference(str(folder), criterion="max_prob")
    windows = torch.cat([batch.inputs["input_ids"] for batch in data.batches]).tolist()
    readings = [read_exits(reference, Piece(tuple(ids), 1, "text")) for ids in windows]
    scores, last = all_scores(readings), reference.parts.num_layers
    agreements = {layer: float(one.agrees.double().mean()) for layer, one in scores.items()}
    return {
        "layers": {
            str(layer): {
                "loss": round(float(torch.cat([one.nats[layer] for one in readings]).mean()), 5),
                "agreement": round(agreements.get(layer, 1.0), 5),
            }
            for layer in sorted({*scores, last})
        },
        "tokens_a_step": {str(layer): _tokens_a_step(readings, layer) for layer in scores},
        "speedup": {f"{least:g}": _speedup(scores, last, least) for least in (0.95, 0.98)},
    }


def _tokens_a_step(readings: Sequence[PieceReading], layer: int) -> float:
    """As `exitserve eval` counts them: the layers up to an exit draft, full depth judges."""
    tally = DraftTally()
    for one in readings:
        tally.add(one.scores[layer].agrees.tolist())
    (found,) = (entry for entry in tally.entries() if entry["drafts"] == DRAFTS)
    return float(found["tokens_per_step"])


def _speedup(scores: Mapping[int, ExitScores], num_layers: int, least: float) -> float:
    """The largest depth speedup that one threshold for all exits gives at an agreement."""
    fastest = 1.0
    for threshold in torch.linspace(0.0, 1.0, 201).tolist():
        agrees = torch.ones_like(scores[min(scores)].agrees)
        depth = torch.full(agrees.shape, num_layers)
        for layer in sorted(scores, reverse=True):
            leaves = scores[layer].confidence["max_prob"] > threshold
            agrees = torch.where(leaves, scores[layer].agrees, agrees)
            depth = torch.where(leaves, layer, depth)
        if float(agrees.double().mean()) >= least:
            fastest = max(fastest, num_layers / float(depth.double().mean()))
    return round(fastest, 4)


def look(
    folder: Path, data: Sequence[str], fields: Mapping[str, Any] | None = None, rows: int = 100
) -> Measured:
    """The instruments of `exitserve_training.inspect`, without the matrices' inner parts."""
    settings = InspectionSettings(
        str(folder), list(data), fields or {}, rows=rows, samples=2000, length=128, batch_size=16
    )
    report = inspect(settings).report
    last = report["num_layers"] - 1
    by_depth = {
        depth: {
            "cos": round(report["cos"][number][last], 4),
            "cka": round(report["cka"][number][last], 4),
            "probe": layer["probe_accuracy"] and round(layer["probe_accuracy"], 4),
            "nc1": layer["nc1"] and round(layer["nc1"], 4),
            "effective_rank": round(layer["effective_rank"], 3),
            "mean_cosine": round(report["condensation"]["mean_cosine"][depth], 4),
        }
        for number, (depth, layer) in enumerate(report["layers"].items())
    }
    trend = {name: round(report["condensation"][name], 4) for name in ("spearman", "kendall")}
    return {"inspected": by_depth, **trend}


def writing(folder: Path, texts: Sequence[str], reader: Path) -> Measured:
    """Coherence and diversity of what a decoder writes at each depth."""
    settings = InspectionSettings(
        str(folder),
        list(texts),
        rows=8,
        samples=500,
        length=128,
        prompts=12,
        prompt_tokens=32,
        new_tokens=64,
        sentence_model=str(reader),
    )
    written = inspect(settings).report["texts"]
    return {
        "written": {
            depth: {key: round(written[key][depth], 4) for key in ("coherence", "diversity")}
            for depth in written["diversity"]
        }
    }


def exits(
    folder: Path, data: Sequence[str], fields: Mapping[str, Any], thresholds: Sequence[float]
) -> Measured:
    """A classifier with early exit at some thresholds."""
    settings = classification.ClassificationSettings(
        str(folder), list(data), list(thresholds), batch_size=64, repeats=1, fields=fields
    )
    report = classification.classify(settings).report
    kept = {
        f"{way['threshold']:g}": {
            "accuracy": round(way["accuracy"], 5),
            "depth_speedup": round(way["depth_speedup"], 4),
            "wall_speedup": round(way["wall_speedup"], 3),
            "exits": way["exits"],
        }
        for way in report["thresholds"]
    }
    return {"exits": kept, "full_accuracy": round(report["full_accuracy"], 5)}


def shifted(folder: Path, images: Path, rows: int = 1000) -> Measured:
    """Accuracy by depth on the same images without colour and a little blurred."""
    with tempfile.TemporaryDirectory() as other:
        for kind in sorted(path for path in images.iterdir() if path.is_dir()):
            (Path(other) / kind.name).mkdir()
            for path in sorted(kind.iterdir())[: rows // 10]:
                grey = ImageOps.grayscale(Image.open(path)).convert("RGB")
                blurred = grey.filter(ImageFilter.GaussianBlur(0.7))
                blurred.save(Path(other) / kind.name / f"{path.stem}.png")
        settings = InspectionSettings(str(folder), [other], rows=rows, batch_size=100)
        data = load_inspection_data(settings)
        model = load_model(str(folder), data.task)
        model.train(False)
        measured = measure_layers(model, data, 1, 0)
    return {
        "shifted": {
            str(depth): {"accuracy": round(measured.means(depth)["accuracy"], 5)}
            for depth in measured.sums
        }
    }


def residuals(folder: Path, images: Sequence[str], rows: int = 2000) -> Measured:
    """What each layer of an image classifier adds to the state of its first token, and the share
    of the variance of all layers' class means that two principal components explain."""
    settings = InspectionSettings(str(folder), images, rows=rows, batch_size=100)
    data = load_inspection_data(settings)
    model = load_model(str(folder), data.task)
    model.train(False)
    body, read = model_parts(model).body, []
    for batch in data.batches:
        with torch.no_grad():
            hidden = body(**batch.inputs, output_hidden_states=True).hidden_states
        read.append(torch.stack([one[:, 0] for one in hidden]))
    # [1 + L, N, D]: before the first layer, and after each.
    states = torch.cat(read, dim=1)
    classes = torch.cat([batch.labels for batch in data.batches])[:, 0]
    adjacent = cos_matrix(list(states)).diagonal(offset=1)
    layers = {}
    for depth, (before, after) in enumerate(itertools.pairwise(states), start=1):
        added = after - before
        layers[str(depth)] = {
            "norm_ratio": round(float((before.norm(dim=1) / added.norm(dim=1)).mean()), 4),
            "cos_added": round(float(cosines(before, added).mean()), 4),
            "cos_before": round(float(adjacent[depth - 1]), 4),
        }
    return {"residuals": layers, "two_components": round(_two_components(states[1:], classes), 4)}


def _two_components(states: torch.Tensor, classes: torch.Tensor) -> float:
    means = torch.cat(
        [
            centred(one)[classes == kind].mean(0)[None]
            for one in states
            for kind in sorted(set(classes.tolist()))
        ]
    )
    variances = torch.linalg.svdvals(centred(means)).square()
    return float(variances[:2].sum() / variances.sum())


def probes(folder: Path, data: Sequence[str], rows: int = 2000) -> Measured:
    """Accuracy by depth of a linear classifier of images the model's own classes do not have."""
    config = model_config(str(folder))
    model = load_model(str(folder), "class")
    model.train(False)
    parts = model_parts(model)
    recipe = data_from({"format": "images", "files": list(data)})
    examples = read_examples(recipe, data)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:rows]
    examples = examples.at(order.tolist())
    names = sorted(set(examples.classes))
    depths = range(1, parts.num_layers + 1)
    states: dict[int, list[torch.Tensor]] = {depth: [] for depth in depths}
    encode, labels = encoder(str(folder), config, recipe), []
    for part in batch_rows(examples, 100):
        own = examples.at(part)
        labels += class_numbers(own, names)
        with torch.no_grad(), capture_hidden(parts.layers, depths) as hidden:
            parts.body(**encode(own))
        for depth in depths:
            states[depth].append(parts.predicting(hidden[depth])[:, 0])
    half, classes = len(labels) // 2, torch.tensor(labels)
    found = {depth: torch.cat(parts) for depth, parts in states.items()}
    return {
        "probed": {
            str(depth): {
                "accuracy": round(
                    linear_probe(one[:half], classes[:half], one[half:], classes[half:]), 5
                )
            }
            for depth, one in found.items()
        }
    }
