"""What keys an adapter's blocks, with vLLM's own requests for adapters and real files."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from pillion import adapters
from pillion.adapters import NO_CACHE, Adapters
from testkit.waiting import wait_for

RUN, OTHER_RUN = bytes(16), bytes([1] * 16)
FORM = "lora_dtype=torch.bfloat16"


class Engine:
    """The adapters of one engine, and how often ranks held other bytes than before."""

    def __init__(self, run: bytes = RUN, form: str = FORM) -> None:
        self.replaced = 0
        self.adapters = Adapters(run, form, self._count)

    def _count(self) -> None:
        self.replaced += 1

    def fold(self, request: LoRARequest) -> bytes:
        """The fold of a request that has just arrived, once its digest is there."""
        self.adapters.look(request)
        wait_for(lambda: self.adapters.fold(request) is not None, "digest of an adapter")
        found = self.adapters.fold(request)
        assert found is not None
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter's files."""
    folder = tmp_path / "adapter"
    write(folder, b"one")
    return folder


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings in the log."""
    said: list[str] = []
    monkeypatch.setattr(adapters.logger, "warning", lambda text, *parts: said.append(text % parts))
    return said


def write(folder: Path, weights: bytes, config: str = '{"r": 8}') -> None:
    """Makes the adapter what it is to be; every write is seen, however fast one follows another."""
    folder.mkdir(exist_ok=True)
    for name, content in (("adapter_config.json", config.encode()), ("adapter_model.safetensors", weights)):
        path = folder / name
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_bytes(content)
        os.utime(path, ns=(before + 10**9, before + 10**9))


def asks(folder: Path | str, number: int = 1, **more: Any) -> LoRARequest:
    """vLLM's word for the adapter."""
    return LoRARequest("name", number, str(folder), **more)


# --- from files ---


def test_equal_files_make_equal_folds(folder: Path, tmp_path: Path) -> None:
    """On every engine, wherever they lie and whatever ranks call them."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    # What ranks do not read.
    (copy / "README.md").write_text("about")
    (copy / "optimizer.pt").write_bytes(b"state")
    first = Engine().fold(asks(folder))
    assert len(first) == adapters.FOLD_BYTES
    assert first == Engine(OTHER_RUN).fold(LoRARequest("other", 7, str(copy)))


def test_whatever_differs_makes_another_fold(folder: Path, tmp_path: Path) -> None:
    """A byte of the weights, their configuration, and how they are applied."""
    folds = [Engine().fold(asks(folder)), Engine(form="lora_dtype=torch.float16").fold(asks(folder))]
    folds.append(Engine().fold(asks(folder, is_3d_lora_weight=True)))
    for number, (weights, config) in enumerate([(b"two", '{"r": 8}'), (b"one", '{"r": 4}'), (b"one ", '{"r": 8}')]):
        other = tmp_path / str(number)
        write(other, weights, config)
        folds.append(Engine().fold(asks(other)))
    assert len(set(folds)) == len(folds)


def test_a_digest_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that stay what they are are not read again."""
    engine = Engine()
    first = engine.fold(asks(folder))
    monkeypatch.setattr(adapters, "digest_files", lambda path, files: pytest.fail("read again"))
    assert engine.fold(asks(folder)) == first
    assert engine.replaced == 0


def test_nobody_waits_for_a_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is there the fold is not known."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    engine = Engine()
    engine.adapters.look(asks(folder))
    assert engine.adapters.fold(asks(folder)) is None
    write(folder, b"two")
    engine.adapters.look(asks(folder))
    assert engine.adapters.fold(asks(folder)) == NO_CACHE, "ranks may have loaded either"


# --- files that change under the engine ---


def test_changed_files_go_without_the_cache(folder: Path, said: list[str]) -> None:
    """Ranks may hold the bytes of before or load the new ones any time."""
    engine = Engine()
    first = engine.fold(asks(folder))
    write(folder, b"two")
    assert engine.fold(asks(folder)) == NO_CACHE
    write(folder, b"one")
    assert engine.fold(asks(folder)) == NO_CACHE, "what happened in between is not known"
    assert Engine().fold(asks(folder)) == first, "the next engine reads what is there"
    assert sum("have changed since this engine first saw them" in text for text in said) == 1


