"""The oracle: frozen-row early exit over a plain Hugging Face decoder, in float32 by default.

The one semantic (docs/architecture.md): for each decode-phase token, layer by layer, the row is
computed normally while active. At an exit layer, if its confidence passes its threshold, its
residual-stream state is frozen. Every later layer computes its keys and values from the frozen
state and leaves the state unchanged. Prompt tokens always run at full depth.

Where the checkpoint has exit rows, checks below full depth read these rows of the head only: the
confidence is over them, and a greedy token that exits is the most likely among them. A request that
samples is sampled from the whole head's logits, read once on the state at the exit.

In mode "defer" a row that exits is not frozen: it leaves with the token of its check, and its
later layers are computed all the same, so that all keys and values are those of full depth.

In mode "verify" no token exits: first layers draft, and full depth decides every token.

Because a row's state at each layer depends only on the states of earlier tokens at that layer,
one teacher-forced pass that freezes rows layer by layer gives exactly what token-by-token
decoding gives (`trace`). `decode` is that token-by-token loop, with a key-value cache.

Shapes: T tokens, L layers, D hidden, V vocabulary, K exit rows. One sequence at a time (B = 1).
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exitserve.checkpoint.calibration import FREQUENT
from exitserve.checkpoint.decoder import DecoderParts, capture_hidden, decoder_parts, hidden_of
from exitserve.errors import ExitServeError, one_line
from exitserve.policy import ALWAYS, NEVER, ExitPolicy
from exitserve_kernels.exit_check import Criterion, Decision, check_logits, criterion_of


@dataclass(frozen=True)
class OracleTrace:
    """What a teacher-forced frozen-row pass gives for each of T input tokens."""

    logits: Tensor
    """[T, V] raw next-token logits, each of the whole head at the depth its token stopped at:
    what a request that samples draws from."""
    token: Tensor
    """[T] greedy next token at each position: of one that exits, the most likely exit row."""
    depth: Tensor
    """[T] layers run, L for full depth."""
    checks: Tensor
    """[T] exit checks made, each a read of the exit rows."""


@dataclass(frozen=True)
class Generation:
    """What the decode loop generated after a prompt."""

    token_ids: list[int]
    exit_layers: list[int]
    """One depth for each generated token; the first is always L."""


@dataclass(frozen=True)
class Look:
    """What one layer would have said to a token, whether the token was sent from there or not."""

    layer: int
    token_id: int
    """The most likely token."""
    confidence: float
    threshold: float | None
    """That its confidence had to pass; None where no check was due."""
    is_checked: bool
    """Whether a check was made."""


@dataclass(frozen=True)
class Looks:
    """One generated token, and all exit layers and full depth for it."""

    token_id: int
    depth: int
    by_layer: tuple[Look, ...]


class Reference:
    """Frozen-row forward over a causal LM of a supported family."""

    def __init__(
        self,
        model: Any,
        exit_layers: Sequence[int],
        eos_token_ids: Iterable[int] = (),
        criterion: Criterion = "max_prob",
        exit_rows: Tensor | None = None,
    ) -> None:
        """Wraps `model` (in evaluation mode) with checks after `exit_layers`.

        Args:
            model: a causal LM.
            exit_layers: ascending, each below the depth of the model.
            eos_token_ids: ends of sequence, which have a threshold of their own.
            criterion: how confidence is computed.
            exit_rows: [K] tokens, ascending, whose rows of the head checks read; None for all.
        """
        self.criterion = criterion
        self.model = model.eval()
        self.parts: DecoderParts = decoder_parts(model)
        self.exit_layers = tuple(exit_layers)
        self.device: torch.device = next(model.parameters()).device
        ends = sorted(set(eos_token_ids))
        self.eos_token_ids = torch.tensor(ends, dtype=torch.long, device=self.device)
        self.exit_rows = None if exit_rows is None else exit_rows.to(self.device)

    def variant(self, criterion: Criterion, exit_rows: Tensor | None) -> Reference:
        """The same model, whose checks go by another criterion or other rows."""
        ends = self.eos_token_ids.tolist()
        return Reference(self.model, self.exit_layers, ends, criterion, exit_rows)

    def exit_tokens(self, logits: Tensor) -> Tensor:
        """[N] the most likely tokens at an exit, given the whole head's logits [N, V] there."""
        if self.exit_rows is None:
            return logits.argmax(dim=-1)
        return self.exit_rows[logits[:, self.exit_rows].argmax(dim=-1)]

    def check(
        self,
        logits: Tensor,
        thresholds: Tensor,
        end_thresholds: Tensor,
        criterion: Criterion | None = None,
    ) -> Decision:
        """Makes exit checks, given the whole head's logits at an exit.

        Args:
            logits: [N, V].
            thresholds: [N] for any token.
            end_thresholds: [N] for ends of sequence.
            criterion: instead of the oracle's own.
        """
        ends = self.eos_token_ids
        if self.exit_rows is not None:
            logits = logits[:, self.exit_rows]
            ends = torch.isin(self.exit_rows, ends).nonzero().flatten()
        return check_logits(
            logits,
            thresholds,
            criterion=criterion or self.criterion,
            end_tokens=ends,
            end_thresholds=end_thresholds,
        )

    @torch.no_grad()
    def trace(
        self, input_ids: Sequence[int], prompt_length: int, policy: ExitPolicy
    ) -> OracleTrace:
        """One teacher-forced pass over `input_ids`, its first `prompt_length` at full depth."""
        decode = torch.arange(len(input_ids), device=self.device) >= prompt_length
        rows = _FrozenRows(self, policy, decode)
        with rows.hooked():
            hidden = self._run_layers(input_ids, cache=None)
        return rows.finish(hidden)

    def decode(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        policy: ExitPolicy,
        ignore_eos: bool = False,
    ) -> Generation:
        """Greedy decoding, one token at a time, with a key-value cache."""
        found = list(self._generate(prompt_ids, max_tokens, policy, (), ignore_eos=ignore_eos))
        return Generation([one.token_id for one in found], [one.depth for one in found])

    def watch(
        self, prompt_ids: Sequence[int], max_tokens: int, policy: ExitPolicy
    ) -> Iterator[Looks]:
        """`decode`, with what every layer says to each token: to one that stopped, what it would
        have been told further up, behind the same keys and values."""
        depths = (*self.exit_layers, self.parts.num_layers)
        return self._generate(prompt_ids, max_tokens, policy, depths, ignore_eos=False)

    @torch.no_grad()
    def _generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        policy: ExitPolicy,
        depths: Sequence[int],
        *,
        ignore_eos: bool,
    ) -> Iterator[Looks]:
        """One token after the other, with what the layers at some depths say to it."""
        from transformers import DynamicCache

        cache, step = DynamicCache(), list(prompt_ids)
        ends = [] if ignore_eos else self.eos_token_ids.tolist()
        for number in range(max_tokens):
            # Only the prompt pass has no generated token behind it.
            decode = torch.full((len(step),), number > 0, device=self.device)
            rows, looks = _FrozenRows(self, policy, decode), tuple[Look, ...]()
            if depths and policy.mode in ("confidence", "fixed"):
                with capture_hidden(self.parts.layers, depths) as states:
                    self._run_layers(step, cache=copy.deepcopy(cache))
                with rows.hooked():
                    hidden = self._run_layers(step, cache=cache)
            else:  # a token that exits runs on, so these are the states that it would have had
                with rows.hooked(), capture_hidden(self.parts.layers, depths) as states:
                    hidden = self._run_layers(step, cache=cache)
            found = rows.finish(hidden)
            token = int(found.token[-1])
            if depths:
                logits = self.parts.classify(torch.stack([states[one][0, -1] for one in depths]))
                looks = self._looks(logits, depths, rows)
            yield Looks(token, int(found.depth[-1]), looks)
            if token in ends:
                return
            step = [token]

    def _looks(self, logits: Tensor, depths: Sequence[int], rows: _FrozenRows) -> tuple[Look, ...]:
        """What the last row of a pass was told [len(depths), V]."""
        never = torch.full((len(depths),), NEVER, device=logits.device)
        last = check_logits(logits[-1:], never[-1:], criterion=self.criterion)  # of the whole head
        said = torch.cat([self.check(logits, never, never).confidence[:-1], last.confidence])
        tokens = torch.cat([self.exit_tokens(logits[:-1]), logits[-1:].argmax(dim=-1)])
        ends, found, row = self.eos_token_ids.tolist(), [], len(rows.decode) - 1
        read = zip(depths, tokens.tolist(), said.tolist(), strict=True)
        for layer, token, confidence in read:
            # At full depth, and where the policy has none, no threshold is there to pass.
            due = bool(rows.decode[row]) and layer < self.parts.num_layers
            limit = rows.policy.thresholds_at(layer)[token in ends] if due else NEVER
            threshold = None if limit in (NEVER, ALWAYS) else limit
            is_checked = row in rows.checked.get(layer, ())
            found.append(Look(layer, token, confidence, threshold, is_checked))
        return tuple(found)

    def _run_layers(self, input_ids: Sequence[int], cache: Any) -> Tensor:
        """Runs the decoder stack; returns its last layer's un-normed output [T, D]."""
        last = self.parts.num_layers
        with capture_hidden(self.parts.layers, [last]) as hidden:
            self.model.base_model(
                input_ids=torch.tensor([list(input_ids)], device=self.device),
                use_cache=cache is not None,
                **cached(self.model.base_model, cache),
            )
        return hidden[last][0]


