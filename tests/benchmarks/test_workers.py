import json
import os

import pytest

from benchmarks.workers import main
from benchmarks.workers_report import Case, Measured, rows, table
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


@pytest.fixture
def measured(wrk_output):
    """`measured(case, *results)`: `case` with rounds that wrk printed so, 2 s on 4 threads."""

    def make(case, *results):
        rounds = [
            parse_output(wrk_output(**result), cpu_s=busy * 2 * 4, threads=4)
            for result, busy in results
        ]
        return Measured(case, case.connections, rounds)

    return make


def test_a_row_has_the_median_and_the_range_of_its_rounds(measured):
    batches = measured(
        Case("images_64", 64, 4),
        ({"requests": 400, "sent_p50_us": 100, "sent_p99_us": 150, "done_s": 0}, 0.5),
        ({"requests": 200, "sent_p50_us": 200, "sent_p99_us": 800, "done_s": 0}, 0.97),
        ({"requests": 600, "sent_p50_us": 300, "sent_p99_us": 600, "done_s": 0}, 0.6),
    )
    (row,) = rows(8, True, [batches])
    assert (row["workers"], row["mps"], row["images"], row["connections"]) == (8, True, 64, 4)
    assert row["requests_per_s"] == {"median": 200, "min": 100, "max": 300}
    assert row["images_per_s"] == {"median": 12800, "min": 6400, "max": 19200}
    assert row["p99_us"] == {"median": 600, "min": 150, "max": 800}
    assert row["p99_over_p50"] == {"median": 2, "min": 1.5, "max": 4}
    assert row["wrk_p99_us"]["median"] == 9000
    assert row["wrk_busy"] == {"median": 0.6, "min": 0.5, "max": 0.97}
    assert row["limited_by_wrk"]
    head, _, line, *notes = table([row]).splitlines()
    assert len(head) == len(line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["8", "yes", "`images_64`", "4", "200 (100..300)", "12,800"]
    assert cells[6:] == ["200", "600 (150..800)", "2.00", "9,000", "60% (*)"]
    assert "limited by the load generator" in notes[-1]
