import json
import os

import pytest

from benchmarks.workers import main
from benchmarks.workers_report import Case, Measured, rows
from benchmarks.wrk import parse_output

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


def test_the_cases_of_one_worker_are_measured_and_a_failed_one_stops_no_other(
    tiny_file, tmp_path, fake_wrk, wrk_output, capsys
):
    fake_wrk(images_64=wrk_output(bad_status=3))
    path = tmp_path / "results.json"
    command = [f"--weights={tiny_file}", "--device=cpu", f"--json={path}", "--workers", "1"]
    cases = ["single_1", "floor_1", "images_64", "images_1024_json"]
    assert main([*command, "--rounds=1", "--cases", *cases]) == 1
    document = json.loads(path.read_text())
    assert document["versions"]["uvicorn"]
    assert document["cores"].keys() == {"service", "load"}
    assert [row["case"] for row in document["rows"]] == cases
    single, floor, failed, as_json = document["rows"]
    assert (single["workers"], single["mps"], single["connections"]) == (1, False, 1)
    assert single["p50_over_floor"]["median"] == 1
    assert "p50_over_floor" not in floor
    assert "3 were not 2xx" in failed["error"]
    assert "requests_per_s" not in failed
    assert as_json["accept"] == "application/json"
    assert as_json["images_per_s"]["median"] == 1024 * as_json["requests_per_s"]["median"]
    captured = capsys.readouterr()
    assert captured.err.count("single_1, round") == 2
    assert "images_64, workers 1, failed: " in captured.out


def test_a_row_has_the_median_and_the_range_of_its_rounds(wrk_output):
    def one(requests, p50_us, p99_us, busy):
        fields = {"requests": requests, "sent_p50_us": p50_us, "sent_p99_us": p99_us, "done_s": 0}
        return parse_output(wrk_output(**fields), cpu_s=busy * 2 * 4, threads=4)

    rounds = [one(400, 100, 150, 0.5), one(200, 200, 800, 0.97), one(600, 300, 600, 0.6)]
    (row,) = rows(8, True, [Measured(Case("images_64", 64, 4), 4, rounds)])
    assert row["images_per_s"] == {"median": 12800, "min": 6400, "max": 19200}
    assert row["p99_over_p50"] == {"median": 2, "min": 1.5, "max": 4}
    assert row["limited_by_wrk"]
