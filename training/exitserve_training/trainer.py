"""The Hugging Face Trainer with a multi-exit loss, evaluation at every exit, and saving."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from exitserve.checkpoint import MultiExit, write_multi_exit
from exitserve.decoder import capture_hidden, decoder_parts
from exitserve_training.losses import layer_cross_entropy
from exitserve_training.losses.chunked import IGNORED
from exitserve_training.objectives import Objective


def shifted_labels(input_ids: Tensor) -> Tensor:
    """The next token of each position [B, T]; the last position has none (-100)."""
    last = torch.full_like(input_ids[:, :1], IGNORED)
    return torch.cat([input_ids[:, 1:], last], dim=1)


class ExitTrainer(Trainer):
    """Minimises an `Objective` over hidden states of several depths.

    Only three things differ from the Trainer: the loss, the evaluation (loss and perplexity per
    layer instead of one), and saving (the `multi_exit` block goes into every checkpoint).
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        objective: Objective,
        exits: MultiExit,
        compile_layers: bool = False,
        **kwargs: Any,
    ) -> None:
        """Takes the Trainer's own arguments, and what to minimise and to write down.

        Args:
            model: a causal LM of a supported family.
            objective: what to minimise.
            exits: the block for `config.json`; its layers and the last one are evaluated.
            compile_layers: compile each decoder layer. Layer by layer, because the hooks that
                capture hidden states must stay outside what is compiled.
            **kwargs: see `transformers.Trainer`.
        """
        super().__init__(model=model, **kwargs)
        # The loss is a mean over tokens, and packed sequences have equally many: the Trainer's
        # own division by the accumulation steps is exact.
        self.model_accepts_loss_kwargs = False
        self.objective: Objective = objective
        self._decoder: PreTrainedModel = model
        self.exits = exits
        self.parts = decoder_parts(model)
        self.eval_layers = (*exits.exit_layers, self.parts.num_layers)
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)
        if compile_layers:
            for layer in self.parts.layers:
                layer.forward = torch.compile(layer.forward)

    def restore_layers(self) -> None:
        """Undoes `compile_layers`: generation, whose lengths all differ, would compile forever."""
        for layer in self.parts.layers:
            layer.__dict__.pop("forward", None)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The objective's loss on a batch of `input_ids` [B, T]."""
        step = self.state.global_step
        with self.accelerator.autocast():
            hidden = self._hidden(model, inputs["input_ids"], self.objective.layers(step))
            labels = shifted_labels(inputs["input_ids"])
            loss, metrics = self.objective(step, hidden, self.parts.classify, labels)
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
            self._counts[name] += 1
        return loss

    def _hidden(
        self, model: nn.Module, input_ids: Tensor, layers: tuple[int, ...]
    ) -> dict[int, Tensor]:
        with capture_hidden(self.parts, layers) as hidden:
            # The objective classifies; the model's own head runs on one position only.
            model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        return hidden

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of the objective's metrics since the last log."""
        if "loss" in logs:
            for name, total in self._sums.items():
                logs[name] = round(total.item() / self._counts[name], 4)
            self._sums.clear()
            self._counts.clear()
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss (nats per token) and perplexity at every exit layer and the last layer."""
        start = time.perf_counter()
        was_training = self._decoder.training
        self._decoder.train(False)
        totals = torch.zeros(len(self.eval_layers), device=self.args.device)
        tokens = torch.zeros((), device=self.args.device)
        batches = self.get_eval_dataloader(eval_dataset)
        # disable=None: no bar where the output is not a terminal.
        hidden_bar = self.args.disable_tqdm or None
        for batch in tqdm(batches, desc="evaluating", leave=False, disable=hidden_bar):
            inputs = self._prepare_inputs(batch)
            labels = shifted_labels(inputs["input_ids"])
            count = (labels != IGNORED).sum()
            with torch.no_grad(), self.accelerator.autocast():
                hidden = self._hidden(self._decoder, inputs["input_ids"], self.eval_layers)
                losses = layer_cross_entropy(hidden, self.parts.classify, labels)
            totals += torch.stack([losses[layer] for layer in self.eval_layers]) * count
            tokens += count
        self._decoder.train(was_training)
        totals = self.accelerator.reduce(totals, reduction="sum")
        tokens = self.accelerator.reduce(tokens, reduction="sum")
        metrics = self._layer_metrics((totals / tokens).tolist(), metric_key_prefix)
        metrics[f"{metric_key_prefix}_runtime"] = round(time.perf_counter() - start, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _layer_metrics(self, losses: list[float], prefix: str) -> dict[str, float]:
        metrics = {f"{prefix}_loss": losses[-1]}
        for layer, loss in zip(self.eval_layers, losses, strict=True):
            metrics[f"{prefix}_loss_layer_{layer}"] = loss
            metrics[f"{prefix}_perplexity_layer_{layer}"] = math.exp(loss)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves an ordinary checkpoint with the `multi_exit` block in its config."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write_multi_exit(Path(str(output_dir or self.args.output_dir)), self.exits)


class Clock(TrainerCallback, ExportableState):
    """Counts training seconds, and goes on counting in a resumed run."""

    def __init__(self, seconds: float = 0.0) -> None:
        """Starts from `seconds`, which the Trainer restores from the checkpoint."""
        self.seconds = seconds
        self._start: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, over all sessions of the run."""
        running = 0.0 if self._start is None else time.perf_counter() - self._start
        return self.seconds + running

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops the clock."""
        self.seconds, self._start = self.elapsed, None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: restored by the Trainer when a run is resumed."""
        return {"args": {"seconds": self.elapsed}, "attributes": {}}
