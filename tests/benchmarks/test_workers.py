import json
import os

import pytest

from benchmarks.workers import Row, main, table

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


def test_workers_and_a_bare_server_are_measured(tiny_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")  # without wrk: the load comes from Python
    path = tmp_path / "results.json"
    path.write_text('{"buckets": [7], "workers": ["older"]}')
    command = [f"--weights={tiny_file}", "--device=cpu", f"--json={path}", "--workers", "2"]
    assert main([*command, "--rounds=1", "--duration=1", "--connections=1"]) == 0
    out = capsys.readouterr().out
    assert "load from 1 Python processes" in out
    assert out.splitlines()[-1].split()[:2] == ["2", "no"]
    found = json.loads(path.read_text())
    assert found["buckets"] == [7]
    assert found["single"]["ours_p50_us"] > 0
    assert found["single"]["bare_p50_us"] > 0
    (row,) = found["workers"]
    assert (row["n"], row["mps"]) == (2, False)
    assert row["requests_per_s"] > 0
    assert 0 < row["p50_us"] <= row["p99_us"]
    assert found["workers_how"]["connections_per_worker"] == 1


def test_the_ratio_is_to_one_worker():
    rows = [Row(1, False, 4000.0, 900, 2000, ()), Row(8, True, 26000.0, 1100, 3000, ())]
    lines = table(rows).splitlines()
    assert lines[1].split() == ["1", "no", "4,000", "900", "2,000", "1.00"]
    assert lines[2].split() == ["8", "yes", "26,000", "1,100", "3,000", "6.50"]
    assert table(rows[1:]).splitlines()[1].split()[-1] == "-"


def test_a_missing_weight_file_is_named(tmp_path, capsys):
    assert main([f"--weights={tmp_path / 'none'}"]) == 2
    assert "none: " in capsys.readouterr().err