def cached(module: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache as argument of a module's forward: `past_key_values` until transformers 5.23."""
    known = inspect.signature(module.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


class _FrozenRows:
    """Freezes rows during one forward pass, by hooks around each decoder layer."""

    def __init__(self, reference: Reference, policy: ExitPolicy, decode: Tensor) -> None:
        self.ref = reference
        self.policy = ExitPolicy.off() if policy.mode == "verify" else policy
        self.decode = decode
        self.frozen = torch.zeros_like(decode)
        self.depth = torch.full_like(decode, reference.parts.num_layers, dtype=torch.long)
        self.checks = torch.zeros_like(self.depth)
        self.state: Tensor | None = None
        self.exit_logits: dict[int, Tensor] = {}
        self.exit_tokens: dict[int, Tensor] = {}
        self.checked: dict[int, list[int]] = {}
        """By layer, the rows that were checked there."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While active, layer outputs of frozen rows are replaced by their frozen state.

        A layer computes keys and values from its input, so restoring the *output* of layer l
        makes layer l+1 propagate from the frozen state, with no code per architecture.
        """
        handles = [
            layer.register_forward_hook(self._after(depth))
            for depth, layer in enumerate(self.ref.parts.layers, start=1)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, depth: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = hidden_of(output)[0]
            if self.state is not None and self.policy.mode != "defer":
                hidden = torch.where(self.frozen[:, None], self.state, hidden)
            if depth in self.ref.exit_layers:
                self._check(depth, hidden)
            return (hidden[None], *output[1:]) if isinstance(output, tuple) else hidden[None]

        return hook

    def _check(self, depth: int, hidden: Tensor) -> None:
        threshold, eos_threshold = self.policy.thresholds_at(depth)
        rows = (self.decode & ~self.frozen).nonzero().flatten()
        if threshold == NEVER or not rows.numel():
            return
        like = hidden.new_empty(rows.numel(), dtype=torch.float32)
        limits = torch.full_like(like, threshold), torch.full_like(like, eos_threshold)
        logits = self.ref.parts.classify(hidden[rows])
        tokens, exits = self.ref.exit_tokens(logits), self.ref.check(logits, *limits).exits
        self.checks[rows] += 1
        self.checked[depth] = rows.tolist()
        for index in exits.nonzero().flatten().tolist():
            row = int(rows[index])
            self.exit_logits[row], self.exit_tokens[row] = logits[index], tokens[index]
        self.frozen[rows[exits]] = True
        self.depth[rows[exits]] = depth
        # Rows frozen earlier hold their state in `hidden` already; active rows are not read.
        self.state = hidden

    def finish(self, hidden: Tensor) -> OracleTrace:
        """The result: full-depth logits of active rows, those at their exit of frozen ones."""
        logits = self.ref.parts.classify(hidden)
        token = logits.argmax(dim=-1)
        for row, row_logits in self.exit_logits.items():
            logits[row], token[row] = row_logits, self.exit_tokens[row]
        return OracleTrace(logits=logits, token=token, depth=self.depth, checks=self.checks)


def load_reference(
    model_dir: str,
    exit_layers: Sequence[int] | None = None,
    *,
    exit_rows: str = "frequent",
    criterion: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> Reference:
    """Loads a checkpoint with the exits and end-of-sequence ids it declares.

    Args:
        model_dir: the checkpoint.
        exit_layers: instead of those the checkpoint declares.
        exit_rows: the server's option; "frequent": checks read the checkpoint's exit rows.
        criterion: instead of the checkpoint's.
        device: where it runs; "auto": on a GPU if there is one with room for it.
        dtype: of weights and states; "bfloat16" rounds nearly as a server does.

    Raises:
        ExitServeError: its weights do not load: some are missing, or a download broke off.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from exitserve.checkpoint.block import MultiExit, read_multi_exit
    from exitserve.checkpoint.exit_rows import load_exit_rows

    _give_memory_back()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise ExitServeError(f"'{model_dir}' does not load: {one_line(str(error))}") from error
    model = model.to(roomy_device(model) if device == "auto" else device)
    block = read_multi_exit(model_dir) or MultiExit(exit_layers=())
    layers = block.exit_layers if exit_layers is None else exit_layers
    ends = eos_ids(model)
    kind = criterion_of(block.criterion if criterion is None else criterion)
    rows = None
    if block.rows_file is not None and exit_rows == FREQUENT:
        rows = load_exit_rows(model_dir, block.rows_file)
    return Reference(model, layers, ends, kind, rows)


def _give_memory_back() -> None:
    """Large tensors on a CPU go back to the system once they are freed.

    By default glibc comes to keep those of up to 32 MB, which logits are; before 2.38 it may not
    use that memory again for aligned tensors (bug 14581), and a calibration grew to 13 GB.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD


def roomy_device(model: nn.Module) -> torch.device:
    """A GPU with room for a model and its passes, else the CPU: a server may hold the memory."""
    weights = sum(one.nbytes for one in model.parameters())
    if torch.cuda.is_available() and 1.5 * weights < torch.cuda.mem_get_info()[0]:
        return torch.device("cuda")
    return torch.device("cpu")


def eos_ids(model: Any) -> list[int]:
    """End-of-sequence ids that a model's config and generation config name."""
    found: list[int] = []
    for config in (model.config, model.generation_config):
        value = getattr(config, "eos_token_id", None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return sorted(set(found))
