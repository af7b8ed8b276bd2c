import os
import select
import subprocess
import sys

import pytest

from benchmarks.servers import (
    Server,
    ServerFailed,
    check_answer,
    free_port,
    running,
)

LEAVING = """
import http.server, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

with open({pipe!r}, "w") as pipe:
    subprocess.Popen(["sleep", "60"], stdout=pipe)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_processes_that_a_server_leaves_behind_are_ended(tmp_path):
    # The child is the only writer of the pipe, which therefore ends with it.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "leaving.py").write_text(LEAVING.format(pipe=str(tmp_path / "pipe")))
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    port = free_port()
    with running("leaving", ["leaving", str(port)], port, {}, checkout=tmp_path):
        assert select.select([reader], [], [], 0)[0] == []
    assert select.select([reader], [], [], 10)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_cpu_time_is_that_of_the_process_and_its_descendants(tmp_path):
    burn = "sum(i * i for i in range(10**6))"
    child = f"{burn}; print('done', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        server = Server("ours", "http://nowhere", {}, process.pid, tmp_path)
        assert len(server.pids()) == 2
        assert server.cpu_s() > 0.02
        process.stdin.write(b"\n")
        process.stdin.close()


def test_a_wrong_answer_is_reported_before_anything_is_measured(service, requests, say, tmp_path):
    with service.listening() as url:
        server = Server("ours", url, {}, 0, tmp_path)
        check_answer(server, "/predict", requests[0])
        service.behave = lambda number, labels: (200, say([(labels[0] + 1) % 10]), 0.0)
        with pytest.raises(ServerFailed, match="1 wrong labels"):
            check_answer(server, "/predict", requests[0])
        with pytest.raises(ServerFailed, match="answers 404 at /nowhere"):
            check_answer(server, "/nowhere", requests[0])
