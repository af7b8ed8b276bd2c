import gzip
import hashlib
from dataclasses import replace

import httpx
import pytest

from trainer import download as module
from trainer.download import MIRRORS, download, obtain
from trainer.errors import DatasetUnavailable
from trainer.mnist import FILES, IdxFile
from trainer.settings import MNIST_FOLDER

CONTENT = bytes(range(256)) * 40
PACKED = gzip.compress(CONTENT, mtime=0)
FILE = IdxFile("digits-idx1-ubyte", hashlib.sha256(CONTENT).hexdigest(), "")
MIRROR = ("http://one/",)


class Server:
    """Serves `content` with ranges; keeps the Range header of each request."""

    def __init__(self, content=PACKED, ranges=True, status=None):
        self.content, self.ranges, self.status = content, ranges, status
        self.asked = []

    def __call__(self, request):
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        if self.status:
            return httpx.Response(self.status)
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(self.content):
                return httpx.Response(416)
            span = f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
            return httpx.Response(
                206,
                stream=httpx.ByteStream(self.content[start:]),
                headers={"Content-Range": span},
            )
        return httpx.Response(200, stream=httpx.ByteStream(self.content))


def client(server):
    return httpx.Client(transport=httpx.MockTransport(server))


def fetch(folder, server, mirrors=MIRROR):
    with client(server) as session:
        download(folder, [FILE], session, [].append, mirrors)
    return (folder / f"{FILE.name}.gz").read_bytes()


def test_a_file_is_downloaded_under_its_name_and_leaves_nothing_else(tmp_path):
    assert fetch(tmp_path / "new", Server()) == PACKED
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"{FILE.name}.gz"]


@pytest.mark.parametrize(
    ("partial", "asked"),
    [
        (PACKED[:50], ["bytes=50-"]),
        (b"x" * 50, ["bytes=50-", None]),  # of something else: again from the start
        (PACKED, [f"bytes={len(PACKED)}-"]),
    ],
    ids=["part", "other", "whole"],
)
def test_a_partial_file_is_resumed_where_it_stopped(tmp_path, partial, asked):
    (tmp_path / f"{FILE.name}.gz.part").write_bytes(partial)
    server = Server()
    assert fetch(tmp_path, server) == PACKED
    assert server.asked == asked


def test_the_next_mirror_goes_on_where_the_first_one_broke_off(tmp_path):
    server = Server()

    def cut_short():
        yield PACKED[:60]
        raise httpx.RemoteProtocolError("peer closed connection")

    def serve(request):
        if request.url.host == "one":
            return httpx.Response(200, content=cut_short())
        return server(request)

    assert fetch(tmp_path, serve, ("http://one/", "http://two/")) == PACKED
    assert server.asked == ["bytes=60-"]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server(gzip.compress(b"something else")), "its content has SHA-256"),
        (Server(PACKED[:-4]), "the file is not a whole gzip file"),
        (Server(status=404), "HTTP 404"),
    ],
)
def test_what_is_not_the_file_is_refused_and_not_left_behind(tmp_path, server, reason):
    with pytest.raises(DatasetUnavailable) as caught:
        fetch(tmp_path, server, ("http://one/", "http://two/"))
    message = str(caught.value)
    assert f"http://one/: {reason}" in message
    assert f"http://two/: {reason}" in message
    assert "--data FOLDER" in message
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_does_not_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    sent = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self):
            while True:
                sent.append(b"0" * 1000)
                yield sent[-1]

    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10_000)
    with pytest.raises(DatasetUnavailable, match="its content has SHA-256"):
        fetch(tmp_path, lambda _: httpx.Response(200, stream=Endless()))
    assert len(sent) < 20


def no_network(request):
    raise httpx.ConnectError("[Errno -2] Name or service not known")


def test_without_a_network_one_sentence_says_what_to_put_where(tmp_path):
    with (
        client(no_network) as session,
        pytest.raises(DatasetUnavailable) as caught,
    ):
        download(tmp_path, FILES, session, [].append)
    message = str(caught.value)
    assert "\n" not in message
    for part in (*(file.name for file in FILES), *MIRRORS, str(tmp_path), "Name or service"):
        assert part in message


def test_obtain_downloads_only_what_is_missing(tmp_path, tiny, write_idx, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MNIST_FOLDER.parent.mkdir()
    write_idx(tiny).rename(MNIST_FOLDER)
    contents = [(MNIST_FOLDER / file.name).read_bytes() for file in FILES]
    own = [
        replace(file, sha256=hashlib.sha256(content).hexdigest())
        for file, content in zip(FILES, contents, strict=True)
    ]
    (MNIST_FOLDER / FILES[2].name).unlink()

    def fake(folder, files, client, report):
        for file in files:
            report(file.name)
            (folder / f"{file.name}.gz").write_bytes(gzip.compress(contents[2]))

    monkeypatch.setattr(module, "download", fake)
    monkeypatch.setattr(module, "FILES", own)
    lines = []
    assert len(obtain(MNIST_FOLDER, lines.append).test) == 60
    assert lines == [FILES[2].name]
