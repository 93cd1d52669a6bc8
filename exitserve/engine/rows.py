"""Per-request exit state by batch row, and the plan it gives for each forward pass.

`RowsProcessor` is a vLLM logits processor in name only: its hook runs before every forward pass
with the rows that came, went or moved, which is what the model needs to know.

Shapes: B rows, T tokens, E exit layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from exitserve.engine.compat import BatchShape, eos_token_ids
from exitserve.engine.options import rules_from
from exitserve.engine.recorder import Recorder
from exitserve.policy import ExitPolicy, ExitRules


@dataclass(frozen=True)
class Row:
    """What the engine knows of the request in one batch row."""

    policy: ExitPolicy
    prompt_length: int
    output_ids: list[int]
    """vLLM's own list of generated tokens, read for its length only."""
    trace_key: str | None


class Rows:
    """The exit state of one engine, shared by its logits processor and its model."""

    def __init__(self, rules: ExitRules, eos_ids: Tensor) -> None:
        self.rules = rules
        self.eos_token_ids = eos_ids
        self.recorder = Recorder(rules.num_layers, rules.exit_layers)
        self._rows: dict[int, Row] = {}
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = None

    def update(self, batch: BatchUpdate) -> None:
        """Follows vLLM's persistent batch: removed, then added, then moved rows."""
        self._tensors = None
        for index in batch.removed:
            self._rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch.added:
            self._rows[index] = self._row(params, prompt_ids, output_ids)
        for source, target, direction in batch.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[source] = replaced

    def _row(self, params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> Row:
        fields = params.extra_args or {}
        policy = self.rules.policy_or_off(fields, structured=params.structured_outputs is not None)
        if prompt_ids is None:  # prompt given as embeddings: its length is not told
            policy = ExitPolicy.off()
        trace = fields.get("exit_trace")
        return Row(
            policy=policy,
            prompt_length=len(prompt_ids or ()),
            output_ids=output_ids,
            trace_key=trace if isinstance(trace, str) else None,
        )

    def plan(self, shape: BatchShape, positions: Tensor) -> StepPlan:
        """The plan for one forward pass over `positions` [T]."""
        num_rows = shape.row_ends.shape[0]
        positions = positions[: shape.num_tokens]
        last_positions = positions[shape.row_ends.long() - 1]
        if all(row.policy.mode == "off" for row in self._rows.values()):
            no_checks = torch.empty((0, shape.num_tokens))
            return StepPlan(
                layers=(),
                num_layers=self.rules.num_layers,
                thresholds=no_checks,
                eos_thresholds=no_checks,
                row_ends=shape.row_ends,
                last_positions=last_positions,
            )
        if self._tensors is None or self._tensors[2].shape[0] != num_rows:
            self._tensors = self._gather(num_rows)
        thresholds, eos_thresholds, prompt_lengths = self._tensors
        if shape.num_tokens != num_rows:  # prompt chunks: several tokens a row
            lengths = torch.diff(shape.row_ends, prepend=shape.row_ends.new_zeros(1))
            row_of_token = torch.repeat_interleave(torch.arange(num_rows), lengths)
            thresholds, eos_thresholds = (
                thresholds[:, row_of_token],
                eos_thresholds[:, row_of_token],
            )
            prompt_lengths = prompt_lengths[row_of_token]
        decode = positions >= prompt_lengths
        return StepPlan(
            layers=self.rules.exit_layers,
            num_layers=self.rules.num_layers,
            thresholds=thresholds.masked_fill(~decode, math.inf),
            eos_thresholds=eos_thresholds,
            row_ends=shape.row_ends,
            last_positions=last_positions,
        )

    def _gather(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Thresholds [E, B], end-of-sequence thresholds [E, B], prompt lengths [B]."""
        rows = [self._rows.get(index) for index in range(num_rows)]
        pairs = [
            [row.policy.thresholds_at(layer) if row else (math.inf, math.inf) for row in rows]
            for layer in self.rules.exit_layers
        ]
        table = torch.tensor(pairs, dtype=torch.float32).view(len(pairs), num_rows, 2)
        lengths = torch.tensor([row.prompt_length if row else 0 for row in rows])
        return table[..., 0], table[..., 1], lengths

    def record(self, plan: StepPlan) -> None:
        """Counts and traces the tokens this pass generates, one for each row that is due."""
        depths = plan.depth[plan.row_ends.long() - 1].tolist()
        for index, (position, depth) in enumerate(
            zip(plan.last_positions.tolist(), depths, strict=True)
        ):
            row = self._rows.get(index)
            # A row samples only when its last known token has been computed; earlier prompt
            # chunks, and tokens recomputed after a preemption, do not generate.
            if row is None or position + 1 != row.prompt_length + len(row.output_ids):
                continue
            self.recorder.generated(depth)
            if row.trace_key is not None:
                self.recorder.trace(row.trace_key, index, len(row.output_ids), depth)


class StepPlan:
    """Thresholds and outcome of one forward pass, token by token."""

    def __init__(
        self,
        *,
        layers: tuple[int, ...],
        num_layers: int,
        thresholds: Tensor,
        eos_thresholds: Tensor,
        row_ends: Tensor,
        last_positions: Tensor,
    ) -> None:
        self.thresholds = thresholds  # [E, T], infinite where a token must not exit
        self.eos_thresholds = eos_thresholds  # [E, T]
        self.row_ends = row_ends  # [B]
        self.last_positions = last_positions  # [B]
        num_tokens = thresholds.shape[1]
        self.depth = torch.full((num_tokens,), num_layers)
        self.frozen = torch.zeros(num_tokens, dtype=torch.bool)
        self._wanted = dict(zip(layers, (thresholds < math.inf).any(dim=1).tolist(), strict=True))
        self._exit_index = {layer: index for index, layer in enumerate(layers)}
        self.logits: list[tuple[Tensor, Tensor]] = []
        """Logits of successful checks: (token indices [N], logits [N, V])."""

    def candidates(self, layer: int) -> Tensor:
        """Indices of the active tokens that are to be checked after `layer` layers."""
        if not self._wanted.get(layer):
            return torch.empty(0, dtype=torch.long)
        may_exit = self.thresholds[self._exit_index[layer]] < math.inf
        return (may_exit & ~self.frozen).nonzero().flatten()

    def thresholds_of(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The two thresholds [N] of `tokens` after `layer` layers."""
        index = self._exit_index[layer]
        return self.thresholds[index, tokens], self.eos_thresholds[index, tokens]

    def freeze(self, tokens: Tensor, layer: int, logits: Tensor) -> None:
        """Marks `tokens` [N] as exited after `layer` layers with `logits` [N, V]."""
        self.frozen[tokens] = True
        self.depth[tokens] = layer
        self.logits.append((tokens, logits))


_ENGINES: dict[str, Rows] = {}


def rows_of(vllm_config: Any) -> Rows:
    """The exit state of the engine that `vllm_config` describes, made at the first call.

    The processor and the model of one engine live in one process and get the same config.
    """
    key = vllm_config.instance_id
    if key not in _ENGINES:
        _ENGINES[key] = Rows(rules_from(vllm_config), eos_token_ids(vllm_config))
    return _ENGINES[key]


class RowsProcessor(LogitsProcessor):
    """Hands vLLM's batch changes to `Rows`; leaves logits as they are."""

    rules: ExitRules | None = None
    """Set in the front-end process once the model is known, so that every field is checked."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises `ValueError` (HTTP 400) for bad `exit_*` fields."""
        rules = cls.rules
        if rules is not None:
            rules.policy_for(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows = rows_of(vllm_config)

    def is_argmax_invariant(self) -> bool:
        """True: logits stay as they are."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each forward pass, with what changed in the batch."""
        if batch_update is not None:
            self._rows.update(batch_update)

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits [B, V] as they are."""
        return logits
