import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.http import PEERS, Round, case, main, ratios, summarise, table


def test_a_missing_wrk_is_one_line_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    err = capsys.readouterr().err
    assert "apt-get install wrk" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["json_1", "raw_32", "json_64x4"])
def test_a_case_is_written_as_it_is_read(name):
    assert str(case(name)) == name


@pytest.mark.parametrize("name", ["json", "json_0", "png_1", "raw_4x", "json_1x32x4"])
def test_another_name_is_no_case(name, capsys):
    with pytest.raises(SystemExit):
        main(["--cases", name])
    assert f"{name!r}, expected json_CONNECTIONS" in capsys.readouterr().err


def one_round(server, rps, cpu_us=100.0):
    return Round("json_16x4", server, rps=rps, p50_ms=1.0, p99_ms=2.0, cpu_us=cpu_us)


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    rounds = [one_round("against", rate, cpu_us=None) for rate in (10, 5, 40)]
    rounds += [one_round("ours", rate) for rate in (10, 30, 20)]
    assert ratios(rounds) == {"json_16x4": {"rps": [1.0, 0.5, 6.0]}}
    cases = summarise(rounds)
    assert list(cases["json_16x4"]) == ["ours", "against"]
    assert cases["json_16x4"]["ours"]["rps"] == 20
    assert cases["json_16x4"]["ours"]["rps_spread"] == [10, 30]
    assert "cpu_us" not in cases["json_16x4"]["against"]
    text = table({"rounds": 3, "cases": cases, "ratios": ratios(rounds)})
    _, name, ours, other, pairs, *_ = text.splitlines()
    assert name == "json_16x4"
    assert ours.split()[:3] == ["ours", "20", "(10..30)"]
    assert other.split()[-1] == "-"
    assert pairs == "  ours/against: requests/s 1.000 (0.50..6.00)"


def test_the_service_is_compared_with_that_of_a_checkout(tiny_file, tmp_path, fake_wrk, capsys):
    fake_wrk()
    path = tmp_path / "http.json"
    command = [f"--weights={tiny_file}", "--rounds=2", f"--json={path}"]
    against = f"--against={Path(__file__).parents[2]}"
    assert main([*command, against, "--cases", "json_2x3"]) == 0
    document = json.loads(path.read_text())
    assert document["ratios"]["json_2x3"]["rps"] == [1, 1, 1]
    for server in ("ours", "against"):
        assert document["cases"]["json_2x3"][server]["rps"] == 250
    assert not path.with_suffix(".png").exists()
    assert "ours/against: requests/s" in capsys.readouterr().out


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


def test_a_folder_that_is_no_checkout_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([f"--against={tmp_path}"])
    assert f"--against: {tmp_path}" in capsys.readouterr().err
