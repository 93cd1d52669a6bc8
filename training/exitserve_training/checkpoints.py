"""What a checkpoint of a multi-exit run holds, and how the run goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer

from exitserve.checkpoint.block import MultiExit, write_multi_exit
from exitserve.errors import ExitServeError
from exitserve_training.forward import AUXILIARY, MultiExitForward

if TYPE_CHECKING:
    # Mixed into Trainer and into TRL's SFTTrainer, which is one.
    _Base = Trainer
else:
    _Base = object

OBJECTIVES_FILE = "objectives.safetensors"
"""In checkpoints of a run: the parameters of objectives, which serving does not need."""


class MultiExitCheckpoints(_Base):
    """Saves the exits and the objectives' parameters beside the weights, and loads them again."""

    exits: MultiExit
    multi_exit: MultiExitForward
    language_model: PreTrainedModel
    _has_adapters: bool

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves an ordinary checkpoint with the `multi_exit` block in its config.

        A checkpoint of the run has the objectives' parameters beside it. The result has them only
        where exits have heads of their own, which nothing else could read.
        """
        folder = Path(str(output_dir or self.args.output_dir))
        super().save_model(output_dir, _internal_call)
        if not self.args.should_save:
            return
        if (folder / "config.json").is_file():
            write_multi_exit(folder, self.exits)
        if not _internal_call and not self.multi_exit.objectives.classifiers():
            (folder / OBJECTIVES_FILE).unlink(missing_ok=True)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Saves the objectives' parameters in a separate file."""
        model: Any = self.model
        whole = model.state_dict() if state_dict is None else state_dict
        marker = f"{AUXILIARY}."
        own = {name.split(marker)[1]: t for name, t in whole.items() if marker in name}
        super()._save(output_dir, {name: t for name, t in whole.items() if marker not in name})
        if own and self.args.should_save:
            folder = Path(str(output_dir or self.args.output_dir))
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
            save_file(tensors, folder / OBJECTIVES_FILE)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self.is_fsdp_enabled or self._has_adapters:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(resume_from_checkpoint)
        if self.is_fsdp_enabled:
            return  # its files hold the objectives' parameters too
        saved = Path(resume_from_checkpoint) / OBJECTIVES_FILE
        tensors = load_file(saved) if saved.is_file() else {}
        objectives = self.multi_exit.objectives
        shapes = {name: own.shape for name, own in objectives.state_dict().items()}
        if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ExitServeError(
                f"resume: '{resume_from_checkpoint}' holds the objective parameters "
                f"{sorted(tensors)}, the recipe's objectives have {sorted(shapes)}; keep the "
                f"objectives, or start a new run with model={resume_from_checkpoint}."
            )
        objectives.load_state_dict(tensors)

    def _load_weights(self, checkpoint: str) -> None:
        """Loads the weights by `from_pretrained`.

        The Trainer takes the file's names as they are, but transformers saves some families (ViT,
        mixtures of experts) under other names than it gives their modules: it would go on from
        untrained weights, with a warning.
        """
        saved = type(self.language_model).from_pretrained(checkpoint, dtype=torch.float32)
        result = self.language_model.load_state_dict(saved.state_dict(), strict=False)
        self._issue_warnings_after_load(result)

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self._has_adapters:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """No warning for what `_load_from_checkpoint` reads from `OBJECTIVES_FILE`."""
        missing = [name for name in load_result.missing_keys if AUXILIARY not in name]
        load_result.missing_keys[:] = missing
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Takes the learning rate from the recipe: a run that diverged goes on with a lower one."""
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            raise ExitServeError(
                f"resume: the optimizer state in '{checkpoint}' does not fit what this recipe "
                f"trains ({error}); keep its objectives and optimizer, or start a new run."
            ) from error
        schedule: Any = self.lr_scheduler
        rate = self.args.learning_rate
        if isinstance(schedule, LambdaLR) and {*schedule.base_lrs} != {rate}:
            schedule.base_lrs = [rate for _ in schedule.base_lrs]
            shares = [share(schedule.last_epoch) for share in schedule.lr_lambdas]
            schedule._last_lr = [rate * share for share in shares]
            for group, now in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
                group["initial_lr"], group["lr"] = rate, now
