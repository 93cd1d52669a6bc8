"""What vLLM's speculative decoding asks of us, on servers that draft.

vLLM schedules the tokens drafted after a pass with the next one, judges them by rejection
sampling, and counts them (`vllm/v1/spec_decode/custom_class_proposer.py`,
`vllm/v1/sample/rejection_sampler.py`). The drafts are ours: tokens that pass an exit check of the
model itself. There is no second model, and no second cache: drafted tokens write the keys and
values of the layers they run, and run only the other layers in their pass. Where exits decide
tokens, the sampler takes them as they are, or gets logits by which it accepts them.

Shapes: B rows.
"""

from __future__ import annotations

from typing import Any

from exitserve.engine.compat.runner import repair_sampling_with_drafts
from exitserve.engine.hooks.rows_processor import PROCESSOR
from exitserve.engine.host.loop import HostLoop
from exitserve.engine.host.requests import HostRequests


class Drafter:
    """vLLM's proposer interface."""

    def __init__(self, vllm_config: Any) -> None:
        """Takes the place of a draft model.

        vLLM refuses logits processors beside speculative decoding, because it would not apply
        them to drafts. Ours leaves logits as they are: the worker puts it back
        (`exitserve.engine.compat.runner.restore_processors`), and the front end, which checks each
        request's fields with it, has its list already.
        """
        model_config = vllm_config.model_config
        own = [one for one in model_config.logits_processors or [] if one != PROCESSOR]
        model_config.logits_processors = own or None
        repair_sampling_with_drafts()
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._loop: HostLoop
        self._requests: HostRequests

    def load_model(self, model: Any) -> None:
        """Takes vLLM's model, which drafts for itself."""
        loop = model.host
        assert loop is not None, "mode 'verify' is refused where the device decides"
        self._loop, self._requests = loop, loop.requests

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts after a pass.

        Args:
            sampled_token_ids: [B] what the pass generated; nothing for unfinished prompts.
            num_tokens_no_spec: unused.
            token_ids_cpu: unused.
            slot_mappings: unused.

        Returns:
            [B] drafts of each row.
        """
        self._requests.record_verified(sampled_token_ids)
        drafts = self._requests.start_drafts(sampled_token_ids, self._most)
        if drafts:
            self._loop.draft(drafts)
        found = {one.row: one.found for one in drafts}
        by_row = [found.get(row, []) for row in range(len(sampled_token_ids))]
        self._requests.keep_drafts(by_row)
        return by_row
