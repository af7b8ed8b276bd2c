import shutil

import pytest

from benchmarks.wrk import find_wrk, run_wrk, write_script


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_wrk_sends_every_body_with_its_headers(service, requests, say, tmp_path):
    # One slow answer, behind which wrk adds the latencies of more than a hundredth of all requests.
    service.behave = lambda number, labels: (200, say(labels), 0.3 if number == 50 else 0)
    bodies = [request.body for request in requests[:3]]
    script = write_script(tmp_path, "/predict", "text/x", bodies, {"Accept": "text/plain"})
    with service.listening() as url:
        result = run_wrk(find_wrk(), script, url, connections=4, duration_s=1, threads=2)
    sent = {(b"accept", b"text/plain"), (b"content-type", b"text/x")}
    assert all(sent < set(scope["headers"]) for scope in service.scopes)
    assert set(service.bodies) == set(bodies)
    assert 0 < result.sent_p50_ms <= result.sent_p99_ms < 200 < result.p99_ms < result.max_ms
    assert 0 < result.busy < 1
