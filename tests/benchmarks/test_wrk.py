import shutil

import pytest

from benchmarks.wrk import WrkFailed, find_wrk, parse_output, run_wrk, write_script


def test_the_last_line_of_wrk_is_its_result(wrk_output):
    result = parse_output("Running 2s test\n" + wrk_output(), cpu_s=1.1, threads=2)
    assert result.requests_per_s == 250
    assert (result.p50_ms, result.p99_ms, result.max_ms) == (1.5, 9.0, 20.0)
    assert (result.sent_p50_ms, result.sent_p99_ms) == (1.25, 3.0)
    assert result.busy == 0.25


@pytest.mark.parametrize("failure", [{"bad_status": 1}, {"socket_errors": 1}])
def test_one_failed_answer_fails_a_run(failure, wrk_output):
    with pytest.raises(WrkFailed, match="not 2xx"):
        parse_output(wrk_output(**failure))


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
@pytest.mark.parametrize("count", [1, 3])
def test_wrk_sends_every_body_with_its_headers(count, service, requests, say, tmp_path):
    # One slow answer, behind which wrk adds the latencies of more than a hundredth of all requests.
    service.behave = lambda number, labels: (200, say(labels), 0.3 if number == 50 else 0)
    bodies = [request.body for request in requests[:count]]
    headers = {"Accept": "text/plain"}
    script = write_script(tmp_path, "/predict", "application/octet-stream", bodies, headers)
    with service.listening() as url:
        result = run_wrk(find_wrk(), script, url, connections=4, duration_s=1, threads=2)
    fixed = [[one for one in s["headers"] if one[0] != b"content-length"] for s in service.scopes]
    (headers,) = {frozenset(one) for one in fixed}
    kind = (b"content-type", b"application/octet-stream")
    assert {(b"accept", b"text/plain"), kind} < headers
    assert {scope["method"] for scope in service.scopes} == {"POST"}
    assert set(service.bodies) == set(bodies)
    assert 0 < result.sent_p50_ms <= result.sent_p99_ms < 200 < result.p99_ms < result.max_ms
    assert 0 < result.busy < 1
