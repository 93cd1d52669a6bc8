"""Drafts on vLLM's runner V2, which GPUs run.

vLLM's runner V2 asks its speculator for drafts after each pass. This one runs the target's own
first layers, final norm and head, which find the target's keys and values by the names of its
layers. A draft writes the first layers' keys and values where the judging pass will write all of
them again; those of rejected drafts lie behind the sequence's end, where nothing reads them.

Read from `vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py`, whose loop over
drafts, graphs and buffers this uses. There the drafts' first token comes from a pass over the
whole batch; here all keys and values are there already, so the token that was just sampled takes
that place: column 0 of `draft_tokens`.

Shapes: B rows, T tokens, K drafts at most, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
    prepare_decode_inputs,
)

from exitserve.engine.drafting.forward import DraftingLoop
from exitserve.engine.options import drafts_from

NGRAMS = 2, 4
"""Of a request's last tokens, least and most, that are looked for in its text."""


class FirstLayers(nn.Module):
    """The draft, as vLLM calls a model. It owns no weights."""

    def __init__(self, loop: DraftingLoop) -> None:
        super().__init__()
        self.loop = loop

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden_states: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Normed states [T, D] after the draft layer; other inputs than tokens are unused."""
        return self.loop.draft(input_ids, positions)


class FirstLayersSpeculator(TargetDependentARSpeculator):
    """vLLM's loop over drafts, with the target's first layers."""

    model: FirstLayers

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        """Takes the runner's states of its requests, which have their tokens."""
        super().__init__(vllm_config, device)
        text = copy(vllm_config)
        text.speculative_config = copy(vllm_config.speculative_config)
        text.speculative_config.prompt_lookup_min, text.speculative_config.prompt_lookup_max = (
            NGRAMS
        )
        self._text = NgramGPUSpeculator(text, device, states)
        self._drafts = drafts_from(vllm_config)
        # Column 0 takes the sampled token, after which the drafts come.
        self.draft_tokens = self.draft_tokens.new_zeros(
            self.max_num_reqs, 1 + self.num_speculative_steps
        )

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """No weights are loaded: the draft is part of the target."""
        return FirstLayers(target_model.drafting)

    def set_attn(self, *args: Any) -> None:
        """Builds attention metadata of the first layers, whose caches are the target's."""
        # vLLM takes the layers that are new with the draft, and here none is. To the runner they
        # must stay the target's (`initialize_kv_cache`).
        self.draft_attn_layer_names = self.model.loop.attention_layers
        super().set_attn(*args)
        self.draft_attn_layer_names = set()

    def sample_draft(self, hidden_states: Tensor, *others: Any) -> Tensor:
        """[B] greedy drafts, for sampled requests too: rejection sampling takes care of those."""
        return self.model.loop.head.draft(hidden_states)

    def _configure_decode_metadata_update(self) -> None:
        # Also with one draft, which speculators with a draft prefill make there.
        DraftModelSpeculator._configure_decode_metadata_update(self)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Graphs of the drafts. There is no draft prefill."""
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.decode_cudagraph_manager = DraftGraphs(
            self.vllm_config, self.device, mode, decode_query_len=1
        )

    def capture(self) -> None:
        """Captures all drafts of a step in one graph, or one draft where metadata forbids that."""
        assert self.decode_cudagraph_manager is not None
        self.idx_mapping.zero_()
        fused = self.supports_decode_metadata_update
        self.decode_cudagraph_manager.capture(
            self._generate_fused_drafts if fused else self._generate_one_of,
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
            progress_bar_desc="Capturing drafts",
            specialize_spec_tokens=fused
            and self.speculative_config.uses_dynamic_speculative_decoding(),
        )

    # vLLM's loops begin with column 1 and count the one before: K drafts are K + 1 steps to them.

    def _generate_fused_drafts(self, *args: Any, **steps: Any) -> None:
        super()._generate_fused_drafts(*_with_one_more(args, steps))

    def _multi_step_decode(self, *args: Any, **steps: Any) -> None:
        super()._multi_step_decode(*_with_one_more(args, steps))

    def _generate_one_of(self, *args: Any, **steps: Any) -> None:
        """One draft of several, for a graph of its own."""
        self._generate_draft(*_with_one_more(args, steps))

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Drafts after a pass; arguments are vLLM's.

        Returns:
            [B, K] drafts; those beyond `num_speculative_tokens` are not to be read.
        """
        rows = input_batch.num_reqs
        if dummy_run and dp_sync_state is not None:  # as many as any data-parallel rank has
            rows = min(rows, dp_sync_state.num_reqs)
        drafts = num_speculative_tokens
        if drafts is None:
            drafts = self.num_speculative_steps
        if drafts == 0:
            return self.draft_tokens[:rows, 1:].fill_(-1)
        longest = int(input_batch.seq_lens_cpu_upper_bound[:rows].max())
        self.draft_max_seq_len = min(longest + drafts, self.max_model_len)
        count = drafts if dummy_run else min(drafts, self._drafts.of_layers(rows))
        self._copy_request_inputs(
            rows, input_batch.idx_mapping, temperature, seeds, dummy_run=dummy_run
        )
        if not dummy_run:
            self.model.loop.count_drafts(count)
            # Rows inside their prompts draft nothing.
            self.idx_mapping[:rows].masked_fill_(num_sampled == 0, -1)
        self._place(input_batch, num_rejected, last_sampled)
        if count:
            graph, across = self._graph_for(rows, dp_sync_state, count, eager=is_profile)
            draft = (
                self._fused_multi_step_decode
                if self.supports_decode_metadata_update
                else self._multi_step_decode
            )
            no_attention = dummy_run and skip_attn_for_dummy_run
            longest_on_host = input_batch.seq_lens_cpu_upper_bound
            draft(rows, no_attention, graph, across, longest_on_host, count)
        if dummy_run:
            return self.draft_tokens[:rows, 1:]
        # Only where requests are, and how many tokens they have, is read.
        text = self._text.propose(
            input_batch,
            None,
            None,
            last_hidden_states,
            None,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            temperature,
            seeds,
        )
        matched = self._text.scratch[:rows].amax(dim=1) > 0
        return self._chosen(input_batch.idx_mapping.long(), text, matched, count)

    def _chosen(self, slots: Tensor, text: Tensor, matched: Tensor, count: int) -> Tensor:
        """[B, K] each row's drafts: of its text [B, K] where that matched [B], else the layers',
        which are so many."""
        requests = self.model.loop.requests
        may_text, may_layers = requests.sources[slots].unbind(dim=1)
        from_text = requests.from_text[slots] = matched & may_text
        sampled, layers = self.draft_tokens[: len(slots)].tensor_split([1], dim=1)
        # A draft that is hardly ever right, where a request wants none, or there is none.
        layers[:, count:] = sampled
        layers.copy_(torch.where(may_layers[:, None], layers, sampled))
        layers.copy_(torch.where(from_text[:, None], text, layers))
        return layers

    def _place(self, input_batch: Any, num_rejected: Tensor, last_sampled: Tensor) -> None:
        """Puts the sampled tokens [B] where the first draft reads them."""
        rows = input_batch.num_reqs
        sampled = self.draft_tokens[:rows, 0]
        sampled.copy_(last_sampled[input_batch.idx_mapping].view(rows))
        last = input_batch.seq_lens[:rows] - num_rejected - 1
        self.input_buffers.positions[:rows].copy_(last)
        self.sample_src_positions[:rows].copy_(last)
        prepare_decode_inputs(  # which go one further
            sampled,
            input_batch.seq_lens,
            num_rejected,
            self.input_buffers,
            self.sample_src_positions,
            self.max_model_len,
            self.max_num_reqs,
        )

    def _graph_for(
        self, rows: int, dp_sync_state: Any, drafts: int, *, eager: bool
    ) -> tuple[Any, Tensor | None]:
        """The graph that drafts, as in vLLM's `propose`, and tokens across data-parallel ranks."""
        sync, tokens = None, rows
        if dp_sync_state is not None:
            sync, tokens = self._build_uniform_batch_dp_sync(dp_sync_state, rows)
        manager = self.decode_cudagraph_manager
        graph, sync = dispatch_cg_and_sync_dp(
            manager,
            rows,
            tokens,
            uniform_token_count=1,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=eager,
            dp_sync_state=sync,
        )
        if manager is not None:
            graph = manager.specialize_spec_tokens(graph, drafts)
        return graph, None if sync is None else sync.num_tokens_across_dp


