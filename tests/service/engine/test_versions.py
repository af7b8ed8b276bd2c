from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lenet.errors import InvalidWeightFile
from service.engine.versions import WeightsFolder


def read(folder, wanted=(), default=""):
    return WeightsFolder(folder).read_all(wanted, default)


def refusal(folder, wanted=(), default=""):
    with pytest.raises(InvalidWeightFile) as caught:
        read(folder, wanted, default)
    return str(caught.value)


def test_every_model_is_found_when_none_is_named(folder, write):
    for place in ("b/1", "a/1", "a/2"):
        write(place)
    (folder / "notes.txt").write_text("no model")
    (folder / "empty").mkdir()
    found = read(folder, default="a")
    assert [(file.name, file.version) for file in found] == [("a", "2"), ("b", "1")]
    assert found[0].path == folder / "a" / "2.safetensors"
    assert found[0].weights.model.name == "a"
    assert found[0].sha256 == hashlib.sha256(found[0].path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "stem", ["01", "0", "-3", "1.5", "latest", "", "\N{FULLWIDTH DIGIT TWO}", "+7", "1e3"]
)
def test_a_file_whose_name_is_no_positive_integer_is_ignored_with_one_warning(
    folder, write, stem, caplog
):
    path = write(f"a/{stem}")
    assert "holds no VERSION.safetensors with VERSION a positive integer" in refusal(folder)
    write("a/1")
    caplog.clear()
    weights = WeightsFolder(folder)
    for _ in range(2):
        (version,) = weights.read_all()
        assert version.version == "1"
    assert caplog.messages == [f"{path}: ignored, its name is not a positive integer"]


def test_a_missing_folder_is_named_with_the_working_directory_and_the_setting(folder, monkeypatch):
    (folder / "file").write_bytes(b"")
    advice = "set --weights to the folder that holds MODEL/VERSION.safetensors"
    for name, found in (("absent", "no such folder"), ("file", "is a file, expected a folder")):
        assert refusal(folder / name) == f"{folder / name}: {found}; {advice}"
    monkeypatch.chdir(folder)
    assert refusal(Path("absent")) == f"absent: no such folder in {folder}; {advice}"
    assert refusal(Path()) == (
        ".: holds no MODEL/VERSION.safetensors; set --weights to the folder that does"
    )


def test_a_folder_of_versions_or_of_one_file_is_that_of_the_model_in_its_metadata(folder, write):
    for place in ("lenet/2", "lenet/10"):
        write(place)
    weights = WeightsFolder(folder / "lenet")
    (version,) = weights.read_all()
    assert version.key == ("lenet", "10")
    assert weights.index() == (("lenet", "10"), ("lenet", "2"))
    assert read(folder / "lenet", ("lenet:2",))[0].version == "2"
    assert "no such folder; the models in" in refusal(folder / "lenet", ("mlp",))
    write("lenet/3", name="mlp")
    assert refusal(folder / "lenet", ("lenet:3",)).endswith(
        "metadata model is 'mlp', expected 'lenet' as the files beside it"
    )
    for name in ("any", "1.5", "0"):
        write(f"{name}/{name}", name="mlp")
        assert [version.key for version in read(folder / name)] == [("mlp", "1")]
    write("any/other", name="mlp")
    assert refusal(folder / "any") == (
        f"{folder / 'any'}: holds any.safetensors and other.safetensors, but no "
        "MODEL/VERSION.safetensors; set --weights to the folder that does, or call a file there "
        "1.safetensors"
    )
    write("odd/1", name="a/b")
    assert "metadata model is 'a/b', expected a name without /" in refusal(folder / "odd")


def test_an_alias_is_refused_when_it_is_another_model(folder, write):
    write("lenet/1")
    write("mlp/1")
    with pytest.raises(InvalidWeightFile, match="--model-alias is 'mlp', which is a model of its"):
        WeightsFolder(folder).read_all(("lenet",), alias="mlp")
    for alias in ("lenet", "digits"):
        assert WeightsFolder(folder).read_all(alias=alias)[0].name == "lenet"


