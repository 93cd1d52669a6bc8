"""How much each layer's cross-entropy counts: the weights of the aligned-training paper, eq. 3."""

from collections.abc import Sequence

from exitserve.errors import ExitServeError


def counted_layers(num_layers: int, exit_layers: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the layers whose loss counts, ascending: the exit layers and always L.

    Args:
        num_layers: L, the full depth.
        exit_layers: depths in 1..L; None for every layer.

    Raises:
        ExitServeError: a layer is not a whole number in 1..L.
    """
    if exit_layers is None:
        return tuple(range(1, num_layers + 1))
    for layer in exit_layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer <= num_layers:
            raise ExitServeError(
                f"exit layer {layer!r} is out of range: the model has {num_layers} layers, "
                f"so choose whole numbers in 1..{num_layers - 1} (the last layer always counts)."
            )
    return tuple(sorted({*exit_layers, num_layers}))


def layer_weights(layers: Sequence[int], weights: str | Sequence[float] = "linear") -> list[float]:
    """Returns one weight per layer of `layers`.

    `"linear"` is eq. 3 of the aligned-training paper: with all L layers, 2l / (L(L+1)). For a
    subset S the weights keep their ratios and are renormalised to sum to 1 (l / sum of S), so
    that the loss, and with it the learning rate, keeps its scale whatever the exits.
    `"uniform"` is 1 / |S|. A sequence gives the weights themselves, one per layer of `layers`,
    and is used as it is, not rescaled.

    Raises:
        ExitServeError: a weight is negative or infinite, or all are zero.
    """
    if weights == "linear":
        total = sum(layers)
        return [layer / total for layer in layers]
    if isinstance(weights, str):
        return [1.0 / len(layers)] * len(layers)
    values = [float(weight) for weight in weights]
    if any(not 0.0 <= value < float("inf") for value in values) or not sum(values) > 0.0:
        raise ExitServeError(f"weights {values} must be finite, non-negative and not all zero.")
    return values