def _with_one_more(args: tuple[Any, ...], steps: Mapping[str, Any]) -> tuple[Any, ...]:
    """vLLM's arguments with a step more; their number comes last, or by its name in a capture."""
    *others, count = [*args, *steps.values()]
    return (*others, count + 1)


class DraftGraphs(SpeculatorCudaGraphManager):
    """vLLM's graphs of drafts, also of a single one where their number varies."""

    def capture(self, *args: Any, specialize_spec_tokens: bool = False, **others: Any) -> None:
        """See vLLM's; it leaves out single drafts, which its own speculators make elsewhere."""
        if specialize_spec_tokens:
            config = self.vllm_config
            by_batch = build_dynamic_sd_schedule_lookup(
                config.speculative_config.num_speculative_tokens_per_batch_size,  # type: ignore[union-attr]  # there is one
                vllm_max_batch_size=self.max_num_reqs,
                vllm_num_speculative_tokens=config.num_speculative_tokens,
            )
            by_batch += map(drafts_from(config).of_layers, range(1, self.max_num_reqs + 1))
            self._capture_descs = {
                mode: [
                    SpeculatorBatchDescriptor(**vars(one), num_speculative_tokens=drafts)
                    for one in described
                    for drafts in sorted(set(by_batch) - {0}, reverse=True)
                ]
                for mode, described in self._capture_descs.items()
            }
        super().capture(*args, **others)
