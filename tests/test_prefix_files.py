"""A folder of kept prefixes: another process goes on with it; kills, damage, other weights, strangers."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import generate
from generation.prefix_store import TEXT_BLOCK, PrefixStore
from generation.session import Session
from inference import kept
from inference.checkpoint import open_checkpoint
from inference.command import DEFAULT_MODEL
from inference.errors import RequestError
from inference.kept import PrefixFolder, code_digest, device_kind, identity, libraries, version_of
from tests.evaluations import FORK
from tests.prompts import NO_STOP, ImageBlock, inputs_of, tiny_vlm, words
from tests.test_prefix_store import BYTES, check_loaded, filled_cache, small_model
from tests.test_prefix_store import held as count
from tests.waiting import PATIENCE

BLOCK = TEXT_BLOCK * BYTES + 400  # of a file of text, with its header and some more
EMBEDDED = Path(DEFAULT_MODEL)


def store_in(folder: Path, max_bytes: int = 2**20, memory: int = 2**20, who: bytes = b"w") -> PrefixStore:
    return PrefixStore(small_model(), memory, PrefixFolder(folder, max_bytes), who)


def save(store: PrefixStore, keys: torch.Tensor) -> None:
    store.put(keys, [], filled_cache(keys, []), 1)


def blocks_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"), key=lambda path: -path.stat().st_mtime_ns)


def written(folder: Path, count: int = 3) -> torch.Tensor:
    """Keys of `count` blocks that a store has written to a folder."""
    store, keys = store_in(folder), torch.arange(count * TEXT_BLOCK)
    save(store, keys)
    store.close()
    assert len(blocks_in(folder)) == count
    return keys


# --- another process


def test_another_process_goes_on_with_it(tmp_path, monkeypatch):
    vlm = tiny_vlm()
    prompt = [*words(1, 10), ImageBlock(1), *words(2, TEXT_BLOCK), ImageBlock(2), *words(3, 5)]
    options = {"max_new_tokens": 5, **NO_STOP}
    expected = vlm.generate(**inputs_of(prompt), **options)
    first = PrefixStore(vlm, 2**20, PrefixFolder(tmp_path), b"w")
    Session(vlm, prefixes=first).generate(**inputs_of(prompt), **options)
    first.close()
    monkeypatch.setattr(vlm, "encode_images", None)
    for memory in (2**20, 0):
        again = Session(vlm, prefixes=PrefixStore(vlm, memory, PrefixFolder(tmp_path), b"w"))
        output = again.generate_detailed(**inputs_of(prompt), **options)
        assert torch.equal(output.token_ids, expected) and output.prefilled == 5


def test_files_are_of_one_user(tmp_path):
    folder = tmp_path / "deep" / "folder"
    keys = written(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    first = filled_cache(keys, [])[0]["key"][1, :, :TEXT_BLOCK].flatten()
    assert blocks_in(folder)[0].read_bytes().startswith(first.numpy().tobytes())


# --- bytes


def test_what_was_used_longest_ago_goes_first_and_a_tail_before_its_head(tmp_path):
    store = store_in(tmp_path, 6 * BLOCK, memory=0)
    chains = [torch.arange(3 * TEXT_BLOCK) + 1000 * number for number in range(3)]
    for keys in chains[:2]:
        save(store, keys)
        assert store._files.flush()
    assert check_loaded(store, chains[0], []) == 3 * TEXT_BLOCK  # now the second one is the older
    assert store._files.flush()
    save(store, chains[2][: 2 * TEXT_BLOCK])
    assert store._files.flush()
    held = [count(store, keys) // TEXT_BLOCK for keys in chains]
    assert held[0] == 3 and held[1] < 3 and held[2] == 2
    save(store, torch.arange(9 * TEXT_BLOCK) + 5000)  # more than there is room for
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * BLOCK


def test_only_blocks_are_ever_removed(tmp_path):
    kept = [tmp_path / name for name in ("notes.txt", "model.safetensors", f".{'a' * 64}.tmp")]
    for path in kept:
        path.write_text("mine")
    (old := tmp_path / f".{'b' * 64}.prefix.0123456789abcdef.tmp").write_text("of a process that was killed")
    store = store_in(tmp_path, 2 * BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 2**40)
        for number in range(5):
            save(store, torch.arange(TEXT_BLOCK) + 1000 * number)
        store.close()
    assert all(path.read_text() == "mine" for path in kept) and not old.exists()
    assert 0 < len(blocks_in(tmp_path)) <= 2


# --- damage


def is_refused(folder: Path, keys: torch.Tensor, until: int, caplog) -> None:
    """What follows position `until` is not loaded; a file that is not as it was written goes, with one
    warning, and is there again after the prompt has been computed."""
    caplog.clear()
    store = store_in(folder, memory=0)
    assert check_loaded(store, keys, []) == until
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert count(store, keys) == until
    save(store, keys)
    store.close()
    assert check_loaded(store_in(folder, memory=0), keys, []) == len(keys)


def test_a_flipped_bit_anywhere_is_refused(tmp_path, caplog):
    keys = written(tmp_path)
    middle = blocks_in(tmp_path)[1]
    content = middle.read_bytes()
    store, rng = store_in(tmp_path, memory=0), random.Random(0)
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        middle.write_bytes(damaged)
        assert check_loaded(store, keys, []) == TEXT_BLOCK and not middle.exists(), place
    assert len(caplog.records) == 1  # one warning, however many
    middle.write_bytes(damaged)
    is_refused(tmp_path, keys, TEXT_BLOCK, caplog)


@pytest.mark.parametrize("length", [0, 8, -1, "longer", "zeros", "another"])
def test_a_file_cut_short_or_of_something_else_is_refused(tmp_path, caplog, length):
    keys = written(tmp_path)
    head, middle, _ = blocks_in(tmp_path)
    content = middle.read_bytes()
    wrong = {"longer": content + b"\0", "zeros": bytes(len(content)), "another": head.read_bytes()}
    middle.write_bytes(wrong[length] if isinstance(length, str) else content[:length])
    is_refused(tmp_path, keys, TEXT_BLOCK, caplog)


def test_what_is_no_file_is_refused(tmp_path, caplog):
    keys = written(tmp_path / "prefixes")
    head = blocks_in(tmp_path / "prefixes")[0]
    target = head.replace(tmp_path / "elsewhere")
    for make in (lambda: head.symlink_to(target), lambda: os.mkfifo(head)):
        make()
        is_refused(tmp_path / "prefixes", keys, 0, caplog)
        assert target.exists()
        head.unlink()
    head.mkdir()
    assert check_loaded(store_in(tmp_path / "prefixes", memory=0), keys, []) == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    """Answers are computed from what lies in it."""
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(mode)
    (tmp_path / "link").symlink_to(shared)
    for path in (shared, tmp_path / "link"):
        with pytest.raises(RequestError, match=f"{mode:04o}"):
            PrefixFolder(path)
    shared.chmod(0o755)
    PrefixFolder(shared)
    (file := tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file"):
        PrefixFolder(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    """And one behind another user's link: it may lead elsewhere tomorrow."""
    (theirs := tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(theirs, 4321, -1)
    (ours := tmp_path / "ours").mkdir(mode=0o700)
    (their_link := tmp_path / "their-link").symlink_to(ours)
    os.chown(their_link, 4321, -1, follow_symlinks=False)
    for path in (theirs, their_link):
        with pytest.raises(RequestError, match="4321"):
            PrefixFolder(path)


def test_a_closed_folder_gives_nothing_more_and_keeps_no_thread(tmp_path):
    keys = written(tmp_path)
    before = set(threading.enumerate())
    store = store_in(tmp_path, memory=0)
    assert check_loaded(store, keys, []) == len(keys)
    readers = set(threading.enumerate()) - before
    assert readers
    found = store.find(keys, [], len(keys))
    store.close()
    store.close()
    for one in readers:
        one.join(PATIENCE)
    assert not any(one.is_alive() for one in readers)
    cache = filled_cache(keys, [])
    assert count(store, keys) == store.take(found, cache, 0, 0)[0] == 0
    save(store, keys)


def test_a_folder_that_takes_nothing_costs_no_answer(tmp_path, caplog):
    vlm = tiny_vlm()
    store = PrefixStore(vlm, 0, PrefixFolder(tmp_path / "gone"), b"w")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").write_text("")  # whoever writes, root too, fails
    prompt = inputs_of(words(1, 2 * TEXT_BLOCK))
    for _ in range(2):
        got = Session(vlm, prefixes=store).generate(**prompt, max_new_tokens=4, **NO_STOP)
        assert torch.equal(got, vlm.generate(**prompt, max_new_tokens=4, **NO_STOP))
        assert store._files.flush()
    assert len(caplog.records) == 1


# --- weights


@pytest.fixture
def other_weights(tmp_path) -> Path:
    """The embedded checkpoint with one bit of one weight changed."""
    shutil.copytree(EMBEDDED, folder := tmp_path / "other")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1000] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_who_may_share(tmp_path, other_weights):
    """A prefix is of the weights to the bit, of their dtype and of the arithmetic."""
    same = open_checkpoint(EMBEDDED, device="cpu")
    assert identity(same) == identity(open_checkpoint(EMBEDDED, device="cpu"))
    others = [
        open_checkpoint(other_weights, device="cpu"),
        open_checkpoint(EMBEDDED, device="cpu", dtype="int8"),
    ]
    if (compiled := same.compiled()).decode_step is not None:
        others.append(compiled)
    found = {identity(checkpoint) for checkpoint in [same, *others]}
    assert len(found) == 1 + len(others)
    keys = torch.arange(TEXT_BLOCK)
    save(mine := store_in(tmp_path / "prefixes", who=identity(same)), keys)
    mine.close()
    for who, held in ((identity(same), TEXT_BLOCK), (identity(others[0]), 0)):
        assert count(store_in(tmp_path / "prefixes", who=who), keys) == held


