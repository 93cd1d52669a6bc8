"""Makes a trained model deeper without changing what it computes.

After each layer come copies of it whose output projections, of attention and of the MLP, are zero:
they add nothing to the residual stream until training moves those projections (LLaMA Pro,
arXiv 2401.02415, section 3.2, which adds such blocks to freeze the others; here all train). The
other weights of a copy are its layer's own, so that it has features to begin with.

With n times the layers, state l of the model is state n * l of the grown one, so its exits move
to n times their depth.
"""

import copy

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from exitserve.errors import ExitServeError
from exitserve_training.parts import model_parts

_OUTPUTS = (("self_attn.o_proj", "mlp.down_proj"), ("attn.c_proj", "mlp.c_proj"))
"""The output projections of Llama-like layers, and of GPT-2's."""

_BY_LAYER = ("layer_types", "mlp_layer_types")
"""Lists of a config with an entry for each layer."""


def grown_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The config with more layers, the new ones of the kind of those they follow.

    Raises:
        ExitServeError: not a multiple of what the model has.
    """
    times, rest = divmod(num_layers, config.num_hidden_layers)
    if rest or times < 2:
        raise ExitServeError(
            f"grow_to_layers={num_layers} must be 2, 3, ... times the {config.num_hidden_layers} "
            f"layers of the model, such as {2 * config.num_hidden_layers}."
        )
    deeper: PreTrainedConfig = copy.deepcopy(config)
    deeper.num_hidden_layers = num_layers
    for name in _BY_LAYER:
        if kinds := getattr(config, name, None):
            setattr(deeper, name, [kind for kind in kinds for _ in range(times)])
    return deeper


def grow(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of `num_layers` layers that computes what `model` does.

    Raises:
        ExitServeError: not a multiple of its layers, or layers whose outputs are not known.
    """
    deeper: PreTrainedModel = type(model)(grown_config(model.config, num_layers))
    nn.Module.to(deeper, model.dtype)
    old, new = model_parts(model).layers, model_parts(deeper).layers
    prefix = next(name for name, module in model.named_modules() if module is old)
    times = num_layers // len(old)
    others = {n: t for n, t in model.state_dict().items() if not n.startswith(f"{prefix}.")}
    deeper.load_state_dict(others, strict=False)
    for number, layer in enumerate(new):
        layer.load_state_dict(old[number // times].state_dict())
        if number % times:
            _silence(layer)
    deeper.generation_config = model.generation_config
    return deeper


def _silence(layer: nn.Module) -> None:
    """Makes a layer add nothing to the residual stream."""
    names = {name for name, _ in layer.named_modules()}
    outputs = next((found for found in _OUTPUTS if names.issuperset(found)), None)
    if outputs is None:
        raise ExitServeError(
            f"grow_to_layers: the output projections of a {type(layer).__name__} are not known; "
            f"known are {' and '.join(' with '.join(pair) for pair in _OUTPUTS)}."
        )
    for name in outputs:
        for parameter in layer.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
