"""The Hugging Face Trainer with multi-exit losses, and evaluation at every exit."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainingArguments

from exitserve.checkpoint.block import MultiExit
from exitserve.errors import ExitServeError
from exitserve.reporting.progress import counted
from exitserve_training.adapters import save_adapter, with_adapters
from exitserve_training.callbacks import TimeLimit
from exitserve_training.checkpoints import MultiExitCheckpoints
from exitserve_training.folder import after_failure, set_aside
from exitserve_training.forward import ExitPass, MultiExitForward, Quality
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.models import freeze_head
from exitserve_training.objectives.aligned.options import SeparateClassifiersOptions
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.weighted_sum import NonFiniteLossError, Objectives
from exitserve_training.optimizers import kahan_adamw, muon_with_adamw
from exitserve_training.parts import ModelParts, model_parts
from exitserve_training.recipe import Recipe
from exitserve_training.routers import router_balance
from exitserve_training.skipping import SkipSampler
from exitserve_training.tasks import TaskInputs, next_token
from exitserve_training.throughput import Throughput

INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "pixels", "labels")
"""Columns of a data set that a forward pass takes."""

_COUNTED = "counted"
"""Beside the columns of a micro-batch: how many labels it has."""


class MultiExitTraining(MultiExitCheckpoints):
    """What multi-exit training changes in a Trainer: the loss, the evaluation, and checkpoints.

    Mixed in before a Trainer class. The losses are computed inside the model's forward
    (`MultiExitForward`), so data parallel and sharded training find everything in its place.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        recipe: Recipe,
        exits: MultiExit,
        task_inputs: TaskInputs = next_token,
        **kwargs: Any,
    ) -> None:
        """Takes the Trainer's arguments, the recipe, and the exits to record."""
        self._recipe, self._has_adapters = recipe, recipe.lora is not None
        trained = model if recipe.lora is None else with_adapters(model, recipe.lora)
        arguments: TrainingArguments = kwargs["args"]
        # It reads each loss from the device; one that is not finite ends the run anyway.
        arguments.logging_nan_inf_filter = False
        if arguments.ddp_find_unused_parameters is None:
            # Every objective's gradient reaches all that is trained (tests/train), but on plain
            # steps that of heads which exits have of their own.
            arguments.ddp_find_unused_parameters = any(
                isinstance(options, SeparateClassifiersOptions) and options.alternate
                for options in recipe.objectives
            )
        super().__init__(model=trained, **kwargs)
        if self._has_adapters and self.is_fsdp_enabled:
            raise ExitServeError(
                "lora cannot merge its adapters into the shards of FSDP; leave lora out, or train "
                "data parallel, without FSDP."
            )
        # Losses are means over labelled tokens; `_share` weighs them when batches differ.
        self.model_accepts_loss_kwargs = True
        self.exits = exits
        self.parts: ModelParts = model_parts(model)
        num_layers = self.parts.num_layers
        self.eval_layers = (*exits.exit_layers, num_layers)
        objectives = self._objectives(recipe, model)
        objectives.to(self.args.device)
        if not any(options.trains_head for options in recipe.objectives if options.weight):
            freeze_head(model, self.parts.head)
        skipping = None
        if recipe.exit_aware is not None:
            skipping = SkipSampler(recipe.exit_aware, exits.exit_layers, num_layers, recipe.seed)
        self.language_model: PreTrainedModel = model
        balance = router_balance(model.config)
        self.multi_exit = MultiExitForward(
            model, self.parts, objectives, self.eval_layers, skipping, task_inputs, balance
        )
        self.measured: dict[str, float] = {}
        """What the objectives found in the last evaluation."""
        self.exit_counts = torch.zeros(0)
        """`verdicts.above` of each exit and the last layer, in the last evaluation."""
        self.time_limit: TimeLimit | None = None
        self._sums: dict[str, Tensor] = {}
        self._shares: dict[str, Tensor] = {}
        self._throughput: Throughput | None = None
        if recipe.compile_layers:
            self.parts.compile_layers()

    def _objectives(self, recipe: Recipe, model: PreTrainedModel) -> Objectives:
        """What the recipe minimises, for this model."""
        context = BuildContext(
            exit_layers=self.exits.exit_layers,
            num_layers=self.parts.num_layers,
            hidden_size=model.config.hidden_size,
            head=self.parts.head,
            seed=recipe.seed,
            initial_model=recipe.model,
            bf16=recipe.bf16,
            compile_layers=recipe.compile_layers,
        )
        return Objectives(recipe.objectives, context)

    def save_result(self, output_dir: str, dtype: torch.dtype | None = None) -> None:
        """Saves the trained model as an ordinary checkpoint, adapters merged into it, in `dtype`
        (None: as it is).

        The model is then as it was before training touched it: no hooks, no objectives, no
        compiled layers (generation, whose lengths all differ, would compile forever).
        """
        if self.is_fsdp_enabled:
            # Checkpoints of the run may be shards; the result is one that anything can read.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        if self._has_adapters:
            adapted: Any = self.model
            if self.args.should_save:
                save_adapter(adapted, self._recipe, self.exits, self.processing_class)
            self.model = adapted.merge_and_unload()
        if dtype is not None:
            nn.Module.to(self.language_model, dtype=dtype)
        self.save_model(output_dir)
        for layer in self.parts.layers:
            layer.__dict__.pop("forward", None)
        self.multi_exit.remove()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The recipe's optimizer over all that is trained."""
        muon, kahan = self._recipe.optimizer == "muon", self._recipe.weights == "bfloat16"
        if not (muon or kahan) or self.optimizer is not None:
            return super().create_optimizer(model)
        trained: Any = self.model if model is None else model
        decayed = self.get_decay_parameter_names(trained)
        if muon:
            self.optimizer = muon_with_adamw(trained, self.parts.layers, decayed, self.args)
        else:
            self.optimizer = kahan_adamw(trained, decayed, self.args)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The recipe's learning rate, by steps or by the clock."""
        if self.lr_scheduler is None:
            of = self.optimizer if optimizer is None else optimizer
            assert of is not None
            if self.time_limit is not None:
                self.lr_scheduler = self.time_limit.scheduler(of, self.args, num_training_steps)
            elif self._recipe.lr_milestones:
                steps = [round(num_training_steps * one) for one in self._recipe.lr_milestones]
                self.lr_scheduler = LambdaLR(of, lambda step: 0.1 ** sum(s <= step for s in steps))
            self._created_lr_scheduler = self.lr_scheduler is not None
        return super().create_scheduler(num_training_steps, optimizer)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Makes no step where a resumed run has made all; the Trainer would make one more."""
        over = self.time_limit is not None and self.time_limit.is_over
        if over or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def _total_steps(self) -> int:
        """Of the run; one that ends by the clock will make as many as its pace so far allows."""
        step, most = self.state.global_step, max(self.state.max_steps, 1)
        over = 0.0 if self.time_limit is None else self.time_limit.progress(step, most)
        return round(step / over) if over > 0.0 and step else most

    def labelled_tokens(self, dataset: Any) -> int:
        """Labelled tokens of a data set, or its rows for a classifier."""
        if self.parts.task == "class":
            return len(dataset)
        if "labels" in dataset.column_names:
            return sum(sum(label != IGNORED for label in row[1:]) for row in dataset["labels"])
        # Packed sequences are of one length, and there may be millions of them.
        return len(dataset) * (len(dataset[0]["input_ids"]) - self._shifts)

    @property
    def _shifts(self) -> bool:
        """Whether a position's label is the next token."""
        return self.parts.task == "next token"

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The objectives' loss on one micro-batch.

        Raises:
            NonFiniteLossError: with the step and the objective.
        """
        request = ExitPass(self.state.global_step, self._total_steps)
        try:
            loss, metrics = model(**self._forward_inputs(inputs), exit_pass=request)
        except NonFiniteLossError as error:
            raise self._non_finite_error(error) from error
        share = self._share(inputs, num_items_in_batch)
        for name, value in metrics.items():
            self._sums[name] = value.float() * share + self._sums.get(name, 0.0)
            self._shares[name] = share + self._shares.get(name, 0.0)
        weighted: Tensor = loss * share
        return weighted

    def _forward_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns of a batch that the forward pass takes."""
        return {name: inputs[name] for name in INPUTS if name in inputs}

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The next optimizer step's micro-batches, and what their means are over.

        The Trainer counts labels that the data have; packed sequences have none, those of masked
        ones are drawn, and the last micro-batch of an epoch may be smaller than the others.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(samples) == self.args.world_size == 1:
            return samples, None
        for batch in samples:
            inputs = self._forward_inputs(batch)
            if self.parts.task == "class":
                batch[_COUNTED] = torch.tensor(len(inputs["labels"]))
            else:
                labels = self.multi_exit.task_inputs(self.state.global_step, inputs).labels
                batch[_COUNTED] = labels.ne(IGNORED).sum()
        total = torch.as_tensor(sum(batch[_COUNTED] for batch in samples), device=device)
        if self.args.average_tokens_across_devices:
            total = self.accelerator.reduce(total, reduction="sum")
        return samples, total

    def _share(self, inputs: dict[str, Tensor], num_items: Tensor | int | None) -> Tensor:
        """What a micro-batch's mean counts for in the whole optimizer step's."""
        if num_items is None or _COUNTED not in inputs:
            return torch.ones((), device=self.args.device)
        processes = self.args.world_size if self.args.average_tokens_across_devices else 1
        return inputs[_COUNTED] * processes / torch.as_tensor(num_items).clamp(min=1)

    def _non_finite_error(self, error: NonFiniteLossError) -> NonFiniteLossError:
        """The error that ends the run in every process."""
        step, folder = self.state.global_step, Path(str(self.args.output_dir))
        # The first process prints the message, whichever process had the batch.
        message = [f"{error} at step {step}; {after_failure(folder, step)}"]
        broadcast_object_list(message, from_process=error.process)
        if self.args.should_save:
            set_aside(folder, step)
        return NonFiniteLossError(message[0], error.process)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of the objectives' metrics since the last log, over all processes."""
        if "loss" in logs and self._sums:
            found = torch.stack([*self._sums.values(), *self._shares.values()])
            sums, shares = self.accelerator.reduce(found, reduction="sum").chunk(2)
            # One transfer from the device for all of them.
            means = (sums / shares).tolist()
            logs |= {name: round(mean, 4) for name, mean in zip(self._sums, means, strict=True)}
            self._sums.clear()
            self._shares.clear()
            logs |= self._reached()
        super().log(logs, start_time)

    def _reached(self) -> dict[str, float]:
        """`mfu`, the share of the machine's products that was reached since the last log."""
        if self.parts.task == "class":
            return {}
        if self._throughput is None:
            config = self.language_model.config
            self._throughput = Throughput(self._recipe, self.args, self.parts, config)
        share = self._throughput.share(int(self.state.num_input_tokens_seen))
        if share is None:
            return {}
        warning = self._throughput.warning(share)
        if warning is not None and self.args.should_log:
            print(warning, flush=True)
        return {"mfu": round(share, 4)}

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss (nats per token) and perplexity at every exit layer and the last layer.

        Objectives other than cross-entropy report their own metrics too.
        """
        start = time.perf_counter()
        model = self.model_wrapped if self.is_fsdp_enabled else self.language_model
        was_training = model.training
        model.train(False)
        names = {f"{kind}_layer_{n}" for kind in ("loss", "accuracy") for n in self.eval_layers}
        totals: dict[str, Tensor] = {}
        tokens = torch.zeros((), device=self.args.device)
        counts = torch.zeros((), device=self.args.device)
        batches = self.get_eval_dataloader(eval_dataset)
        request = ExitPass(self.state.global_step, job="evaluate")
        for batch in counted(batches, "evaluating") if self.args.should_log else batches:
            inputs = self._forward_inputs(self._prepare_inputs(batch))
            rows = self._own_rows(len(next(iter(inputs.values()))))
            # A process without any makes the pass all the same: a sharded model needs all.
            inputs = {name: tensor[: max(rows, 1)] for name, tensor in inputs.items()}
            with torch.no_grad(), self.accelerator.autocast():
                found: Quality = model(**inputs, exit_pass=request)
            weight = found.tokens * min(rows, 1)
            for name, value in {**found.of_layers, **found.metrics}.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value * weight
            tokens += weight
            counts = counts + found.exits * min(rows, 1)
        model.train(was_training)
        whole = self._means(totals, tokens)
        self.exit_counts = self.accelerator.reduce(counts, reduction="sum").cpu()
        self.measured = {name: mean for name, mean in whole.items() if name not in names}
        metrics = self._layer_metrics(whole, metric_key_prefix)
        best = str(self.args.metric_for_best_model or "loss").removeprefix("eval_")
        if f"{metric_key_prefix}_{best}" not in metrics:
            known = ", ".join(metrics)
            raise ExitServeError(f"training.metric_for_best_model: no {best!r}, only {known}.")
        metrics[f"{metric_key_prefix}_runtime"] = round(time.perf_counter() - start, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """All rows count here: `dataloader_drop_last` is about training."""
        drops, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = drops

    def _own_rows(self, rows: int) -> int:
        """How many rows of an evaluation batch count in this process.

        Where the data do not fill the last batches of all processes, accelerate repeats rows
        from the beginning, which would count twice.
        """
        loading = self.accelerator.gradient_state
        repeats = self.accelerator.even_batches and loading.end_of_dataloader
        if not repeats or loading.remainder < 1:
            return rows
        left: int = loading.remainder - self.args.process_index * rows
        return min(max(left, 0), rows)

    def _means(self, totals: dict[str, Tensor], tokens: Tensor) -> dict[str, float]:
        """The totals of all processes by the number of their tokens."""
        # A process may lack what others found, and all have to send the same.
        found: list[list[str]] = gather_object([list(totals)])
        names = list(dict.fromkeys(name for own in found for name in own))
        sums = [totals.get(name, torch.zeros_like(tokens)).float() for name in names]
        whole = self.accelerator.reduce(torch.stack([*sums, tokens]), reduction="sum")
        return dict(zip(names, (whole[:-1] / whole[-1]).tolist(), strict=True))

    def _layer_metrics(self, means: dict[str, float], prefix: str) -> dict[str, float]:
        metrics = {f"{prefix}_loss": means[f"loss_layer_{self.eval_layers[-1]}"]}
        for name, mean in means.items():
            metrics[f"{prefix}_{name}"] = mean
            if name.startswith("loss_layer_"):
                # The loss of an untrained layer can be too large for exp.
                perplexity = math.exp(mean) if mean < 700.0 else math.inf
                metrics[f"{prefix}_{name.replace('loss', 'perplexity', 1)}"] = perplexity
        return metrics


class ExitTrainer(MultiExitTraining, Trainer):
    """Trains on packed sequences, causal or masked, and on inputs with a class."""
