"""A file on its way to be a cache: whatever is in it, it is refused by name, or is a cache that works."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.robustness.counts import count
from tests.robustness.saved_files import SAVED, Largest, broken, config_of, join, save, split, use
from tests.test_cache import CONFIG, filled
from tests.test_cache_fork import SMALL as TWO_LAYERS
from tests.test_cache_fork import content, extend, same
from tq_hf import TurboQuantCache
from tq_hf.files import loading

ROOT = Path(__file__).parents[2]
EACH = int(os.environ.get("TQ_HF_FUZZED_FILES", "560")) // len(SAVED)  # files made of each saved cache


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("saved")
    for name in SAVED:
        save(name, folder / name)
    return {name: (folder / name).read_bytes() for name in SAVED}


def load_or_refuse(path: Path, data: bytes, config: Any = None) -> TurboQuantCache | None:
    """The cache, or None if the file is refused as it should be; fails on any other error, and on too much memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with Largest() as largest:
            cache = TurboQuantCache.load(path, config)
    except ValueError as error:
        assert "cannot be loaded as a TurboQuantCache" in str(error), error
        cache = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 40 * len(data) + (1 << 20), f"{peak:,} bytes of Python objects for a file of {len(data):,}"
    if cache is None or not cache.table.is_static:  # whose size is in its header, and checked against the memory
        assert largest.nbytes <= 2 * len(data) + (1 << 12), f"a tensor of {largest.nbytes:,} for a file of {len(data):,}"
    return cache


@pytest.mark.parametrize("name", list(SAVED))
def test_a_saved_file_is_usable(saved: dict[str, bytes], name: str, tmp_path: Path) -> None:
    for config in (None, config_of(name)):
        cache = load_or_refuse(tmp_path / "cache", saved[name], config)
        assert cache is not None
        use(cache, tmp_path / "again")


@pytest.mark.parametrize("name", list(SAVED))
def test_a_broken_file_is_refused_or_works(saved: dict[str, bytes], name: str, tmp_path: Path) -> None:
    @settings(
        max_examples=EACH,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )
    @given(data=broken(saved[name]), with_config=st.booleans())
    def fuzz(data: bytes, with_config: bool) -> None:
        cache = load_or_refuse(tmp_path / "cache", data, config_of(name) if with_config else None)
        count("files fuzzed")
        if cache is not None:
            count("files fuzzed, of these loaded and used")
            use(cache, tmp_path / "again")

    fuzz()


def changed(data: bytes, *path: Any, value: Any) -> bytes:
    header, tensors = split(data)
    holder = header["__metadata__"]["header"]
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return join(header, tensors)


