"""CUDA graphs that are recorded, for engines on runner V2 (`tests/engine/recording.py`)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..recording import RecordedGraph, collective, launched, record, record_graphs, spent

SIZES = [1, 2, 4, 8, 16, 32]
SITE = Path(__file__).parent / "site"
"""Of modules that the engines' own processes load."""


class LastPass:
    """What attention reads in a replay: on a GPU its kernels find it where it lay in the capture,
    the CPU's takes metadata that is made anew for each pass."""

    current: ClassVar[LastPass]
    kept: dict[str, Any]

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils, model_runner
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

        LastPass.current, self.kept = self, {}
        for of in (cudagraph_utils, model_runner, speculator):
            self._keep(patch, of, "build_slot_mappings_by_layer", "slot_mapping")
        self._keep(patch, DefaultModelState, "prepare_attn", "attn_metadata")
        self._keep(patch, DraftModelSpeculator, "_build_attn_metadata", "attn_metadata")

    def _keep(self, patch: pytest.MonkeyPatch, of: Any, name: str, field: str) -> None:
        function = getattr(of, name)

        def kept(*args: Any, **kwargs: Any) -> Any:
            self.kept[field] = found = function(*args, **kwargs)
            return found

        patch.setattr(of, name, kept)


def update_metadata_in_graphs(patch: pytest.MonkeyPatch, last: LastPass) -> None:
    """Lets the CPU's attention go on to the next draft inside a graph, as FlashAttention does."""
    from vllm import _custom_ops as ops
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    def update(builder: Any, metadata: Any) -> None:
        slots = last.kept["slot_mapping"]

        def work() -> None:
            metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(metadata.seq_lens),
                num_heads=builder.num_heads,
                num_kv_heads=builder.num_kv_heads,
                head_dim=builder.head_dim,
                seq_lens=metadata.seq_lens,
                dtype=builder.dtype,
                query_start_loc=metadata.query_start_loc,
                causal=metadata.causal,
                sliding_window_size=builder.window_size,
                isa=builder.isa,
                enable_kv_split=False,
                dynamic_causal=None,
                kv_cache_dtype=builder.kv_cache_dtype,
            )
            if is_forward_context_available():  # in a replay, which begins with the last pass's
                context = get_forward_context()
                context.attn_metadata = dict.fromkeys(context.attn_metadata, metadata)
                context.slot_mapping = slots

        record(work)

    patch.setattr(CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", True)
    patch.setattr(
        CPUAttentionMetadataBuilder, "update_draft_decode_metadata", update, raising=False
    )


def capture_pieces(patch: pytest.MonkeyPatch) -> None:
    """Lets compiled segments be captured piece by piece, between one layer's attention and the
    next: what TorchDynamo traced runs as it is, since recorded graphs do not see compiled code."""
    from vllm.compilation import cuda_graph
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        compilation = config.compilation_config
        mode = compilation.mode
        update(config)
        if mode == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend = mode, "eager"
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            compilation.compile_sizes = []
            compilation.cudagraph_capture_sizes = SIZES
            compilation.max_cudagraph_capture_size = SIZES[-1]

    wrapper = f"{cuda_graph.__name__}.{cuda_graph.CUDAGraphWrapper.__qualname__}"
    own = {
        "check_and_update_config": check_and_update_config,
        "get_static_graph_wrapper_cls": lambda: wrapper,
    }
    for name, function in own.items():
        patch.setattr(CpuPlatform, name, staticmethod(function))
    patch.setattr(cuda_graph, "capture_pool", lambda *_: nullcontext())
    patch.setattr(cuda_graph, "weak_ref_tensors", spent)
    patch.setenv("VLLM_USE_AOT_COMPILE", "0")
    patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")


def let_capture(patch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Lets engines in this process capture decodes, as on a GPU; all graphs that were captured."""
    import torch
    from triton.runtime.interpreter import GridExecutor
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.forward_context import set_forward_context
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    record_graphs(patch)
    patch.setattr(GridExecutor, "__call__", launched(GridExecutor.__call__))
    for name in ("all_reduce", "all_gather"):
        patch.setattr(GroupCoordinator, name, collective(getattr(GroupCoordinator, name)))
    patch.setattr(model_runner, "lock_workspace", lambda: None)
    patch.setattr(cudagraph_utils, "graph_capture", lambda **_: nullcontext())
    patch.setattr(cudagraph_utils, "capture_pool", lambda *_: nullcontext())
    patch.setattr(CpuPlatform, "graph_pool_handle", lambda _: (0, 0), raising=False)

    def chosen(config: Any, *_: Any, **__: Any) -> CUDAGraphMode:
        if not config.cudagraph_mode.has_piecewise_cudagraphs():
            config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = SIZES, SIZES[-1]
        return config.cudagraph_mode

    patch.setattr(CompilationConfig, "resolve_cudagraph_mode_and_sizes", chosen)
    determine, warm_up = CPUWorker.determine_available_memory, CPUWorker.compile_or_warm_up_model

    def determine_available_memory(worker: Any) -> int:
        runner = worker.model_runner
        chosen(runner.compilation_config)
        runner.profile_run()
        runner.profile_cudagraph_memory()
        return determine(worker)

    def compile_or_warm_up_model(worker: Any) -> Any:
        worker.model_runner.capture_model()
        return warm_up(worker)

    patch.setattr(CPUWorker, "determine_available_memory", determine_available_memory)
    patch.setattr(CPUWorker, "compile_or_warm_up_model", compile_or_warm_up_model)
    last, found = LastPass(patch), list[RecordedGraph]()
    run_fullgraph = cudagraph_utils.CudaGraphManager.run_fullgraph

    def in_context(manager: Any, desc: Any) -> Any:
        context = {"num_tokens": desc.num_tokens, **last.kept}
        with set_forward_context(vllm_config=manager.vllm_config, **context):
            return run_fullgraph(manager, desc)

    patch.setattr(cudagraph_utils.CudaGraphManager, "run_fullgraph", in_context)

    class Listed(RecordedGraph):
        def __init__(self) -> None:
            super().__init__()
            found.append(self)

    patch.setattr(torch.cuda, "CUDAGraph", Listed)
    return found
