"""Which tensors and which entries of a config belong to the first layers."""

import pytest

from exitserve.checkpoint.first_layers import beyond, cut_config, layer_of


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.self_attn.q_proj.weight", 11),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale", 3),
        ("transformer.h.0.attn.c_attn.bias", 0),
        ("h.5.ln_1.weight", 5),
        ("model.embed_tokens.weight", None),
        ("model.norm.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_the_layer_of_a_tensor(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer
    if layer is None:
        assert not beyond(name, 1)
    else:
        assert beyond(name, layer) and not beyond(name, layer + 1)


LAYERED = {
    "num_hidden_layers": 6,
    "layer_types": ["a", "b", "c", "d", "e", "f"],
    "no_rope_layers": [1, 1, 1, 0, 1, 1],
    "mlp_only_layers": [0, 2, 5],
    "sliding_window_pattern": 3,
    "max_window_layers": 5,
    "eos_token_id": [1, 2, 3, 4, 5, 6],  # as long as the model is deep, and not about layers
    "multi_exit": {"version": 1, "exit_layers": [2, 4], "objective": "aligned"},
}


def test_lists_by_layer_are_cut_and_others_kept() -> None:
    assert cut_config(LAYERED, 3) == LAYERED | {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "c"],
        "no_rope_layers": [1, 1, 1],
        "mlp_only_layers": [0, 2],
        "max_window_layers": 3,
        "multi_exit": {
            "version": 1,
            "exit_layers": [2],
            "objective": "aligned",
            "criterion": "max_prob",
        },
    }
