"""`benchmarks/trace_replay.py`: real traces' formats, and a replay against a real server."""

from pathlib import Path
from typing import Any

import pytest

from exitserve.errors import ExitServeError

from ..scripts import ROOT, script

pytestmark = pytest.mark.nightly

SCRIPT = ROOT / "benchmarks" / "trace_replay.py"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:46.9951690,40,109
2023-11-16 18:17:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1200, "output_length": 40, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1300, "output_length": 8, "hash_ids": [0, 1, 3]}
"""


@pytest.fixture(scope="module")
def replay() -> Any:
    return script(SCRIPT)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azures_format(replay: Any, tmp_path: Path) -> None:
    read = list(replay.read_trace(written(tmp_path, AZURE)))
    assert [(one.prompt, one.answer) for one in read] == [(374, 44), (40, 109), (396, 109)]
    assert [round(one.seconds, 3) for one in read] == [0.0, 0.315, 124.315]
    kept = replay.scaled(iter(read), replay.Scale(minutes=1, rate=1.0, lengths=0.25, context=64))
    assert [(one.prompt, one.answer) for one in kept] == [(53, 11), (10, 27)]
    half = replay.scaled(iter(read), replay.Scale(minutes=10, rate=0.34, lengths=1, context=4096))
    assert [one.prompt for one in half] == [396]


def test_mooncakes_format_shares_text_by_blocks(replay: Any, tmp_path: Path) -> None:
    read = list(replay.read_trace(written(tmp_path, MOONCAKE)))
    assert [one.seconds for one in read] == [0.0, 1.5]
    first, second = (replay.prompt_of(one, 0, range(10_007), 1.0) for one in read)
    assert (len(first), len(second)) == (1200, 1300)
    assert first[:1024] == second[:1024] and first[1024:] != second[1024:1200]


def test_another_file_is_said_to_be_none(replay: Any, tmp_path: Path) -> None:
    with pytest.raises(ExitServeError, match="is no trace: its first line is 'a,b'"):
        list(replay.read_trace(written(tmp_path, "a,b\n1,2\n")))
