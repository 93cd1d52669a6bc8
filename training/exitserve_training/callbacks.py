"""Callbacks of a run, and what a long one needs: lines of progress, and to be stopped at any time.

Its clock, its end by the clock, the check and clipping of gradients, progress, and SIGTERM.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from exitserve.errors import ExitServeError
from exitserve.reporting.progress import StepProgress
from exitserve_training.adagc import AdaGC, whole
from exitserve_training.folder import after_failure, set_aside

_LAYER = "loss_layer_"


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

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stops the clock."""
        self.seconds, self._start = self.elapsed, None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: restored by the Trainer when a run is resumed."""
        return {"args": {"seconds": self.elapsed}, "attributes": {}}


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

    def on_optimizer_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Before the scheduler chooses the next step's rate."""
        self.share = most_of_all(self._elapsed() / self._seconds, args.device)

    on_train_begin = on_optimizer_step
    """A resumed run has used some of its time."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops in time, with the checkpoint that a last step leaves."""
        if self.is_over:
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS

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
    norm = whole(get_total_norm(gradients))
    bad = norm.isfinite().logical_not().float()
    # Each process may hold a part of the gradients only.
    if most_of_all(bad, bad.device):
        raise ExitServeError(f"their norm is {norm.item()} in this process")


def most_of_all(value: Tensor | float, device: torch.device) -> float:
    """The greatest of all processes' values; waits for no device where there is one process."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return float(value)
    shared = torch.as_tensor(value, dtype=torch.float32, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return shared.item()


class RunStoppedError(ExitServeError):
    """Somebody ended the run before its last step; what it has done is kept."""


@contextmanager
def on_term(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls `act` where SIGTERM comes; Python hands signals to the main thread only."""
    listens = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, act) if listens else None
    try:
        yield
    finally:
        if listens:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def stopped_by_term(message: str) -> AbstractContextManager[None]:
    """Where SIGTERM comes inside the block, it ends by `RunStoppedError` with the message."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise RunStoppedError(message)

    return on_term(stop)


class ProgressLines(TrainerCallback):
    """A bar of steps, and one line each time the Trainer logs."""

    def __init__(self, progress: StepProgress, limit: TimeLimit | None = None) -> None:
        """Takes the bar, and what may end the run before its last step."""
        self._progress, self._limit = progress, limit
        self._begun = self._last = (0.0, 0, 0)
        """Time, step and tokens when the session began, and when the last line was written."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Starts the clock of this session."""
        self._begun = self._last = _now(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Moves the bar."""
        if state.is_world_process_zero:
            self._progress("training", state.global_step, state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the line; evaluations have one too."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            print(self._line(logs, state), flush=True)
        elif "eval_loss" in logs:
            print(f"step {state.global_step:,} | held out: {_losses(logs, 'eval_')}", flush=True)

    def _line(self, logs: dict[str, float], state: TrainerState) -> str:
        now = _now(state)
        seconds, tokens = now[0] - self._last[0], now[2] - self._last[2]
        # All of this session: the last steps alone may have met a busy machine, or a quiet one.
        per_step = (now[0] - self._begun[0]) / max(now[1] - self._begun[1], 1)
        seconds_left = per_step * (state.max_steps - now[1])
        if self._limit is not None:
            seconds_left = min(seconds_left, self._limit.seconds_left)
        left = timedelta(seconds=round(seconds_left))
        end = datetime.now().astimezone() + left
        reached = f", {logs['mfu']:.0%} MFU" if "mfu" in logs else ""
        self._last = now
        return (
            f"step {now[1]:,} of {state.max_steps:,} | {now[2]:,} tokens, "
            f"{tokens / max(seconds, 1e-9):,.0f} tokens/s{reached} | "
            f"{_losses(logs)} | lr {logs.get('learning_rate', 0.0):.2e} | "
            f"ends in {left}, {end:%Y-%m-%d %H:%M %Z}"
        )


def _now(state: TrainerState) -> tuple[float, int, int]:
    return time.perf_counter(), state.global_step, int(state.num_input_tokens_seen)


def _losses(logs: dict[str, float], prefix: str = "") -> str:
    """`loss 3.0991 (at layer 3: 4.1801, 6: 3.5340, 12: 3.0991)`."""
    start = f"{prefix}{_LAYER}"
    # By depth: a run that alternates meets its last layer first.
    found = sorted((int(name.removeprefix(start)), name) for name in logs if name.startswith(start))
    listed = ", ".join(f"{layer}: {logs[name]:.4f}" for layer, name in found)
    return f"loss {logs[f'{prefix}loss']:.4f}" + (f" (at layer {listed})" if found else "")


class StopOnTerm(TrainerCallback):
    """On SIGTERM: ends the step that is being made, saves a checkpoint, and stops.

    A second SIGTERM ends the process at once, as it would have without this.
    """

    def __init__(self) -> None:
        self.asked = False
        self._listening = ExitStack()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Listens."""
        self.asked = False
        self._listening.enter_context(on_term(self._note))

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self._listening.close()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves and stops, in all processes or in none."""
        self.asked = bool(most_of_all(self.asked, args.device))
        if self.asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """What comes after training can be begun again, so it needs no saving."""
        self._listening.close()