def test_the_default_model_is_lenet_or_the_only_one_and_comes_first(folder, write):
    write("b/1")
    assert [version.name for version in read(folder)] == ["b"]
    write("a/1")
    assert [version.name for version in read(folder, ("b",))] == ["b"]
    advice = "set --default-model to one of them"
    assert refusal(folder) == (
        f"{folder}: the default model 'lenet' is not among the models a, b; {advice}"
    )
    write("lenet/1")
    assert [version.name for version in read(folder)] == ["lenet", "a", "b"]
    assert [version.name for version in read(folder, default="b")] == ["b", "a", "lenet"]
    assert "default model 'c' is not among the models a, b, lenet;" in refusal(folder, (), "c")


@pytest.mark.parametrize("wanted", [("lenett",), ("lenett", "b"), ("b", "lenett")])
def test_a_model_without_a_folder_is_named_with_those_there_are(folder, write, wanted):
    write("a/1")
    write("b/1")
    missing = folder / "lenett"
    assert refusal(folder, wanted) == (
        f"{missing}: no such folder; the models in {folder} are a, b"
    )


def test_the_start_is_refused_when_the_folder_bears_another_name(folder, write):
    path = write("a/1", name="b")
    assert refusal(folder) == f"{path}: metadata model is 'b', expected 'a' as its folder"


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_is_refused_when_it_leaves_the_folder(folder, write, tmp_path, linked):
    inside = write("a/1")
    outside = tmp_path / "secret"
    inside.parent.rename(outside)
    if linked == "folder":
        inside.parent.symlink_to(outside)
    else:
        inside.parent.mkdir()
        inside.symlink_to(outside / "1.safetensors")
    assert refusal(folder) == f"{inside}: leads out of {folder} through a symlink: copy the file"


def test_the_wanted_versions_are_read_the_highest_first(folder, write):
    for place in ("a/1", "a/2", "a/10", "b/1", "b/4"):
        write(place)

    def found(wanted=(), latest=1):
        weights = WeightsFolder(folder, latest)
        first = [version.key for version in weights.read_all(wanted, "a")]
        assert first == [one.key for name in "ab" for one in weights.read(name)]
        return [f"{name}/{version}" for name, version in first]

    assert found() == ["a/10", "b/4"]
    assert found(latest=2) == ["a/10", "a/2", "b/4", "b/1"]
    assert found(latest=0) == ["a/10", "a/2", "a/1", "b/4", "b/1"]
    assert found(("b", "a:1", "a:2")) == ["a/2", "a/1", "b/4"]
    assert found(("b:1", "a"), latest=2) == ["a/10", "a/2", "b/1"]
    assert refusal(folder, ("a:3",), "a") == (
        f"{folder / 'a'}: holds no version 3, expected one of 1, 2, 10"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"canary": 1}',
            "label 'canary' names version 1, expected one that is served: 3, 2; --ver",
        ),
        (
            '{"canary": 9}',
            "label 'canary' names version 9, expected one that is served: 3, 2; --ver",
        ),
        *((text, "expected an object of versions by label") for text in ("", "[2]", '{"2": 2}')),
        *((text, "expected an object of versions by label") for text in ('{"a": "2"}', '{"": 2}')),
    ],
)
def test_labels_that_name_no_served_version_are_refused(folder, write, content, words):
    for version in (1, 2, 3):
        write(f"a/{version}")
    weights, path = WeightsFolder(folder, latest=2), folder / "a" / "labels.json"
    path.write_text('{"stable": 3, "canary-2": 2}')
    weights.read_all()
    assert weights.labels == {"a": {"stable": "3", "canary-2": "2"}}
    path.write_text(content)
    with pytest.raises(InvalidWeightFile, match=f"^{path}: {words}"):
        weights.read("a")
    path.unlink()
    weights.read("a")
    assert weights.labels == {"a": {}}
    path.symlink_to("/dev/zero")
    with pytest.raises(InvalidWeightFile, match=f"{path}: leads out of {folder} through a symlink"):
        weights.read("a")


def test_the_index_has_every_version_also_a_broken_one(folder, write):
    write("b/1")
    write("a/2").write_bytes(b"broken")
    write("a/10")
    (folder / "a" / "latest.safetensors").write_bytes(b"")
    (folder / "empty").mkdir()
    assert WeightsFolder(folder).index() == (("a", "10"), ("a", "2"), ("b", "1"))
