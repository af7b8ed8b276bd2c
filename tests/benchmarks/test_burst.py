import pytest

from benchmarks.burst import BurstFailed, first_answers


def test_the_slowest_connection_is_the_maximum_and_a_refused_one_fails_all(service, requests, say):
    bodies = [request.body for request in requests]
    service.behave = lambda number, labels: (200, say(labels), 0.5 if number == 7 else 0.0)
    with service.listening() as url:
        found = first_answers(url, "/predict", "application/json", bodies, 20, 60.0)
        assert found.p50_ms <= found.p99_ms == found.max_ms > 500
        assert set(service.bodies) == set(bodies)
        service.behave = lambda number, labels: (429 if number == 25 else 200, say(labels), 0.0)
        with pytest.raises(BurstFailed, match="429"):
            first_answers(url, "/predict", "application/json", bodies, 20, 60.0)
