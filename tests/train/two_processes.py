"""What the two processes of `test_distributed.py` run.

A launch costs seconds, so one launch runs several commands:

    torchrun --nproc-per-node 2 two_processes.py FOLDER        data parallel
    torchrun --nproc-per-node 2 two_processes.py FOLDER fsdp   sharded, FSDP2
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from exitserve_training import commands
from exitserve_training.forward import ExitPass, MultiExitForward
from exitserve_training.objectives import weighted_sum
from exitserve_training.objectives.options import BuildContext
from exitserve_training.objectives.weighted_sum import Objectives
from exitserve_training.parts import model_parts
from exitserve_training.recipe import parse_recipe
from exitserve_training.skipping import SkipSampler


def main(folder: Path, kind: str) -> None:
    """Runs the commands of `commands.json`; writes down what each process said."""
    rank = int(os.environ["RANK"])
    if kind == "fsdp":
        allow_fsdp_on_cpu()
    # The launcher would end it before.
    commands._ERROR_DELAY_S = 0.0
    from exitserve import cli

    said = []
    for arguments in json.loads((folder / "commands.json").read_text()):
        poisoned = contextlib.nullcontext() if "NaN" not in arguments else nan_in_second_process()
        out, errors = io.StringIO(), io.StringIO()
        with poisoned, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = cli.main([word for word in arguments if word != "NaN"])
        distributed.barrier()
        said.append({"code": code, "out": out.getvalue(), "errors": errors.getvalue()})
    if kind == "fsdp":
        said.append({"differences": sharded_differences()})
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    distributed.barrier()


def allow_fsdp_on_cpu() -> None:
    """Accelerate shards on accelerators only, and goes on unsharded on a CPU: lift that."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def nan_in_second_process() -> Any:
    """In step 4 the loss of the second process alone is NaN."""
    original = weighted_sum.read_together

    def read(asked: Any, batch: Any) -> Any:
        total, told = original(asked, batch)
        bad = batch.step == 4 and distributed.get_rank() == 1 and torch.is_grad_enabled()
        factor = torch.nan if bad else 1.0
        loss, metrics = told["aligned"]
        return total * factor, {**told, "aligned": (loss * factor, metrics)}

    return mock.patch.object(weighted_sum, "read_together", read)


def tiny(tied: bool) -> tuple[Any, MultiExitForward]:
    """A model with all that has hooks: freezing by confidence, projector, checkpointing."""
    recipe = parse_recipe(
        {
            "output_dir": "unused",
            "data": {"files": ["unused"]},
            "model": "unused",
            "objectives": ["aligned", {"name": "nitp", "weight": 0.5}],
            "exit_aware": {"share": 1.0, "thresholds": [0.1, 0.3]},
        }
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=96,
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parts = model_parts(model)
    exits = (1, 2, 3)
    objectives = Objectives(recipe.objectives, BuildContext(exits, 4, 32, parts.head, seed=0))
    assert recipe.exit_aware is not None
    skipping = SkipSampler(recipe.exit_aware, exits, 4, 0)
    forward = MultiExitForward(model, parts, objectives, (*exits, 4), skipping)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, forward


def sharded_differences() -> dict[str, dict[str, float]]:
    """Loss and gradients of a sharded model against a whole one that sees all rows."""
    rank = distributed.get_rank()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    ids = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(1))
    request = ExitPass(0, 10)
    found = {}
    for tied in (True, False):
        whole, _ = tiny(tied)
        expected = torch.zeros(())
        for half in ids.split(2):
            part, _ = whole(input_ids=half, exit_pass=request)
            (part / 2).backward()
            expected += part.detach() / 2
        model, forward = tiny(tied)
        for layer in forward.parts.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss, metrics = model(input_ids=ids.split(2)[rank], exit_pass=request)
        loss.backward()
        mean: Tensor = loss.detach().clone()
        distributed.all_reduce(mean)
        gradients = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in gradients.values())
        errors = []
        for name, parameter in whole.named_parameters():
            difference = gradients[name].grad.full_tensor() - parameter.grad
            errors.append((difference.abs().max() / parameter.grad.abs().max()).item())
        found["tied" if tied else "untied"] = {
            "loss": (mean / 2 - expected).abs().item(),
            "gradients": max(errors),
            "parameters": len(errors),
            "frozen_share": metrics["frozen_share"].item(),
            "projector": gradients["exit_objectives.parts.nitp.projector.up.weight"]
            .grad.full_tensor()
            .abs()
            .max()
            .item(),
        }
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:]))
