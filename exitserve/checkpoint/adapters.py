"""Adapters: LoRA in PEFT's format, merged into their base before anything else reads it.

With the factors A [r, in] and B [out, r] of a map W [out, in]:

    W' = W + s B A,   s = lora_alpha / r, or lora_alpha / sqrt(r) where rank-stabilised

in float32, rounded once to the type of W. PEFT's own merge needs PEFT, which serving installs lack,
and the whole model in memory. Here one file of weights is read at a time, and a tensor without an
adapter keeps its bytes; tests/train compares the two.

The merged checkpoint is an ordinary one, in the assets cache of the Hugging Face libraries, and is
written again only when base or adapter change. Its exits, thresholds and exit rows are the
adapter's, looked up at every start, so that a calibration, which is written beside the adapter,
holds from then on.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitserve.checkpoint.block import (
    BLOCK,
    check_exit_layers,
    num_layers_of,
    parse_multi_exit,
    read_config,
    read_json_object,
)
from exitserve.checkpoint.calibration import ROWS_FOLDER
from exitserve.checkpoint.files import copy_files, replace_file
from exitserve.checkpoint.hub import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BLOCK_FILE,
    CARD,
    files_beside_weights,
    local_adapter,
    local_checkpoint,
)
from exitserve.checkpoint.weights import StoredTensor, index_of, read_weights, weight_files
from exitserve.errors import ExitServeError, shown

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be merged into."""
NOT_PLAIN = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
"""Keys of PEFT's config by which B A is not all that is added, or not with one factor."""
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or their beginnings: the adapter was trained beside other weights
than the base's."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Factors:
    """What is added to one map."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[out, r]."""
    scale: float
    transposed: bool
    """The map's weight is [in, out], as GPT-2's are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the map's weight."""
        out, within = self.b.shape[0], self.a.shape[1]
        return (within, out) if self.transposed else (out, within)

    def added_to(self, weight: Tensor) -> Tensor:
        product = self.b.float() @ self.a.float()
        delta = (product.mT if self.transposed else product) * self.scale
        return (weight.float() + delta).to(weight.dtype)


def merged_checkpoint(model: str, adapter: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint with an adapter merged into its weights, made if need be.

    Raises:
        ExitServeError: one of them cannot be read, they do not fit each other, the adapter is more
            than plain LoRA, or the cache cannot be written to.
    """
    source, base = local_adapter(adapter), local_checkpoint(model, revision)
    config = with_exits_of(source, read_config(base))
    name = f"{_name_of(model)}+{_name_of(adapter)}"
    try:
        folder = _cache() / _state_of(base, source) / name
        if not folder.is_dir():
            targets = _targets(_read_factors(source), base, source)
            named = str(_config_of(source).get("base_model_name_or_path") or model)
            if _name_of(named) != _name_of(model):
                print(f"exitserve: '{adapter}' was made for '{named}'.", file=sys.stderr)
            print(f"exitserve: merging '{adapter}' into '{model}': {folder}", file=sys.stderr)
            _write(base, source, targets, config, folder)
        _take_exits(source, config, folder)
    except OSError as error:
        raise ExitServeError(
            f"'{adapter}' cannot be merged into '{model}': {error}. Merged checkpoints go into the "
            f"folder that HF_ASSETS_CACHE or HF_HOME names."
        ) from error
    return folder


def with_exits_of(adapter: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A base's `config.json` with an adapter's exits instead of its own; without, if it has none.

    Raises:
        ExitServeError: they are malformed, or do not fit the base's depth.
    """
    plain = {key: value for key, value in config.items() if key != BLOCK}
    path = adapter / BLOCK_FILE
    if not path.is_file():
        return plain
    own = read_json_object(path, f"no file at '{path}'.")
    try:
        block = parse_multi_exit(own)
        if block is not None:
            check_exit_layers(block.exit_layers, num_layers_of(config))
    except ExitServeError as error:
        raise ExitServeError(f"'{path}': {error}") from error
    return plain if block is None else plain | {BLOCK: own[BLOCK]}


def _name_of(model: str) -> str:
    """The last part of a path or hub id; of `runs/x/adapter`, where `exitserve train` puts it, x.

    Tables, pages and the server's log call the merged checkpoint by both names.
    """
    path = Path(model).absolute()
    return path.parent.name if path.name == "adapter" else path.name


def _cache() -> Path:
    """Where merged checkpoints go."""
    from huggingface_hub import cached_assets_path

    try:
        return cached_assets_path("exitserve", "merged")
    except ValueError as error:  # a file is in its place
        raise OSError(str(error)) from error


def _state_of(base: Path, adapter: Path) -> str:
    """Names what the merged files are made of: by path, size and time of each, not by reading.

    Not the base's config, whose exits change with its calibrations: `_take_exits` writes it anew.
    """
    files = [base / name for name in weight_files(base)]
    files += [adapter / ADAPTER_CONFIG, adapter / ADAPTER_WEIGHTS]
    files += [folder / path for folder in (base, adapter) for path in _beside(folder)]
    found = [(str(one.parent.resolve() / one.name), one.stat()) for one in files]
    states = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]


def _beside(directory: Path) -> Iterator[Path]:
    """The tokenizer and the like: an adapter's take the place of the base's."""
    for path in files_beside_weights(directory):
        if path.parts[0] != ROWS_FOLDER:
            yield path


