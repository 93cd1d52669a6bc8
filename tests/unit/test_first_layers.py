"""Which tensors and which entries of a config belong to the first layers."""

from __future__ import annotations

import pytest

from exitserve.engine.options import make_rules
from exitserve.errors import ExitServeError
from exitserve.first_layers import (
    beyond,
    check_depth,
    config_overrides,
    cut_config,
    layer_of,
)


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


def test_a_block_without_exits_is_dropped() -> None:
    assert "multi_exit" not in cut_config(LAYERED, 2)


def test_all_layers_change_nothing() -> None:
    assert cut_config(LAYERED, 6) == LAYERED
    assert config_overrides(LAYERED, 6) == {}


def test_overrides_hold_what_changes_but_exits() -> None:
    """Exits of a server are options of its own, see `exitserve.engine.options`."""
    assert config_overrides(LAYERED, 5) == {
        "num_hidden_layers": 5,
        "layer_types": ["a", "b", "c", "d", "e"],
        "no_rope_layers": [1, 1, 1, 0, 1],
        "mlp_only_layers": [0, 2],
    }
    assert config_overrides({"n_layer": 12}, 4) == {"n_layer": 4}


@pytest.mark.parametrize("layers", [0, -1, 7, 2.0, True, None])
def test_a_depth_out_of_range_is_refused(layers: object) -> None:
    with pytest.raises(ExitServeError, match=r"--layers .* from 1 to 6 is allowed"):
        check_depth(layers, LAYERED, "--layers")


def test_a_server_of_the_first_layers_knows_their_exits_alone() -> None:
    """Before it starts, from the checkpoint; and inside, from a config whose layers are cut."""
    options = {"max_layers": 3}
    inside = LAYERED | config_overrides(LAYERED, 3)
    for config in (LAYERED, inside):
        rules = make_rules(config, options)
        assert (rules.num_layers, rules.exit_layers) == (3, (2,))
        assert make_rules(config, options | {"exit_layers": [1, 2]}).exit_layers == (1, 2)
        with pytest.raises(ExitServeError, match="exit layer 4 is out of range"):
            make_rules(config, options | {"exit_layers": [4]})
    with pytest.raises(ExitServeError, match="max_layers 7"):
        make_rules(LAYERED, {"max_layers": 7})