# -- what the fuzzer or reading has found ------------------------------------------------------------------------------
def test_layers_of_different_lengths_are_refused(saved: dict[str, bytes], tmp_path: Path) -> None:
    """A layer that lags behind would write into pages that rows share by then."""
    header = split(saved["dynamic"])[0]["__metadata__"]["header"]
    length, packed_end, used = header["layers"][1]["state"]["counters"]
    data = changed(saved["dynamic"], "layers", 1, "state", "counters", value=[length + 1, packed_end, used])
    (tmp_path / "cache").write_bytes(data)
    with pytest.raises(ValueError, match="layers of one block table hold different numbers of tokens"):
        TurboQuantCache.load(tmp_path / "cache")
    data = changed(saved["mixed"], "layers", 0, "numbers", "cumulative_length", value=90)
    (tmp_path / "cache").write_bytes(data)
    with pytest.raises(ValueError, match=r"its layers hold \[83, 90\] tokens"):
        TurboQuantCache.load(tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "where", "value", "message"),
    [
        ("static", ("offloading",), [True, True], "offloading is"),
        ("empty", ("layers", 0, "numbers", "cumulative_length"), 7, "has no keys"),
        ("mixed", ("layers", 0, "device"), 7, "device='7'"),
        ("mixed static", ("layers", 0, "numbers", "cumulative_length_int"), 9, "24 stored keys do not fit"),
    ],
)
def test_entries_that_contradict_each_other_are_refused(
    saved: dict[str, bytes], name: str, where: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(changed(saved[name], *where, value=value))
    with Largest() as largest, pytest.raises(ValueError, match=message):
        TurboQuantCache.load(tmp_path / "cache")
    assert largest.nbytes <= 2 * len(saved[name])


def test_a_cache_whose_forward_pass_was_interrupted_is_not_saved(tmp_path: Path) -> None:
    cache = filled(100, **TWO_LAYERS)
    key = torch.zeros(1, 2, 5, 64)
    cache.update(key, key, 0)
    with pytest.raises(RuntimeError, match="only layer 0 of 2 hold its tokens"):
        cache.save(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["static", "hybrid", "linear", "mixed"])
def test_rows_that_differ_between_layers_are_refused(saved: dict[str, bytes], name: str, tmp_path: Path) -> None:
    header, tensors = split(saved[name])
    which = next(t for t in header if t.endswith(("conv_states.0", ".0.keys", "sink_key")))
    shape = header[which]["shape"]
    rows, heads = shape[:2]
    shape[:2] = [rows * heads, 1]  # as many bytes
    (tmp_path / "cache").write_bytes(join(header, tensors))
    with pytest.raises(ValueError, match="cannot be loaded"):
        TurboQuantCache.load(tmp_path / "cache")


@pytest.mark.parametrize("what", ["window", "rows", "kernel"])
def test_claims_that_no_tensor_proves_are_refused(saved: dict[str, bytes], what: str, tmp_path: Path) -> None:
    if what == "window":  # an empty cache's, which it would allocate at the first token
        header, tensors = split(saved["empty"])
        ours = header["__metadata__"]["header"]
        for sizes in (ours["quantization"], *ours["configs"], *ours["tables"]):
            sizes["recent_window"] = 2**31 - 1
        data, message = join(header, tensors), "an empty cache that keeps 2147483647 tokens exact"
    elif what == "rows":  # of a static table without a layer, which would get pages for each
        header, tensors = split(saved["static"])
        ours = header["__metadata__"]["header"]
        for layer in ours["layers"]:
            layer["state"] = None
        ours["max_cache_len"], rows = 2**31 - 1, 1000
        ours["tables"][0] |= {"rows": rows, "pages": 0}
        header = {"__metadata__": header["__metadata__"]}
        for end, shape in (("entries", [0, 2]), ("page_ids", [rows, 0]), ("row_start", [rows])):
            size = 4 * rows if end == "row_start" else 0
            header[f"tables.0.{end}"] = {"dtype": "I32", "shape": shape, "data_offsets": [0, size]}
        data, message = join(header, bytes(4 * rows)), "rows of no layer"
    else:
        header, tensors = split(saved["linear"])
        numbers = header["__metadata__"]["header"]["layers"][0]["numbers"]
        numbers |= {"record_past": True, "conv_kernel_size.0": 2**40}
        data, message = join(header, tensors), "does not fit a kernel of 1099511627776"
    (tmp_path / "cache").write_bytes(data)
    began = time.process_time()
    with pytest.raises(ValueError, match=message):
        TurboQuantCache.load(tmp_path / "cache")
    assert time.process_time() - began < 5


LIMITED = """
import resource, sys
import torch
from tq_hf import TurboQuantCache
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        TurboQuantCache.load(path)
        print("loaded", path)
    except ValueError as error:
        print("refused", error)
"""


def test_huge_claims_are_refused_within_a_limit_of_memory(saved: dict[str, bytes], tmp_path: Path) -> None:
    """In a process that may take 256 MB more: any attempt to allocate what these files claim would be a MemoryError."""
    files = []
    for i, number in enumerate((2**28, 2**31 - 1, 2**40, 2**62)):
        for j, path in enumerate(
            [
                ("tables", 0, "rows"), ("tables", 0, "pages"), ("tables", 0, "sink_tokens"), ("tables", 0, "page_size"),
                ("tables", 0, "recent_window"), ("layers", 1, "state", "kv_heads"), ("layers", 1, "state", "key_dim"),
                ("layers", 1, "state", "counters"), ("max_cache_len",), ("quantization", "sink_tokens"),
            ]
        ):  # fmt: skip
            value = [number, number, 2] if path[-1] == "counters" else number
            files.append(tmp_path / f"{i}.{j}")
            files[-1].write_bytes(changed(saved["dynamic"], *path, value=value))
        header, tensors = split(saved["dynamic"])
        name = next(n for n in header if n.endswith("ring_key"))
        header[name]["shape"][0] = number
        header[name]["data_offsets"][1] = number * 4
        files.append(tmp_path / f"{i}.shape")
        files[-1].write_bytes(join(header, tensors))
    command = [sys.executable, "-c", LIMITED, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["refused"] * len(files), done.stdout
    count("files fuzzed", len(files))


def test_loading_executes_nothing(saved: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unpickled, evaluated, imported by name or run, whatever the file says."""
    ours = split(saved["mixed"])[0]["__metadata__"]["header"]
    events: list[str] = []
    watching = True

    def hook(event: str, arguments: Any) -> None:
        if watching and threading.get_ident() == me and event in ("exec", "compile", "import", "pickle.find_class",
                                                                  "subprocess.Popen", "os.system"):  # fmt: skip
            events.append(f"{event} {arguments}"[:200])

    me, watching = threading.get_ident(), False
    TurboQuantCache.load(_written(tmp_path / "cache", saved["mixed"]), config_of("mixed"))  # imports what it needs
    sys.addaudithook(hook)
    watching = True
    try:
        names = (
            "os.system",
            "__import__('os').system('false')",
            "builtins.eval",
            "torch.load",
            "DynamicCache",
            "__class__",
        )
        for name, (i, layer) in itertools.product(names, enumerate(ours["layers"])):
            where = ("layers", i, "layer", "class") if layer["kind"] == "transformers" else ("layers", i, "kind")
            with pytest.raises(ValueError, match="cannot be loaded"):
                TurboQuantCache.load(_written(tmp_path / "cache", changed(saved["mixed"], *where, value=name)))
        TurboQuantCache.load(_written(tmp_path / "cache", changed(saved["mixed"], "preset", value=names[1])))
    finally:
        watching = False
    assert events == []


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- what a path may be ------------------------------------------------------------------------------------------------
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    cache = filled(50)
    for path in (tmp_path / "pipe", tmp_path / "folder", tmp_path / "to_pipe", Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(ValueError, match="a folder, a pipe or a device"):
            TurboQuantCache.load(path)
        if not path.is_symlink():
            with pytest.raises(OSError, match="a folder or a device"):
                cache.save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe", "to_pipe"]
    with pytest.raises(OSError):
        TurboQuantCache.load("/proc/self/status")  # a file by its kind, which has no size
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError):
        TurboQuantCache.load(tmp_path / "loop")


def test_links_are_read_through_and_replaced(tmp_path: Path) -> None:
    cache, other = filled(100, **TWO_LAYERS), filled(60, **TWO_LAYERS)
    cache.save(tmp_path / "cache")
    (tmp_path / "link").symlink_to("cache")
    assert same(content(TurboQuantCache.load(tmp_path / "link")), content(cache))
    other.save(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert same(content(TurboQuantCache.load(tmp_path / "cache")), content(cache))
    assert same(content(TurboQuantCache.load(tmp_path / "link")), content(other))
    (tmp_path / "nowhere").symlink_to("missing")
    other.save(tmp_path / "nowhere")
    assert not (tmp_path / "missing").exists()


def test_the_unfinished_file_is_not_one_that_others_have_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of its name would lead the bytes elsewhere: the name is random, and it must be new."""
    (tmp_path / "victim").write_bytes(b"precious")
    monkeypatch.setattr("tq_hf.files.saving.secrets.token_hex", lambda n: "guessed")
    (tmp_path / "cache.guessed.part").symlink_to("victim")
    with pytest.raises(FileExistsError):
        filled(50).save(tmp_path / "cache")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "cache.guessed.part").is_symlink()


@contextmanager
def as_nobody() -> Iterator[Path]:
    """A folder of somebody who may not do everything."""
    with tempfile.TemporaryDirectory() as folder:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if is_root:
                os.seteuid(0)


def test_permissions_are_told() -> None:
    cache = filled(50)
    with as_nobody() as folder:
        cache.save(folder / "cache")
        (folder / "cache").chmod(0)
        with pytest.raises(PermissionError):
            TurboQuantCache.load(folder / "cache")
        folder.chmod(0o500)
        with pytest.raises(PermissionError):
            cache.save(folder / "other")
        assert [file.name for file in folder.iterdir()] == ["cache"]
        folder.chmod(0o700)


def test_a_file_is_its_owners(tmp_path: Path) -> None:
    filled(50).save(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


FULL = """
import resource, sys
from tests.test_cache import filled
cache = filled(200)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # what a full disk does to a write, at this size
try:
    cache.save(sys.argv[1])
except OSError as error:
    print("refused", error)
assert cache.get_seq_length() == 200
"""


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    cache = filled(100, **TWO_LAYERS)
    cache.save(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    command = [sys.executable, "-c", FULL, str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("refused"), done
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache").read_bytes() == before


WRITER = """
import sys, time
from tests.test_cache import filled
from tests.test_cache_fork import SMALL
cache = filled(int(sys.argv[2]), **SMALL)
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[3])
saved = 0
while time.monotonic() < end or saved < 5:
    cache.save(sys.argv[1])
    saved += 1
print(saved)
"""


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and tensors are those of one file, though safetensors opens it once for each."""
    old, new = filled(150, **TWO_LAYERS), filled(70, **TWO_LAYERS)
    old.save(tmp_path / "cache")
    opens = loading.safe_open

    def replaced(*args: Any, **options: Any) -> Any:
        new.save(tmp_path / "cache")
        return opens(*args, **options)

    class ReplacedLater:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.opened = opens(*args, **options)

        def __enter__(self) -> Any:
            entered = self.opened.__enter__()
            new.save(tmp_path / "cache")
            return entered

        def __exit__(self, *exception: Any) -> Any:
            return self.opened.__exit__(*exception)

    for way in (replaced, ReplacedLater):
        old.save(tmp_path / "cache")
        monkeypatch.setattr(loading, "safe_open", way)
        assert same(content(TurboQuantCache.load(tmp_path / "cache")), content(old))
        monkeypatch.setattr(loading, "safe_open", opens)
        assert same(content(TurboQuantCache.load(tmp_path / "cache")), content(new))


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """The reader sees one whole cache or the other at any time, and so does whoever comes last."""
    lengths = (70, 150)
    expected = {n: content(filled(n, **TWO_LAYERS)) for n in lengths}
    path = tmp_path / "cache"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n), "2"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for n in lengths
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    seen, loads = set(), 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            cache = TurboQuantCache.load(path, CONFIG)
            assert same(content(cache), expected[cache.get_seq_length()])
            seen.add(cache.get_seq_length())
            loads += 1
    saved = [int(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert loads > 5 and min(saved) >= 5 and seen <= set(lengths)
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    extend(TurboQuantCache.load(path, CONFIG), 40, seed=3)
    count("files saved while two writers and a reader ran", sum(saved))
