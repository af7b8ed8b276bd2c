import pytest

from benchmarks.servers import (
    Server,
    ServerFailed,
    check_answer,
)


def test_a_wrong_answer_is_reported_before_anything_is_measured(service, requests, say, tmp_path):
    with service.listening() as url:
        server = Server("ours", url, {}, 0, tmp_path)
        check_answer(server, "/predict", requests[0])
        service.behave = lambda number, labels: (200, say([(labels[0] + 1) % 10]), 0.0)
        with pytest.raises(ServerFailed, match="1 wrong labels"):
            check_answer(server, "/predict", requests[0])
        with pytest.raises(ServerFailed, match="answers 404 at /nowhere"):
            check_answer(server, "/nowhere", requests[0])
