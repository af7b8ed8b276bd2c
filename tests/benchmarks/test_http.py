import json
import shutil
from pathlib import Path

import pytest

from benchmarks.http import OURS, Case, Round, main, summarise, table
from benchmarks.wrk import WrkFailed, find_wrk, parse_output, write_script

RESULT = (
    'RESULT {{"requests":500,"duration_us":2000000,"p50_us":1500,"p99_us":9000,"max_us":20000,'
    '"bad_status":{},"socket_errors":{}}}\n'
)


def test_the_last_line_of_wrk_is_its_result():
    result = parse_output("Running 2s test\n" + RESULT.format(0, 0))
    assert result.requests_per_s == 250
    assert (result.p50_ms, result.p99_ms, result.max_ms) == (1.5, 9.0, 20.0)


@pytest.mark.parametrize("failures", [(1, 0), (0, 1)])
def test_one_failed_answer_fails_a_run(failures):
    with pytest.raises(WrkFailed, match="not 2xx"):
        parse_output(RESULT.format(*failures))


def test_the_error_of_wrk_is_quoted():
    with pytest.raises(WrkFailed, match="unable to connect"):
        parse_output("", "unable to connect to 127.0.0.1")


def test_a_missing_wrk_is_one_line_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WrkFailed, match="apt-get install wrk"):
        find_wrk()
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_script_has_the_bodies_beside_it(tmp_path):
    folder = tmp_path / 'a "quoted" folder'
    folder.mkdir()
    script = write_script(folder, "/predict", "application/json", [b"abc", b"\0\xff"]).read_text()
    assert (folder / "bodies").read_bytes() == b"abc\0\xff"
    assert "{3,2}" in script
    assert "a \\034quoted\\034 folder" in script


def one_round(server, requests_per_s, cpu_us=100.0):
    return Round(
        case=str(Case("json", 16, 4)),
        server=server,
        requests_per_s=requests_per_s,
        images_per_s=16 * requests_per_s,
        p50_ms=1.0,
        p99_ms=2.0,
        max_ms=3.0,
        cpu_us=cpu_us,
    )


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    rounds = [one_round("against", rate, cpu_us=None) for rate in (10, 5, 40)]
    rounds += [one_round(OURS, rate) for rate in (10, 30, 20)]
    (case,) = summarise(rounds)
    assert (case["ratio"], case["ratio_spread"]) == (1.0, [0.5, 6.0])
    assert case[OURS]["images_per_s"] == {"median": 320, "least": 160, "most": 480}
    assert case["against"]["cpu_us"] is None
    assert case["cpu_ratio"] is None
    _, name, ours, other, ratios = table([case]).splitlines()
    assert name == "16 x json, 4 connections"
    assert OURS in ours
    assert "(160..480)" in ours
    assert "against" in other
    assert ratios == "  ours/other: requests/s 1.000 (0.50..6.00)"


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_the_service_is_compared_with_that_of_a_checkout(tiny_file, tmp_path, capsys):
    path = tmp_path / "http.json"
    command = [f"--weights={tiny_file}", "--rounds=1", "--duration=1", f"--json={path}"]
    against = f"--against={Path(__file__).parents[2]}"
    assert main([*command, against, "--cases", "json:2:3"]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert case["case"] == "2 x json, 3 connections"
    assert case["ratio"] > 0
    assert case["cpu_ratio"] > 0
    for server in (OURS, "against"):
        assert case[server]["requests_per_s"]["median"] > 0
        assert case[server]["cpu_us"]["median"] > 0
    assert "ours/other: requests/s" in capsys.readouterr().out


def test_a_folder_that_is_no_checkout_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([f"--against={tmp_path}"])
    assert f"--against: {tmp_path}" in capsys.readouterr().err
