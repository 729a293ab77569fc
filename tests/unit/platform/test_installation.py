"""What runs here, told by a copy that may be installed or not."""

from pathlib import Path

import pytest

from worker.platform.installation import code_on_disk, read_record, write_record


def test_the_code_changes_with_the_text_or_name_of_our_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.platform.installation.ROOT", tmp_path)
    file = tmp_path / "worker" / "node" / "a.py"
    file.parent.mkdir(parents=True)
    found = []
    for text in ("1", "2", "2"):
        file.write_text(text)
        (tmp_path / "elsewhere.py").write_text(f"{len(found)}")  # no file of ours
        found.append(code_on_disk())
    file.rename(file.with_name("b.py"))
    found.append(code_on_disk())
    assert found[1] == found[2] and len(set(found)) == 3 and {len(each) for each in found} == {12}


@pytest.mark.parametrize("refusal", [PermissionError, NotADirectoryError, OSError])
def test_a_refusing_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: type[OSError]) -> None:
    def refuse(*args: object) -> None:
        raise refusal

    path = tmp_path / "a.msgpack"
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", refuse)
        write_record(path, {})
    assert not list(tmp_path.iterdir())
    for action in ("read_bytes", "write_bytes"):
        monkeypatch.setattr(Path, action, refuse)
    write_record(path, {})
    assert read_record(path) is None and not path.exists()


def test_a_record_is_read_as_it_was_written_and_a_missing_or_damaged_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.msgpack"
    assert read_record(path) is None
    for record in ({"key": [1, "x"]}, {}):
        write_record(path, record)
        assert read_record(path) == record and [*path.parent.iterdir()] == [path]
    for damage in (b"", b"\xc1", b"\x81", b"\x01\x01", b"\xa1\xff"):
        path.write_bytes(damage)
        assert read_record(path) is None
