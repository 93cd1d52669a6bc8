"""The multi_exit block and what is refused about it."""

import json
from pathlib import Path

import pytest

from exitserve.checkpoint.block import MultiExit, read_config, read_multi_exit, write_multi_exit
from exitserve.checkpoint.calibration import OperatingPoint
from exitserve.errors import ExitServeError

from ..shapes import calibration_of

CALIBRATION = calibration_of(
    OperatingPoint(
        agreement=0.99,
        thresholds={2: 0.9, 4: 0.8},
        eos_thresholds={2: 1.0, 4: 0.95},
        found={"mean_depth": 4.5},
    ),
    OperatingPoint(agreement=0.9, thresholds={2: 0.5}, eos_thresholds={2: 1.0}),
    OperatingPoint(agreement=0.95, thresholds={2: 0.7}, eos_thresholds={2: 1.0}),
    mode="confidence",
    num_layers=6,
    agreement_at={2: 0.5},
    provenance={"tokens": 1000},
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 6}')
    return tmp_path


def test_what_is_written_is_read(directory: Path) -> None:
    block = MultiExit(exit_layers=(2, 4), calibration=CALIBRATION)
    write_multi_exit(directory, block)
    assert read_multi_exit(directory) == block
    assert read_config(directory)["model_type"] == "llama", "the rest of the config is kept"


@pytest.mark.parametrize(
    ("target", "promised"), [(0.5, 0.9), (0.9, 0.9), (0.93, 0.95), (0.96, 0.99), (0.999, None)]
)
def test_a_target_gets_the_cheapest_point_that_promises_it(
    target: float, promised: float | None
) -> None:
    point = CALIBRATION.for_agreement(target)
    assert (point.agreement if point else None) == promised


def test_a_cut_block_keeps_what_is_left_and_promises_nothing() -> None:
    block = MultiExit(exit_layers=(2, 4), calibration=CALIBRATION).first(4)
    assert block is not None and block.exit_layers == (2,)
    assert block.calibration is not None
    assert not block.calibration.agreement_at, "with another full depth"
    assert block.calibration.chosen.thresholds == {2: 0.9}
    assert block.calibration.chosen.agreement is None
    assert block.calibration.for_agreement(0.5) is None
    assert MultiExit(exit_layers=(2, 4)).first(2) is None
    whole = MultiExit(exit_layers=(2, 4), calibration=CALIBRATION)
    assert whole.first(6) == whole, "all layers: nothing is lost"


def test_a_plain_checkpoint_has_no_block(directory: Path) -> None:
    assert read_multi_exit(directory) is None


def test_another_version_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"multi_exit": {"version": 2}}))
    with pytest.raises(ExitServeError, match="version 2"):
        read_multi_exit(directory)


@pytest.mark.parametrize(
    "text",
    [b"{", b'{"a": "\xff"}', b"[" * 100_000, b'{"num_hidden_layers": ' + b"9" * 5000 + b"}"],
    ids=["cut off", "no text", "nested", "a long number"],
)
def test_a_broken_config_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ExitServeError, match="not valid JSON"):
        read_config(tmp_path)


def test_a_write_that_fails_leaves_the_old_config(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (directory / "config.json").read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_multi_exit(directory, MultiExit(exit_layers=(1,)))
    assert (directory / "config.json").read_bytes() == before
    assert [one.name for one in directory.iterdir() if one.name.startswith(".config")] == []


def test_what_a_linked_config_points_to_stays(directory: Path, tmp_path: Path) -> None:
    """As in the cache of a model hub, whose files are links to shared blobs."""
    blob, config = tmp_path / "blob", directory / "config.json"
    before = config.read_bytes()
    blob.write_bytes(before)
    config.unlink()
    config.symlink_to(blob)
    write_multi_exit(directory, MultiExit(exit_layers=(1,)))
    assert blob.read_bytes() == before
    assert not config.is_symlink() and read_multi_exit(directory) == MultiExit(exit_layers=(1,))
