"""Callbacks of a run: its clock, and the check and clipping of gradients."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from exitserve.errors import ExitServeError
from exitserve_training.adagc import AdaGC
from exitserve_training.folder import after_failure, set_aside
from exitserve_training.recipe import AdaGCClipping


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


class Gradients(TrainerCallback, ExportableState):
    """Looks at the gradients before each optimizer step: clips by AdaGC, stops on NaN.

    A finite loss can have gradients that are not, and one step with those makes every weight
    NaN: the run must end before, or it would save what cannot be used.
    """

    def __init__(
        self, clipping: dict[str, Any] | None = None, adagc: dict[str, Any] | None = None
    ) -> None:
        """Takes the recipe's `adagc` as a dictionary (None: no clipping here), and its state."""
        self._options = clipping
        self.adagc = adagc
        self._clipper = AdaGC(**clipping) if clipping is not None else None
        if self._clipper is not None and adagc is not None:
            self._clipper.load_state_dict(adagc)

    @classmethod
    def of(cls, clipping: AdaGCClipping | None) -> Gradients:
        """The callback of a recipe."""
        return cls(None if clipping is None else clipping.model_dump())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Clips, or checks.

        Raises:
            ExitServeError: a gradient is not finite; names the step.
        """
        model: nn.Module = kwargs["model"]
        # Under fp16 the scaler leaves out steps whose gradients are not finite by itself.
        try:
            if self._clipper is not None:
                self._clipper.clip(model.named_parameters())
            elif not args.fp16:
                _check_finite(model)
        except ExitServeError as error:
            if args.fp16:
                return
            folder, step = Path(str(args.output_dir)), state.global_step
            what_now = after_failure(folder, step)
            if state.is_world_process_zero:
                set_aside(folder, step)
            raise ExitServeError(
                f"the gradients at step {step} are not finite, so the step was not made "
                f"({error}); {what_now}"
            ) from error

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        averages = None if self._clipper is None else self._clipper.state_dict()
        return {"args": {"clipping": self._options, "adagc": averages}, "attributes": {}}


def _check_finite(model: nn.Module) -> None:
    """Raises `ExitServeError`, in all processes or in none, if a gradient is not finite."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total: Tensor = get_total_norm(gradients)
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    bad = norm.isfinite().logical_not().float()
    if distributed.is_available() and distributed.is_initialized():
        # Each process may hold a part of the gradients only.
        distributed.all_reduce(bad, op=distributed.ReduceOp.MAX)
    if bad.item():
        raise ExitServeError(f"their norm is {norm.item()} in this process")
