"""The engine's check and its propagation in Triton: what the oracle and Hugging Face say."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from exitserve.policy import ExitPolicy
from exitserve.reference import cached, load_reference

PROMPTS = [list(range(5, 25)), list(range(90, 60, -1)), [40, 41, 42]]
THRESHOLDS = [0.05, 0.1, 0.2]


@pytest.fixture
def engine(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> Any:
    from exitserve.engine.launch import start_engine

    monkeypatch.setenv("EXITSERVE_KERNELS", "triton")
    if device.type == "cpu":  # beside the tests of runner V2, vLLM would take that
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    started: Any = start_engine(
        make_checkpoint("gemma2"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,  # of which vLLM asks that it is free
        max_num_seqs=4,
    )
    yield started
    started.llm_engine.engine_core.shutdown()


@pytest.mark.nightly
def test_it_is_the_oracle(
    engine: Any, make_checkpoint: Callable[..., Path], device: torch.device
) -> None:
    from vllm import SamplingParams

    from exitserve.bench.engines import take_traces

    params = [
        SamplingParams(
            max_tokens=16,
            temperature=0,
            ignore_eos=True,
            extra_args={"exit_threshold": threshold, "exit_trace": [f"job-{index}"]},
        )
        for index, threshold in enumerate(THRESHOLDS)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert engine.collective_rpc("exit_kernels")[0] == {
        "exit_check": "triton",
        # The CPU's caches are packed in a way that vLLM alone knows.
        "propagate_kv": "torch" if device.type == "cpu" else "triton",
    }
    oracle = load_reference(str(make_checkpoint("gemma2")))
    for index, (prompt, threshold) in enumerate(zip(PROMPTS, THRESHOLDS, strict=True)):
        found = oracle.decode(prompt, 16, ExitPolicy.confidence(threshold), ignore_eos=True)
        (depths,) = take_traces(engine, f"job-{index}").values()
        assert list(outputs[index].outputs[0].token_ids) == found.token_ids
        assert depths == found.exit_layers


BLOCKS, BLOCK_SIZE, HEADS, SIZE = 6, 4, 2, 32
KINDS = ["full_attention", "sliding_attention"] * 3


SCALES = {"whole": ([0.02], [0.03]), "heads": ([0.02, 0.07], [0.03, 0.05])}


def attention_of(
    index: int, kind: torch.dtype, cache_dtype: str, scales: str, device: torch.device
) -> Any:
    """A layer's cache as vLLM's FlashAttention and Triton backends keep it."""
    of_keys, of_values = SCALES[scales]
    cache = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE, device=device).to(kind)
    return SimpleNamespace(
        layer_name=f"layers.{index}",
        num_kv_heads=HEADS,
        head_size=SIZE,
        attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"),
        kv_cache=cache,
        kv_cache_dtype=cache_dtype,
        _k_scale=torch.tensor(of_keys, device=device),
        _v_scale=torch.tensor(of_values, device=device),
    )


def layer_kv_of(layer: Any, attention: Any, rotary: Any) -> Any:
    """What `MultiExitMixin.layer_kv` says of a vLLM layer, for Hugging Face's."""
    from exitserve.engine.layers.key_values import LayerKV, Norm

    def source(linear: torch.nn.Linear) -> tuple[Any, slice]:
        method = SimpleNamespace(apply=lambda _, x, bias: x @ linear.weight.T)
        return SimpleNamespace(quant_method=method), slice(None)

    def norm(module: Any) -> Norm:  # Gemma's multiply by one plus their weight
        return Norm(module.weight.float() + 1.0, None, module.eps, centred=False)

    own = layer.self_attn
    return LayerKV(
        attention=attention,
        sources=(source(own.k_proj), source(own.v_proj)),
        input_norm=norm(layer.input_layernorm),
        key_norm=norm(own.k_norm),
        rotary=rotary,
    )


