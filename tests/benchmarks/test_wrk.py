import pytest

from benchmarks.http import OURS, PEER, Case, Round, summarise, table
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
def test_one_failed_answer_spoils_a_run(failures):
    with pytest.raises(WrkFailed, match="not 2xx"):
        parse_output(RESULT.format(*failures))


def test_wrk_that_ends_without_a_result_is_quoted():
    with pytest.raises(WrkFailed, match="unable to connect"):
        parse_output("", "unable to connect to 127.0.0.1")


def test_a_missing_wrk_is_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WrkFailed, match="apt-get install wrk"):
        find_wrk()


def test_the_script_has_the_bodies_beside_it(tmp_path):
    folder = tmp_path / 'a "quoted" folder'
    folder.mkdir()
    script = write_script(folder, "/predict", "application/json", [b"abc", b"\0\xff"]).read_text()
    assert (folder / "bodies").read_bytes() == b"abc\0\xff"
    assert "{3,2}" in script
    assert "a \\034quoted\\034 folder" in script


def one_round(server, requests_per_s, cpu_us=100.0):
    return Round(
        case=str(Case("json", 64, 4)),
        server=server,
        requests_per_s=requests_per_s,
        images_per_s=64 * requests_per_s,
        p50_ms=1.0,
        p99_ms=2.0,
        max_ms=3.0,
        cpu_us=cpu_us,
    )


def test_the_comparison_is_of_medians_and_shows_their_spread():
    rounds = [one_round(OURS, rate) for rate in (10, 30, 20)]
    rounds += [one_round(PEER, rate, cpu_us=None) for rate in (10, 5, 90)]
    (case,) = summarise(rounds)
    assert case["ratio"] == 2.0
    assert case[OURS]["images_per_s"] == {"median": 1280, "least": 640, "most": 1920}
    assert case[PEER]["cpu_us"] is None
    text = table([case])
    assert "64 x json, 4 connections" in text
    assert "(640..1,920)" in text
    assert "2.00" in text
    assert len(text.splitlines()) == 3
    assert max(map(len, text.splitlines())) <= 100
