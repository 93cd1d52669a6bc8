"""Seeds of requests whose prompts are computed in chunks, on a CPU.

vLLM 0.32 samples after every chunk, throws the sample of an unfinished prompt away, and steps the
request's random generator back by its offset (`vllm/v1/worker/gpu_model_runner.py`). A CPU
generator has no offset: plain vLLM stops its engine there, and with it all requests. So on a CPU
such generators are replaced by one that knows how to step back.
"""

from collections.abc import Callable
from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator that can go back to where it was before the current pass."""

    def remember(self) -> None:
        """Marks the place to go back to."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """A number for vLLM to subtract from; the place is remembered otherwise."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Goes back to the marked place, whatever `offset`."""
        return self.set_state(self._before)


def seed_keeper(model_runner: Any) -> Callable[[], None]:
    """What to call before each forward pass; does nothing where vLLM's generators have offsets."""

    def keep() -> None:
        batch = model_runner.input_batch
        for row, generator in list(batch.generators.items()):
            if not isinstance(generator, RewindableGenerator):
                own = RewindableGenerator()
                own.set_state(generator.get_state())
                batch.generators[row] = own
                # The request keeps it too, and brings it along after a preemption.
                model_runner.requests[batch.req_ids[row]].generator = own
                generator = own
            generator.remember()

    return keep if model_runner.device.type == "cpu" else lambda: None