def rotary_of(embedding: Any, kind: str) -> Any:
    """Hugging Face's embedding of one kind of layer, called as vLLM's are."""
    from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb

    def rotate(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        angles = embedding(key, positions[None], kind)
        heads = key.view(1, len(key), -1, SIZE)
        return query, apply_rotary_pos_emb(heads, heads, *angles, unsqueeze_dim=2)[1].view_as(key)

    return rotate


@pytest.mark.parametrize(
    ("cache_dtype", "scales"), [("auto", "whole"), ("fp8_e5m2", "whole"), ("fp8_e5m2", "heads")]
)
def test_frozen_rows_fill_paged_caches(
    cache_dtype: str,
    scales: str,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """Gemma 3: key norms, two rotary embeddings, and layers whose blocks differ."""
    from transformers import AutoModelForCausalLM
    from vllm.forward_context import override_forward_context
    from vllm.v1.worker.utils import clear_layer_kv_caches

    from exitserve.engine.layers.propagation import Propagation
    from exitserve_kernels.dispatch import chosen

    monkeypatch.setenv("EXITSERVE_KERNELS", "triton")
    folder = make_checkpoint("gemma3_text", head_dim=SIZE, layer_types=KINDS)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).model
    kind = torch.float32 if cache_dtype == "auto" else torch.uint8
    attentions = [attention_of(at, kind, cache_dtype, scales, device) for at in range(len(KINDS))]
    rotaries = {one: rotary_of(model.rotary_emb, one) for one in set(KINDS)}
    layers = [
        layer_kv_of(layer, attention, rotaries[one])
        for layer, attention, one in zip(model.layers, attentions, KINDS, strict=True)
    ]
    states = torch.randn(3, model.config.hidden_size, device=device)
    positions = torch.tensor([5, 70, 0], device=device)
    slots = {one: torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:3] for one in set(KINDS)}
    names = {one.layer_name: slots[kind] for one, kind in zip(attentions, KINDS, strict=True)}
    context: Any = SimpleNamespace(slot_mapping=names)
    with torch.no_grad(), override_forward_context(context):
        propagation = Propagation(lambda: layers, (2, 4), 100)
        propagation.fill(states, positions, 2)
        assert chosen()["propagate_kv"] == "triton"
        first = [attention.kv_cache.clone() for attention in attentions]
        # As vLLM does on a GPU once it knows what graphs need, and again for the real caches.
        for is_told in (True, False):
            bound = [StorageWeakRef(one.kv_cache.untyped_storage()) for one in attentions]
            if is_told:
                clear_layer_kv_caches([*attentions, *propagation.modules()])
                assert all(one.expired() for one in bound), "memory that vLLM let go is held"
            for attention, filled in zip(attentions, first, strict=True):
                attention.kv_cache = torch.zeros_like(filled)
            propagation.fill(states, positions, 2)
            for attention, filled in zip(attentions, first, strict=True):
                assert torch.equal(attention.kv_cache, filled), "the caches that were bound before"
    # Sums of 128 products in another order; e5m2 has two bits, and the interpreter cuts.
    close = {"rtol": 1e-4 if kind == torch.float32 else 0.26, "atol": 1e-5}
    for index, (attention, one) in enumerate(zip(attentions, KINDS, strict=True)):
        cache = attention.kv_cache
        if index < 2:
            assert not cache.any(), "a layer that has run"
            continue
        if kind == torch.uint8:
            both = torch.tensor(SCALES[scales], device=device)  # [keys and values, heads or 1]
            by_head = both.expand(2, HEADS).T.repeat_interleave(SIZE, dim=1)
            cache = cache.view(torch.float8_e5m2).float() * by_head[:, None]
        found = cache.transpose(1, 2).flatten(0, 1)[slots[one]]  # [N, H, 2 * P]
        truth = keys_and_values(model, index, one, states, positions)
        torch.testing.assert_close(found, truth, **close)


@torch.no_grad()
def keys_and_values(
    model: Any, index: int, kind: str, states: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """What Hugging Face's layer puts into its cache [N, H, 2 * P]: keys, then values."""
    from transformers import DynamicCache

    cache, rows = DynamicCache(), len(states)
    angles = model.rotary_emb(states[None], positions[None], kind)
    mask = states.new_zeros(1, 1, rows, rows)
    layer = model.layers[index]
    normed = layer.input_layernorm(states[None])
    layer.self_attn(normed, angles, attention_mask=mask, **cached(layer.self_attn, cache))
    own = cache.layers[index]
    return torch.cat([own.keys, own.values], dim=-1)[0].transpose(0, 1)
