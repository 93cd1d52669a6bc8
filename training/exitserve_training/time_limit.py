"""A run that ends by the clock: the share of it that is over, and the rate that falls with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy


class TimeLimit(TrainerCallback):
    """Ends a run as its last step would, once its time is over.

    All processes go by the clock of the slowest: they make the same steps at the same rates.
    """

    def __init__(self, seconds: float, elapsed: Callable[[], float]) -> None:
        """Takes the time of training, in all sessions, and what tells how much has passed."""
        self._seconds, self._elapsed = seconds, elapsed
        self.share = 0.0
        """Of the time, as it was when the last step was made."""

    @property
    def is_over(self) -> bool:
        """Whether no further step will be made."""
        return self.share >= 1.0

    @property
    def seconds_left(self) -> float:
        """Until the end."""
        return max(0.0, self._seconds - self._elapsed())

    def progress(self, step: int, max_steps: int) -> float:
        """How much of the run is over, from 0 to 1: of its time or of its steps, what is more."""
        return min(1.0, max(self.share, step / max(max_steps, 1)))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A resumed run has used some of its time."""
        self._look(args)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before the scheduler chooses the next step's rate."""
        self._look(args)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops in time, with the checkpoint that a last step leaves."""
        if self.is_over:
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS

    def _look(self, args: TrainingArguments) -> None:
        share = self._elapsed() / self._seconds
        if args.world_size > 1 and distributed.is_initialized():
            # float32: sums of other kinds do not exist on every device.
            slowest = torch.tensor(share, device=args.device)
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
            share = slowest.item()
        self.share = share

    def scheduler(
        self, optimizer: torch.optim.Optimizer, args: TrainingArguments, max_steps: int
    ) -> LambdaLR:
        """The rate: warms up by steps, as without a limit, and falls to 0 by the clock.

        Args:
            optimizer: its rates are the highest.
            args: `lr_scheduler_type` linear or cosine, and the warmup; below 1 it is a share of the
                run.
            max_steps: which may end the run sooner.
        """
        cosine, warmup = args.lr_scheduler_type == "cosine", float(args.warmup_steps)

        def factor(step: int) -> float:
            over = self.progress(step, max_steps)
            falls = 0.5 * (1.0 + math.cos(math.pi * over)) if cosine else 1.0 - over
            rises = (step if warmup >= 1.0 else over) / warmup if warmup else 1.0
            return falls * min(1.0, rises)

        return LambdaLR(optimizer, factor)