CODE = (
    *("generation/fast/native/tower.c", "generation/fast/native/panels.h", "generation/fast/cuda/kernels.py"),
    *("models/vision_transformer.py", "families/nanovlm.py", "data/tiles.py"),
)


def test_nothing_outlives_the_code_that_made_it(tmp_path, monkeypatch):
    """A mended mistake in the tower must not go on answering from a folder."""
    for room in ("models", "generation", "families", "data"):
        ignored = shutil.ignore_patterns("*.pyc")
        shutil.copytree(kept.ROOT / room, tmp_path / room, ignore=ignored)
    before = code_digest()
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    for name in CODE:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace("1", "2", 1))
        assert code_digest() != before, name
        (tmp_path / name).write_text(text)
        assert code_digest() == before


def test_nothing_outlives_the_compiler_or_the_device(monkeypatch):
    checkpoint = open_checkpoint(EMBEDDED, device="cpu")
    assert libraries(checkpoint) == []
    checkpoint = checkpoint.compiled()
    if checkpoint.decode_step is not None:
        assert len(libraries(checkpoint)) == 2  # of the step, with all panels, and of the tower
    kinds = set()
    for name, capability in (("GPU A", (9, 0)), ("GPU B", (9, 0)), ("GPU B", (8, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        kinds |= {tuple(device_kind(torch.device("cuda", index))) for index in (0, 1)}
    assert len(kinds) == 3 and tuple(device_kind(torch.device("cpu"))) not in kinds


def test_the_version_of_a_file_changes_with_it(tmp_path):
    """A file of the Hub's cache is known by its name, wherever the cache is."""
    (path := tmp_path / "weights").write_bytes(b"1" * 100)
    times, first = path.stat(), version_of(path)
    assert version_of(path) == first
    time.sleep(0.05)  # more than the clock of the file system
    path.write_bytes(b"2" * 100)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as some tools copy
    assert version_of(path) != first
    for cache in (tmp_path / "one", tmp_path / "two"):
        (cache / "blobs").mkdir(parents=True)
        (cache / "blobs" / "abc").write_bytes(b"3")
        (cache / "weights").symlink_to(cache / "blobs" / "abc")
        assert version_of(cache / "weights") == "abc"


# --- several processes


def check_sound(folder: Path, chains: int, seed: int) -> int:
    """What can be found in a folder loads, and holds the numbers that were computed: so many positions."""
    store, rng, found = store_in(folder, 12 * BLOCK, memory=0), random.Random(seed), 0
    for _ in range(chains):
        keys = torch.tensor([rng.randrange(3) for _ in range(6)]).repeat_interleave(TEXT_BLOCK)
        held = count(store, keys)
        assert check_loaded(store, keys, []) == held  # so none was refused
        found += held
    store.close()
    return found


def work_for(folder: Path, seed: int, seconds: float) -> None:
    torch.set_num_threads(1)
    store, rng = store_in(folder, 12 * BLOCK, memory=0), random.Random(seed)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        parts = [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        keys = torch.tensor(parts).repeat_interleave(TEXT_BLOCK)
        check_loaded(store, keys, [])  # another process may have removed what was matched
        save(store, keys)
        store._files.flush()
    assert not store._files._warned
    store.close()


def test_two_processes_share_a_folder(tmp_path):
    processes = [FORK.Process(target=work_for, args=(tmp_path, seed, 1.0)) for seed in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert check_sound(tmp_path, 20, 7) and not list(tmp_path.glob(".*.tmp"))


# --- generate.py


def test_a_second_start_computes_the_question_alone(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(kept, "PrefixStore", lambda *given: opened.append(PrefixStore(*given)) or opened[-1])
    arguments = ["--prefix-cache", str(tmp_path / "prefixes"), "--json", "--max-new-tokens", "4"]
    results = []
    for question in ("How many objects are there?", "How many objects are there?", "What is in the picture?"):
        assert generate.main([*arguments, "-q", question]) == 0
        opened[-1].close()  # as at the end of the process
        results.append(json.loads(capsys.readouterr().out))
    first, again, other = results
    assert first["answers"] == again["answers"] and first["image_tokens"] > 0
    assert first["reused_tokens"] == 0
    assert min(again["reused_tokens"], other["reused_tokens"]) >= first["image_tokens"]
