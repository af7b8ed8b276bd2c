import errno
import io
import os

import numpy as np
import pytest
from PIL import Image

from service.forms.body import decode
from service.forms.reader import Limits
from service.pictures import picture as picture_module
from trainer import pictures
from trainer.errors import InvalidDataset
from trainer.pictures import class_folders, read_pictures

LIMITS = Limits(max_images=1)
SIDES = (60, 4200, 160, 210, 260, 310)
"""Pixels. The second is a photograph of 17.6 megapixels."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lenet-serve/pictures"


def picture(digit, size, kind):
    """`digit` on a sheet of `size` x `size`, dark or in a GIF light, as a file of `kind`."""
    sheet = np.full((size, size), 240, np.uint8)
    side = size // 28
    drawn = np.kron(digit, np.ones((side, side), np.uint8))
    sheet[: 28 * side, : 28 * side] -= (drawn * 0.9).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(255 - sheet if kind == "GIF" else sheet).save(file, kind)
    return file.getvalue()


@pytest.fixture
def folder(digits, tmp_path):
    """Six pictures of three classes, of other sizes and formats."""
    kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    for number, (digit, kind) in enumerate(zip(digits(6, 0).images, kinds, strict=True)):
        place = tmp_path / "hand" / ("2", "10", "1")[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.{kind.lower()}").write_bytes(picture(digit, SIDES[number], kind))
    (tmp_path / "hand/1/.DS_Store").write_bytes(b"a system's")
    (tmp_path / "hand/1/Thumbs.db").write_bytes(b"a system's")
    return tmp_path / "hand"


def test_pictures_are_prepared_as_the_service_prepares_them(folder):
    classes = class_folders(folder)
    assert list(classes) == ["1", "2", "10"]
    digits, pixels = read_pictures(folder, classes, print)
    assert digits.labels.tolist() == [0, 0, 1, 1, 2, 2]
    paths = [path for name in classes for path in sorted((folder / name).glob("[0-9]*"))]
    assert digits.files.tolist() == [str(path) for path in paths]
    for image, path, size in zip(digits.images, paths, pixels, strict=True):
        kind = f"image/{path.suffix[1:]}"
        served = decode(path.read_bytes(), kind, limits=LIMITS)
        np.testing.assert_array_equal(image, served[0])
        assert size == SIDES[int(path.stem)] ** 2


def test_a_second_run_takes_what_the_first_prepared_until_something_changes(
    folder, cache, monkeypatch
):
    classes, lines = class_folders(folder), []
    first = read_pictures(folder, classes, lines.append)
    assert lines == [f"{folder}: preparing 6 pictures"]
    with monkeypatch.context() as patch:
        patch.setattr("service.pictures.picture.prepare", None)
        digits, pixels = read_pictures(folder, classes, lines.append)
        np.testing.assert_array_equal(digits.images, first[0].images)
        assert digits.files.tolist() == first[0].files.tolist()
        np.testing.assert_array_equal(pixels, first[1])
    assert len(lines) == 1

    def touched():
        (changed := folder / "1/2.webp").write_bytes(changed.read_bytes())
        os.utime(changed, ns=(1, 1))

    def damaged():
        (file,) = cache.iterdir()
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def emptied():
        (file,) = cache.iterdir()
        file.write_bytes(b"")

    def renamed():
        (folder / "1/2.webp").rename(folder / "1/3.webp")

    def prepared_otherwise():
        monkeypatch.setattr(pictures.PIL, "__version__", "0")

    for change in (touched, damaged, emptied, renamed, prepared_otherwise):
        lines.clear()
        change()
        again, _ = read_pictures(folder, classes, lines.append)
        assert lines == [f"{folder}: preparing 6 pictures"], change.__name__
        np.testing.assert_array_equal(again.images, first[0].images)
        read_pictures(folder, classes, lines.append)
        assert len(lines) == 1, change.__name__
    assert len(list(cache.iterdir())) == 1


def test_a_name_that_no_file_system_takes_is_percent_encoded(folder):
    (folder / "1").rename(folder / "a%2Fb")
    assert list(class_folders(folder)) == ["10", "2", "a/b"]
    digits, _ = read_pictures(folder, ["a/b"], print)
    assert digits.files.tolist() == [f"{folder}/a%2Fb/2.webp", f"{folder}/a%2Fb/5.tiff"]
    (folder / "%32").mkdir()
    with pytest.raises(InvalidDataset, match=r"%32 and 2 are both the class 2, expected one"):
        class_folders(folder)


def test_what_takes_long_is_counted(folder, monkeypatch):
    monkeypatch.setattr(pictures, "_REPORT_S", 0.0)
    lines = []
    read_pictures(folder, class_folders(folder), lines.append)
    assert lines[1:] == [f"{folder}: {number} of 6 prepared" for number in range(6)]


def test_a_cache_on_a_full_disk_is_said_and_leaves_nothing(folder, cache, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lenet.files.os.fsync", full)
    lines = []
    found, _ = read_pictures(folder, class_folders(folder), lines.append)
    assert len(found) == 6
    (file,) = [line for line in lines if "not written" in line]
    assert file.endswith(
        "not written (No space left on device), so the next run prepares the pictures again"
    )
    assert list(cache.iterdir()) == []


def test_bad_pictures_are_one_sentence_with_the_file(folder):
    blank = io.BytesIO()
    Image.new("L", (50, 50), 255).save(blank, "PNG")
    files = {
        "notes.txt": (b"call Anna", "is the text 'call Anna', expected a picture: PNG, JPEG, WebP"),
        "empty.png": (b"", "is nothing, expected a picture"),
        "cut.png": ((folder / "2/0.png").read_bytes()[:-40], "not a readable image/png"),
        "blank.png": (blank.getvalue(), "no digit found: the picture is blank"),
    }
    for name, (content, message) in files.items():
        (path := folder / "2" / name).write_bytes(content)
        with pytest.raises(InvalidDataset) as caught:
            read_pictures(folder, class_folders(folder), print)
        assert str(caught.value).startswith(f"{path}: {message}")
        path.unlink()
    for number in range(5):
        (folder / "2" / f"x{number}.png").write_bytes(b"")
    with pytest.raises(InvalidDataset, match=r"x0\.png.*x1\.png.*x2\.png: [^;]*; and 2 more$"):
        read_pictures(folder, class_folders(folder), print)


def test_a_class_without_pictures_or_with_folders_is_refused(folder):
    (folder / "3").mkdir()
    with pytest.raises(InvalidDataset, match="hand/3: is empty, expected pictures of the class 3"):
        read_pictures(folder, class_folders(folder), print)
    (folder / "3/more").mkdir()
    with pytest.raises(InvalidDataset, match="hand/3: holds the folder more, expected the picture"):
        read_pictures(folder, class_folders(folder), print)


@pytest.mark.parametrize("change", ["added", "removed", "rewritten"])
def test_a_folder_that_changes_while_it_is_read_is_refused(folder, cache, change, monkeypatch):
    def prepare(*given, **named):
        path = folder / "10/1.jpeg"
        if change == "added":
            (folder / "1/new.png").write_bytes((folder / "2/0.png").read_bytes())
        elif change == "removed":
            path.unlink(missing_ok=True)
        else:
            path.write_bytes((folder / "2/0.png").read_bytes())
        return original(*given, **named)

    original = picture_module.prepare
    monkeypatch.setattr(picture_module, "prepare", prepare)
    with pytest.raises(InvalidDataset) as caught:
        read_pictures(folder, class_folders(folder), print)
    assert str(caught.value).startswith(f"{folder}: its files changed while they were read")
    assert not cache.exists()
