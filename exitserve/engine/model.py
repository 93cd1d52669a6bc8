"""The model class that vLLM serves: one of its own, with a loop that stops early.

Rows leave early (`exitserve.engine.early_exit`): on a CPU the host decides who does, on a GPU the
device, in the CUDA graphs of runner V2. Or the first layers draft several tokens, which full depth
judges together (`exitserve.engine.drafting`).

Shapes: T tokens, B rows, D hidden, V vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from exitserve.checkpoint.exit_rows import load_exit_rows
from exitserve.engine.compat.config import refuse_unsupported
from exitserve.engine.drafting.forward import DraftingLoop
from exitserve.engine.early_exit.device.batch import DeviceRequests
from exitserve.engine.early_exit.device.loop import DeviceLoop
from exitserve.engine.early_exit.device.rows import DeviceRows
from exitserve.engine.early_exit.forward import HostLoop
from exitserve.engine.layers.exit_head import ExitHead
from exitserve.engine.layers.key_values import LayerKV, Norm, packed_qkv
from exitserve.engine.layers.propagation import Propagation
from exitserve.engine.layers.segments import Segment, Stream, compiled_segment
from exitserve.engine.state import EngineState, state_of


class MultiExitMixin:
    """Makes a vLLM decoder stop early; put it before the vLLM class.

    As it is, it fits Llama-like decoders: pre-norm layers that take (positions, hidden, residual)
    and carry the stream as a pair.
    """

    model: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        parent: Any = super()  # the vLLM class, to which this is a mixin
        parent.__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self.exit_state: EngineState = state_of(vllm_config)
        if self.exit_state.rules.exit_layers:
            refuse_unsupported(vllm_config)
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._head = self._exit_head(vllm_config, parent.compute_logits)
        self.host: HostLoop | None = None
        self.device: DeviceLoop | None = None
        self.drafting: DraftingLoop | None = None
        # Runner V2 captures passes whole, so the device must decide.
        on_device: bool = vllm_config.use_v2_model_runner
        if self.exit_state.rules.num_drafts:
            segments = self._make_segments(vllm_config, masked=False)
            most = vllm_config.scheduler_config.max_num_batched_tokens
            self.drafting = DraftingLoop(self, segments, self._head, most, in_graphs=on_device)
            return
        self._segments = self._make_segments(vllm_config, masked=on_device)
        layers, longest = self.decoder_layers(), vllm_config.model_config.max_model_len
        self.propagation = Propagation(
            lambda: [self.layer_kv(layer) for layer in layers],
            self.exit_state.rules.exit_layers,
            longest,
        )
        parts = (self._segments, self._head, self.propagation)
        if not on_device:
            self._head.compile_parts(vllm_config)
            self.propagation.compile_parts(vllm_config)
            self.host = HostLoop(self.exit_state, *parts)
            return
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.device = DeviceLoop(*parts, captured)

    def decoder_layers(self) -> list[nn.Module]:
        """The decoder layers, first to last."""
        return list(self.model.layers)

    def embed(self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """The first layer's input [T, D], from token ids [T] or ready embeddings [T, D]."""
        own: Any = self
        return embeds if embeds is not None else own.embed_input_ids(input_ids)

    @staticmethod
    def run_layer(layer: Any, positions: Tensor, stream: Stream) -> Stream:
        """Runs one layer; compiled, so keep to what torch.compile can trace."""
        hidden, residual = stream
        return layer(positions, hidden, residual)  # type: ignore[no-any-return]

    def final_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The shared final norm of the stream [T, D]."""
        if residual is None:
            return self.model.norm(hidden)  # type: ignore[no-any-return]
        return self.model.norm(hidden, residual)[0]  # type: ignore[no-any-return]

    def output_head(self) -> nn.Module:
        """The LM head, vLLM's `ParallelLMHead`."""
        return self.lm_head  # type: ignore[no-any-return, attr-defined]  # of the vLLM class

    def layer_kv(self, layer: Any) -> LayerKV:
        """How `layer` makes its keys and values."""
        attention = layer.self_attn
        key_norm = getattr(attention, "k_norm", None)
        return LayerKV(
            attention=attention.attn,
            sources=packed_qkv(attention.attn, attention.qkv_proj),
            input_norm=Norm.of(layer.input_layernorm),
            key_norm=None if key_norm is None else Norm.of(key_norm),
            rotary=attention.rotary_emb,
        )

    def _exit_head(self, vllm_config: Any, compute_logits: Any) -> ExitHead:
        rules, rows = self.exit_state.rules, None
        if rules.rows_file is not None:
            config = vllm_config.model_config
            rows = load_exit_rows(config.model, rules.rows_file, config.revision)
        ends = self.exit_state.eos_token_ids
        return ExitHead(self, compute_logits, ends, rules.criterion, rows)

    def _make_segments(self, vllm_config: Any, *, masked: bool) -> tuple[Segment, ...]:
        """The layers from exit to exit; none for a model without exits. See `compiled_segment`."""
        exit_layers, layers = self.exit_state.rules.exit_layers, self.decoder_layers()
        if not exit_layers:
            return ()
        parts = partial(
            compiled_segment,
            vllm_config,
            layers,
            run_layer=self.run_layer,
            final_norm=self.final_norm,
            masked=masked,
        )
        return tuple(
            parts(start=start, end=end) for start, end in pairwise([0, *exit_layers, len(layers)])
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        exits: DeviceRows | None = None,
    ) -> Tensor:
        """Runs each row to its own depth; returns normed states [T, D].

        Args:
            input_ids: [T].
            positions: [T].
            intermediate_tensors: vLLM's, for parts of a model.
            inputs_embeds: [T, D] instead of `input_ids`.
            exits: from runner V2, which leaves all decisions to the device.
        """
        plain = partial(super().forward, input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[misc]  # of the vLLM class
        embed = partial(self.embed, input_ids, positions, inputs_embeds)
        if self.drafting is not None:
            return self.drafting.run(positions, embed, plain)
        if self.host is not None:
            return self.host.run(positions, embed, plain)
        assert self.device is not None
        return self.device.run(exits, positions, embed, plain)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the sampled rows [B, D]: a successful check's own, else the head's."""
        plain = self.full_depth_logits
        if self.drafting is not None:
            return self.drafting.logits(hidden_states, plain)
        if self.host is not None:
            return self.host.logits(hidden_states, plain)
        assert self.device is not None
        found = self.device.take_logits(hidden_states.shape[0])
        return plain(hidden_states) if found is None else found

    def full_depth_logits(self, normed: Tensor) -> Tensor | None:
        """vLLM's own head of normed states [N, D], whatever the last pass left."""
        plain: Any = super().compute_logits  # type: ignore[misc]  # of the vLLM class
        logits: Tensor | None = plain(normed)
        return logits

    def get_model_state_cls(self) -> Any:
        """Runner V2's way to the state of a model; runner V1 never asks."""
        from exitserve.engine.hooks.model_state import DraftingModelState, ExitModelState

        return ExitModelState if self.drafting is None else DraftingModelState

    def make_device_requests(self, most_rows: int, device: torch.device) -> DeviceRequests:
        """Room on the device for an engine's requests, of which `most_rows` run together."""
        room = self._head.room(most_rows, self._dtype, device)
        return DeviceRequests(self.exit_state, most_rows, room, device, self._head.put)