def _write(
    base: Path,
    adapter: Path,
    targets: Mapping[str, _Factors],
    config: Mapping[str, Any],
    folder: Path,
) -> None:
    """Writes the merged checkpoint, at once: whatever goes wrong, all of it is there or none."""
    with tempfile.TemporaryDirectory(prefix=".merging-", dir=folder.parent.parent) as place:
        partial = Path(place) / folder.name
        partial.mkdir()
        _write_weights(base, targets, partial)
        for source in (base, adapter):
            copy_files(source, partial, _beside(source))
        copy_files(
            base, partial, (Path(one) for one in (*index_of(base), CARD) if (base / one).is_file())
        )
        _take_exits(adapter, config, partial)
        folder.parent.mkdir(exist_ok=True)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same
                raise


def _config_of(adapter: Path) -> dict[str, Any]:
    return read_json_object(adapter / ADAPTER_CONFIG, f"'{adapter}' has no {ADAPTER_CONFIG}.")


def _read_factors(adapter: Path) -> dict[str, _Factors]:
    """The factors by the name of their map.

    Raises:
        ExitServeError: the files are missing or broken, or hold more than plain LoRA.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _config_of(adapter)
    _check_plain(config, adapter)
    path = adapter / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ExitServeError(
            f"'{path}' is not a complete safetensors file ({error}); copy it again."
        ) from error
    found: dict[str, _Factors] = {}
    for name, a in tensors.items():
        b = tensors.get(name.replace(_A, _B))
        if not name.endswith((_A, _B)) or b is None:
            raise ExitServeError(
                f"'{path}' holds '{name}', and only plain LoRA can be merged here: pairs of lora_A "
                f"and lora_B. Merge it with PEFT (merge_and_unload) and give the checkpoint."
            )
        if name.endswith(_A):
            rank = a.shape[0]
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            transposed = bool(config.get("fan_in_fan_out"))
            module = name.removeprefix(_PREFIX).removesuffix(_A)
            found[module] = _Factors(a, b, scale, transposed)
    return found


def _check_plain(config: Mapping[str, Any], adapter: Path) -> None:
    """Raises `ExitServeError` for what is not plain LoRA by PEFT's config."""
    start = config.get("init_lora_weights")
    reasons = {
        f"peft_type {shown(config.get('peft_type'))}": config.get("peft_type") != "LORA",
        f"init_lora_weights {shown(start)}": str(start).lower().startswith(CHANGE_THE_BASE),
        f"lora_alpha {shown(config.get('lora_alpha'))}": (
            not isinstance(config.get("lora_alpha"), int | float)
        ),
        **{f"{key} {shown(config.get(key))}": bool(config.get(key)) for key in NOT_PLAIN},
    }
    for reason, holds in reasons.items():
        if holds:
            raise ExitServeError(
                f"the adapter '{adapter}' has {reason}, and only plain LoRA can be merged here. "
                f"Merge it with PEFT (merge_and_unload) and give the checkpoint."
            )


def _targets(factors: Mapping[str, _Factors], base: Path, adapter: Path) -> dict[str, _Factors]:
    """The factors by the name of the base's tensor.

    Raises:
        ExitServeError: the base has no such tensor, or one of another shape, or a quantised one.
    """
    stored = {tensor.name: tensor for tensor in read_weights(base).tensors}
    found = {}
    for module, own in factors.items():
        tensor = _tensor_of(module, stored)
        if tensor is None:
            raise ExitServeError(
                f"the adapter '{adapter}' is for another model than '{base}', which has no map "
                f"'{module}'; give its base as MODEL."
            )
        if tensor.dtype not in FLOATS:
            raise ExitServeError(
                f"'{tensor.name}' of '{base}' is of type {tensor.dtype}, and adapters are merged "
                f"into {', '.join(FLOATS)} only; give the base that is not quantised."
            )
        if tensor.shape != own.shape or own.a.shape[0] != own.b.shape[1]:
            raise ExitServeError(
                f"the adapter '{adapter}' is for another model than '{base}': its factors of "
                f"'{module}' are {list(own.b.shape)} and {list(own.a.shape)}, which do not fit "
                f"{list(tensor.shape)}; give its base as MODEL."
            )
        found[tensor.name] = own
    return found


def _tensor_of(module: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """A map's weight. The hub's GPT-2 is stored without the prefix that its class has."""
    whole = f"{module}.weight"
    return stored.get(whole) or stored.get(whole.partition(".")[2])


def _write_weights(base: Path, targets: Mapping[str, _Factors], out: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    for name in weight_files(base):
        tensors = load_file(base / name)
        for key in targets.keys() & tensors.keys():
            tensors[key] = targets[key].added_to(tensors[key])
        with safe_open(base / name, "pt") as file:
            save_file(tensors, out / name, file.metadata())


def _take_exits(adapter: Path, config: Mapping[str, Any], folder: Path) -> None:
    """Brings exits, thresholds and exit rows to what is beside the adapter now.

    The config comes after the rows that it names and before the others go, as in a calibration.
    """
    own = sorted((adapter / ROWS_FOLDER).glob("*.safetensors"))
    kept = {path.relative_to(adapter): path.read_bytes() for path in own}
    for path, data in kept.items():
        (folder / path).parent.mkdir(exist_ok=True)
        if not (folder / path).is_file() or (folder / path).read_bytes() != data:
            replace_file(folder / path, data)
    if not (folder / "config.json").is_file() or read_config(folder) != config:
        replace_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    for path in (folder / ROWS_FOLDER).glob("*.safetensors"):
        if path.relative_to(folder) not in kept:
            path.unlink(missing_ok=True)
