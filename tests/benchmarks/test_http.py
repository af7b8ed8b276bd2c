import json
from importlib.util import find_spec

import pytest

from benchmarks.http import PEERS, Round, main, ratios


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    def rounds(server, *rates):
        return [Round("raw_1", server, rate, p50_ms=1.0, p99_ms=2.0, cpu_us=9.0) for rate in rates]

    both = [*rounds("against", 10, 5, 40), *rounds("ours", 10, 30, 20)]
    assert ratios(both)["raw_1"]["rps"] == [1.0, 0.5, 6.0]


def test_the_service_is_measured_beside_every_server_that_is_installed(
    tiny_file, tmp_path, fake_wrk, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("benchmarks.http._BURST_CONNECTIONS", 3)
    fake_wrk()
    # fastapi_2 is fastapi_1 with two workers, whose start takes as long as that of all others.
    monkeypatch.delitem(PEERS, "fastapi_2")
    path = tmp_path / "http.json"
    command = [f"--weights={tiny_file}", "--rounds=1", f"--json={path}"]
    assert main([*command, "--cases", "raw_2x3"]) == 0
    document = json.loads(path.read_text())
    assert document["rounds"] == 1
    found = document["cases"]["raw_2x3"]
    installed = [name for name, peer in PEERS.items() if find_spec(peer.library)]
    assert list(found) == ["ours_1", "ours_2", *installed]
    for numbers in found.values():
        assert numbers["rps"] > 0
        assert 0 < numbers["first_answer_p50_ms"] <= numbers["first_answer_max_ms"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    output, errors = capsys.readouterr()
    assert output.count("first answers, all connections opened at once: p50 ") == len(found)
    missing = errors.count("is not measured: it is not installed\n")
    assert missing == len(PEERS) - len(installed)
