"""Whether rows leave a pass at their exits, or stay because that is faster.

Where leaving is slower, rows are checked behind the last layer, with the same tokens and depths.
`exitserve.engine.host.timing` finds out what is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group

from exitserve.engine.host.requests import HostRequests
from exitserve.engine.host.step import Step
from exitserve.engine.host.timing import PassTiming
from exitserve.engine.requests import Request
from exitserve.policy import DECIDED, ExitRules


class Leaving:
    """Decides it, pass by pass."""

    def __init__(self, requests: HostRequests) -> None:
        """Takes the requests of an engine."""
        self._requests, self._rules = requests, requests.rules
        self._timing = pass_timing(requests.rules)
        self._last = 0
        """The last pass that was timed."""

    def of_step(self, step: Step) -> bool:
        """Whether the rows of a step leave as its checks say; else none leaves, which counts."""
        if not step.may_stay(DECIDED):  # with a fixed exit layer nothing is gained by staying
            return True
        may_exit = [one.request for one in step.candidates]
        leave = self._timing is None or self._is_faster(self._timing, may_exit)
        if not leave:
            self._requests.recorder.stepped_aside += len(may_exit)
        return leave

    def interrupt(self) -> None:
        """Tells that the pass does more than it was asked about: its time does not count."""
        self._last = 0

    def _is_faster(self, timing: PassTiming, may_exit: Sequence[Request]) -> bool:
        if self._rules.num_drafts and self._requests.all_may_draft:
            return False  # these leave by drafting, which does not pay just now
        number = self._requests.pass_number
        follows, self._last = number == self._last + 1, number
        return timing.choose(
            tuple(one.name for one in may_exit),
            len(may_exit),
            steady=follows and self._requests.after_decodes,
            policies=[one.policy for one in may_exit],
        )


def pass_timing(rules: ExitRules) -> PassTiming | None:
    """What tells whether drafting or leaving pays just now; None where it is always done."""
    return None if rules.always_leaves else PassTiming(agree=_as_first_rank)


def _as_first_rank(chosen: bool) -> bool:
    if get_tensor_model_parallel_world_size() == 1:
        return chosen
    flag = torch.tensor([int(chosen)])
    return bool(get_tp_group().broadcast(flag, src=0).item())
