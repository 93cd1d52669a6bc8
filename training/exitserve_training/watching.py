"""What a long run needs of its surroundings: lines of progress, and to be stopped at any time."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from exitserve.errors import ExitServeError
from exitserve_training.callbacks import TimeLimit, most_of_all

_LAYER = "loss_layer_"

_Item = TypeVar("_Item")


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


def counted(items: Iterable[_Item], what: str, total: int, done: int = 0) -> Iterator[_Item]:
    """Shows how many have come: a bar on a terminal, else a line for every twentieth part."""
    # disable=None: no bar where the output is not a terminal.
    bar = tqdm(items, what, total=total, initial=done, disable=None)
    for number, item in enumerate(bar, done + 1):
        if bar.disable and (number % max(1, total // 20) == 0 or number == total):
            print(f"{what}: {number:,} of {total:,}", flush=True)
        yield item


class ProgressLines(TrainerCallback):
    """One line each time the Trainer logs, for output that is kept in a file."""

    def __init__(self, limit: TimeLimit | None = None) -> None:
        """Takes what may end the run before its last step."""
        self._limit = limit
        self._begun = self._last = (0.0, 0, 0)
        """Time, step and tokens when the session began, and when the last line was written."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Starts the clock of this session."""
        self._begun = self._last = _now(state)

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
            f"step {now[1]:,} of {state.max_steps:,} | {now[2] / 1e6:,.2f}M tokens, "
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
        self.asked = bool(most_of_all(torch.tensor(float(self.asked), device=args.device)))
        if self.asked:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """What comes after training can be begun again, so it needs no saving."""
        self._listening.close()
