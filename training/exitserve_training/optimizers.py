"""Optimizers that the Trainer does not have: Muon with AdamW, and AdamW for bfloat16 weights.

`muon_with_adamw`: Muon for the matrices inside the layers, AdamW for all else, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) steps along the orthogonalised
momentum of a matrix. Its update is scaled to the size of AdamW's, 0.2 sqrt(max(rows, columns))
("Muon is Scalable for LLM Training", arXiv 2502.16982, eq. 4), so one learning rate and one weight
decay serve both. Embeddings, the head, norms, biases and the objectives' own parameters are
AdamW's: what Muon assumes of a map between hidden states does not hold for them.

`kahan_adamw`: a bfloat16 weight has 8 bits of precision, so steps smaller than 1/256 of it are lost
when they are added. Kahan's sum keeps what was lost in one more bfloat16 number a weight
(torch-optimi, after arXiv 2010.06192): with both of AdamW's states in bfloat16, 10 bytes a weight
where float32 has 16.
"""

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import TrainingArguments

from exitserve.errors import ExitServeError, install


class MuonWithAdamW(Optimizer):
    """Both optimizers over the same groups and state.

    Schedulers and checkpoints see one optimizer: a learning rate that is set here is theirs, and
    `state_dict` holds Muon's momentum and AdamW's moments under one numbering.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self._parts = parts
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        """Lets them work on this optimizer's groups and state, not on their own."""
        start = 0
        for part in self._parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            start += count

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both; the Trainer gives no closure."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores both; torch makes new groups and a new state, which are shared again."""
        super().load_state_dict(state_dict)
        self._share()


def muon_with_adamw(
    model: nn.Module, layers: nn.Module, decayed: Collection[str], arguments: TrainingArguments
) -> MuonWithAdamW:
    """Muon for every trained matrix in `layers`, AdamW for the rest of the model.

    Args:
        model: all that is trained.
        layers: its decoder or encoder layers.
        decayed: names of the parameters that weight decay is for; Muon's matrices always have it.
        arguments: learning rate and weight decay of both; AdamW's betas and epsilon.

    Raises:
        ExitServeError: no layer has a matrix to train.
    """
    inside = {p for p in layers.parameters() if p.ndim == 2 and p.requires_grad}
    others = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p not in inside]
    # In the model's order: a set has none that a resumed run would find again.
    matrices = [p for p in model.parameters() if p in inside]
    if not matrices:
        raise ExitServeError(
            "optimizer=muon is for matrices inside the layers, and none of them is trained here; "
            "use optimizer=adamw."
        )
    rate, decay = arguments.learning_rate, arguments.weight_decay
    groups = _groups(others, decayed, decay)
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    muon = Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    if not groups:  # adapters alone learn
        return MuonWithAdamW(muon)
    return MuonWithAdamW(muon, AdamW(groups, lr=rate, betas=betas, eps=arguments.adam_epsilon))


def check_kahan() -> None:
    """Raises `ExitServeError` where torch-optimi is missing."""
    if find_spec("optimi") is None:
        raise ExitServeError(
            f"weights=bfloat16 needs the package 'torch-optimi', whose AdamW keeps small steps: "
            f"{install('bf16')}."
        )


def kahan_adamw(
    model: nn.Module, decayed: Collection[str], arguments: TrainingArguments
) -> Optimizer:
    """AdamW whose sums on bfloat16 weights lose nothing; for float32 ones it is plain AdamW."""
    import optimi

    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer: Optimizer = optimi.AdamW(
        _groups(trained, decayed, arguments.weight_decay),
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
    )
    return optimizer


def _groups(
    parameters: Sequence[tuple[str, nn.Parameter]], decayed: Collection[str], decay: float
) -> list[dict[str, Any]]:
    """Those that weight decay is for, and those that it is not for."""
    kept = [p for name, p in parameters if name in decayed]
    free = [p for name, p in parameters if name not in decayed]
    return [
        {"params": params, "weight_decay": share}
        for params, share in ((kept, decay), (free, 0.0))
        if params
    ]