def test_an_overwritten_file_of_the_same_size_and_time(folder: Path) -> None:
    """Its requests go without the cache, as those of any changed adapter."""
    engine = Engine()
    engine.fold(asks(folder))
    path = folder / "adapter_model.safetensors"
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert engine.fold(asks(folder)) == NO_CACHE


def test_files_written_anew_with_the_same_bytes_are_the_same(folder: Path) -> None:
    """Whichever ranks hold, it is those."""
    engine = Engine()
    first = engine.fold(asks(folder))
    write(folder, b"one")
    assert engine.fold(asks(folder)) == first


def test_files_that_change_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of neither."""
    looks = iter([adapters.files_of(str(folder)), ()])
    monkeypatch.setattr(adapters, "files_of", lambda path: next(looks))
    engine = Engine()
    engine.adapters.look(asks(folder))
    wait_for(lambda: engine.adapters.fold(asks(folder)) is not None, "end of the digest")
    assert engine.adapters.fold(asks(folder)) == NO_CACHE


def test_one_number_for_two_adapters(folder: Path, tmp_path: Path) -> None:
    """Ranks know an adapter by its number, and serve the one that they hold."""
    other = tmp_path / "other"
    write(other, b"two")
    engine = Engine()
    engine.fold(asks(folder))
    assert engine.fold(asks(other)) == NO_CACHE
    assert engine.fold(asks(folder)) == NO_CACHE
    assert engine.fold(asks(other, number=2)) == Engine().fold(asks(other))
    engine = Engine()
    engine.fold(asks(folder, load_inplace=True))
    engine.fold(asks(other, load_inplace=True))
    assert engine.adapters.fold(asks(folder, load_inplace=True)) == NO_CACHE, "of a request that runs"


# --- what vLLM is told to load ---


def test_loaded_in_place(folder: Path) -> None:
    """Every rank reads the files then: they count from there on, and what was computed before is not kept."""
    engine = Engine()
    first = engine.fold(asks(folder))
    write(folder, b"two")
    engine.adapters.loads(asks(folder, load_inplace=True))
    assert engine.replaced == 1
    second = engine.fold(asks(folder))
    assert second not in (first, NO_CACHE) and second == Engine().fold(asks(folder))


def test_loaded_again_but_not_in_place(folder: Path) -> None:
    """Ranks that hold the adapter keep it."""
    engine = Engine()
    first = engine.fold(asks(folder))
    engine.adapters.loads(asks(folder))
    assert (engine.fold(asks(folder)), engine.replaced) == (first, 0)
    write(folder, b"two")
    engine.adapters.loads(asks(folder))
    assert engine.fold(asks(folder)) == NO_CACHE


def test_removed_and_loaded_anew(folder: Path) -> None:
    """Then ranks hold what is there now."""
    engine = Engine()
    first = engine.fold(asks(folder))
    engine.adapters.forget(1)
    assert engine.replaced == 1
    assert engine.fold(asks(folder)) == first
    engine.adapters.forget(2)
    assert engine.replaced == 1, "nobody named it"


def test_requests_that_load_in_place(folder: Path, said: list[str]) -> None:
    """Ranks read the files in every step: this run's own fold, another one whenever they have changed."""
    ask = asks(folder, load_inplace=True)
    engine = Engine()
    first = engine.fold(ask)
    assert first == engine.fold(ask) and first != Engine().fold(asks(folder))
    write(folder, b"two")
    second = engine.fold(ask)
    assert second not in (first, NO_CACHE) and engine.replaced == 1
    write(folder, b"one")
    assert engine.fold(ask) not in (first, second), "not even then"
    assert engine.fold(ask) != Engine(OTHER_RUN).fold(ask)
    assert len(said) == 2 and all("only by this run of this engine" in text for text in said)


# --- what cannot be seen ---


@pytest.mark.parametrize("path", ["owner/of-a-hub", "/nowhere", "{tmp}"])
def test_what_cannot_be_read_is_of_this_run(path: str, tmp_path: Path, said: list[str]) -> None:
    """And of other bytes whenever ranks may hold others."""
    ask = asks(path.format(tmp=tmp_path))
    engine = Engine()
    first = engine.fold(ask)
    assert first == engine.fold(ask) and len(first) == adapters.FOLD_BYTES
    assert first != Engine(OTHER_RUN).fold(ask)
    engine.adapters.may_differ()
    assert engine.fold(ask) != first
    assert len(said) == 2, "once by each engine"
