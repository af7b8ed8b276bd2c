"""The deployment for Ray Serve, on a Ray of two replicas on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from http.client import HTTPConnection

import numpy as np
import pytest

from tests.service_process import PROJECT, committed

DOCUMENT = PROJECT / "docs" / "ray.md"

# In a process of its own, which Ray fills with threads. Arguments: a file with the pixels of
# images, one with the answer to each, the number of requests before a replica is killed, and
# the code of docs/ray.md.
DRIVER = r"""
import json, os, signal, socket, sys, threading, time
from http.client import HTTPConnection, HTTPException
import numpy as np, ray
from ray import serve
import digits

pixels, before = np.load(sys.argv[1]), int(sys.argv[3])
with open(sys.argv[2]) as file:
    answers = json.load(file)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
ray.init(num_cpus=3, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})

class Marked(digits.Digits.func_or_class):
    async def __call__(self, http):
        answer = await super().__call__(http)
        answer.headers["pid"] = str(os.getpid())
        return answer

digits.Digits = digits.Digits.options(
    func_or_class=Marked, autoscaling_config={"min_replicas": 2, "max_replicas": 2}
)
handle = serve.run(digits.app({"device": "cpu", "models": "lenet"}))
RAW = {"Content-Type": "application/octet-stream"}
counts, pids, wrong, lock = {}, [], [], threading.Lock()
stop = threading.Event()

def ask(number):
    connection, turn = HTTPConnection("127.0.0.1", port, timeout=30), number
    while not stop.is_set():
        turn = (turn + 7) % len(pixels)
        try:
            connection.request("POST", "/", pixels[turn].tobytes(), RAW)
            answer = connection.getresponse()
            status, body = answer.status, answer.read().decode()
        except (OSError, HTTPException):
            connection.close()
            status = 0
        with lock:
            counts[status] = counts.get(status, 0) + 1
            if status == 200:
                pids.append(int(answer.headers["pid"]))
                if body != answers[turn]:
                    wrong.append([turn, body])

threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()

def wait(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)

wait(lambda: len(pids) >= before and len(set(pids)) == 2)
first = set(pids)
victim = min(first)
os.kill(victim, signal.SIGKILL)
at = len(pids)
wait(lambda: len(set(pids[at:]) - {victim}) == 2)
wait(lambda: len(pids) >= at + before)
stop.set()
for thread in threads:
    thread.join()
label = int(handle.predict.remote(pixels[:1]).result().argmax())
serve.delete("default")
exec(sys.argv[4])  # the application of the document
serve.run(application)
connection = HTTPConnection("127.0.0.1", port, timeout=30)
connection.request("POST", "/", pixels[:3].tobytes())
read = json.loads(connection.getresponse().read())
serve.shutdown()
ray.shutdown()
last = set(pids[-before // 2:])
print(json.dumps([sorted(first), victim, sorted(last), counts, wrong, label, read]))
"""


@pytest.fixture
def run_ray(tmp_path):
    """`run_ray(code, *arguments)` runs Python with the deployment's module at hand."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install -c constraints.txt -e '.[ray]'")

    def run(code, *arguments):
        places = os.pathsep.join((str(PROJECT), str(PROJECT / "deploy" / "ray")))
        plain = {key: text for key, text in os.environ.items() if not key.startswith("LENET_")}
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env={**plain, "PYTHONPATH": places, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    return run


@pytest.mark.process
def test_two_replicas_answer_as_the_service_and_one_that_is_killed_is_replaced(run_ray, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 28, 28), np.uint8)
    with committed(tmp_path, "--models", "lenet") as service:
        connection = HTTPConnection("127.0.0.1", service.port, timeout=30)
        answers = []
        for image in pixels:
            kind = {"Content-Type": "application/octet-stream"}
            connection.request("POST", "/predict", image.tobytes(), kind)
            answers.append(connection.getresponse().read().decode())
        connection.close()
    np.save(tmp_path / "pixels.npy", pixels)
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    files = tmp_path / "pixels.npy", tmp_path / "answers.json"
    done = run_ray(DRIVER, *map(str, files), "300", code)
    assert done.returncode == 0, done.stderr
    first, victim, last, counts, wrong, label, read = json.loads(done.stdout.splitlines()[-1])
    assert wrong == []
    assert len(first) == len(last) == 2
    assert victim not in last
    labels = [json.loads(answer)["predictions"][0]["label"] for answer in answers[:3]]
    assert (label, read) == (labels[0], labels)
    # Requests that the killed replica had are lost: at most one of each client.
    assert counts.pop("200") >= 600
    assert sum(counts.values()) <= 8


@pytest.mark.process
def test_a_setting_that_is_wrong_or_has_no_effect_under_ray_ends_the_start(run_ray):
    for name, text, words in (
        ("device", "gpu", "--device is 'gpu', expected one of auto, cpu, cuda"),
        ("devise", "cpu", "--devise is unknown"),
        ("api-keys", "a key of 16 characters", "Ray's proxy checks no keys and has no TLS"),
    ):
        done = run_ray("import digits, sys; digits.app(dict([sys.argv[1:]]))", name, text)
        assert done.returncode == 1
        assert words in done.stderr.splitlines()[-1]
