from __future__ import annotations

import errno

import pytest

from lenet.files import write_atomically


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path, monkeypatch, error, failing):
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")

    def fail(*_):
        raise error

    monkeypatch.setattr(failing, fail)
    with pytest.raises(type(error)) as caught:
        write_atomically(path, b"new")
    if (failing, type(error)) == ("os.fsync", OSError):
        assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
