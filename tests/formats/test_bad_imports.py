"""Files that are broken or hostile: every importer soon raises a SpecError with the place and the fault.

On these files, code that is not linear in the length of the text takes minutes and hits the time limit of its test.
"""

from __future__ import annotations

import pickle
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.documents import SUFFIXES, format_document
from detrain_nb.errors import SpecError
from detrain_nb.formats import IMPORTERS, import_file, import_text
from detrain_nb.formats.imported import Foreign
from detrain_nb.plan.targets import KINDS

from .foreign_documents import RFC_AS_WRITTEN, SDL_WITH_TORCHRUN, TENSOR_STATE, TITAN_2025

SAMPLES: dict[str, tuple[str, str]] = {  # for each kind, a file name and a text
    "detrain": ("state.json", format_document(TENSOR_STATE, ".json")),
    "akash": ("train.yaml", format_document(SDL_WITH_TORCHRUN, ".yaml")),
    "hypha": ("job.json", RFC_AS_WRITTEN),
    "torchtitan": ("debug.toml", format_document(TITAN_2025, ".toml")),
    "lease": (
        "lease.json",
        '{"services": {"a": {"available": 1, "total": 1}},\n'
        ' "ips": {"a": [{"IP": "10.0.0.1", "Port": 2222, "ExternalPort": 22}]},\n'
        ' "forwarded_ports": {"a": [{"host": "b.org", "port": 2222, "externalPort": 31022}, {"port": 80}]}}\n',
    ),
    "ravnest": (
        "node_configs.json",
        '{"0": {"IP": "10.0.0.1:8080", // the first\n "benchmarks": {"ram": 8, "bandwidth": 20}},\n'
        ' "1": {"IP": "10.0.0.2:8080", "benchmarks": {"ram": 16, "bandwidth": 10}}}\n',
    ),
    "accelerate": (
        "config.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
        "main_process_port: 29500\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 4\ngpu_ids: 0,1\n"
        "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_activation_checkpointing: true\n"
        "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n",
    ),
    "command": (
        "start.sh",
        "#!/bin/bash\n#SBATCH --time=1:00\nexport A='b c' HF_TOKEN=x\ngit clone -b v1 https://u:p@example.org/a/b.git\n"
        'cd b/c && srun torchrun --nnodes 1:4 --nproc_per_node=2 --rdzv-conf "timeout=3" --rdzv_endpoint=a:1 \\\n'
        '  --max-restarts 1 train.py "$B" --lr 3 2>&1 | tee log\n',
    ),
    "ssh_config": (
        "config",
        "Host gpu1 gpu2\n  HostName %h.example.org\n  Port 2222\nHost *\n  User alice\n  ProxyJump a@b:2\n  Foo bar\n",
    ),
    "hostfile": ("hostfile", "gpu[01-04,07] slots=8 # five\nlogin1:2\nalice@10.0.0.1\n"),
}
NASTY: list[Any] = [None, True, -1, 0, 1 << 62, 1e300, "", "\0", "\ud800", "x" * 5000, "1" * 5000, "$(a)", "[1-9]"]
NASTY += [[], {}, [[]], [{}], {"a": {}}, [None], "../..", "a\nb", "-x", "é", "99999999999999999999"]
BAD_TEXTS = {
    "nothing": "",
    "blanks": " \n\t\n",
    "NUL": "a\0b",
    "signs": "\x01\x1b[2J\x7f",
    "a list": "[1, 2]",
    "a null": "null: null",
    "many digits": '{"a": ' + "1" * 100_000 + "}",
    "deep": "[" * 100_000,
    "deep names": '{"a":' * 100_000,
    "a bomb": "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
    "a circle": "a: &a\n  b: *a\n",
    "an object": "a: !!python/object/apply:os.system [touch x]\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "a range": "gpu[1-1000000000]",
    "many ranges": "gpu[1-2]" + "[1-2]" * 1000,
    "very many secrets": "export " + " ".join(f"A{number}_KEY=x" for number in range(20_000)) + "\ntorchrun a.py",
    "very many nodes": "torchrun --nnodes 1000000000 train.py",
}
LONG = [
    "a",
    " ",
    "\n",
    "'",
    '"',
    "\\",
    "$",
    "$(",
    "${",
    '"$(',
    "`",
    "{",
    "[",
    "a[",
    "-",
    "=",
    "a=",
    ",",
    "#",
    "<",
    "<<",
    "//",
]
LONG += [
    "/*",
    "...",
    "a:",
    "a.",
    "a b\n",
    "a=1 ",
    "Host *a",
    "Host *a ",
    "Host a\n",
    "*",
    ";",
    "1",
    "torchrun ",
    "[[a.b]]\n",
    "\t",
]

MANY = " ".join(f"A{number}=" for number in range(20_000))
ONCE_MORE = "torchrun a.py\n" * 9000
SQUARES: dict[str, tuple[str, str]] = {  # small parts that multiply to something large: a text, and its error
    "variables of branches": (f"export {MANY}\n" + "case x in\n" * 1000 + "torchrun a.py", "more than 1,000 variables"),
    "variables of launches": (f"export {MANY[:5000]}\n{ONCE_MORE}", "start ranks with too many variables"),
    "secrets of launches": (
        f"export {MANY[:5000].replace('=', '_KEY=')}\n{ONCE_MORE}",
        "start ranks with too many variables",
    ),
    "a long variable": (f"export A=$({'x' * 800_000})\n{ONCE_MORE}", "start ranks with too many variables"),
    "repositories of launches": (
        "".join(f"git clone https://a.org/{number}\n" for number in range(5000)) + ONCE_MORE[:60_000],
        "start ranks with too many variables",
    ),
    "colons": (f"git clone https://{':' * 800_000} b\ntorchrun b/a.py\n", "git url"),
    "a folder": (f"cd {'a' * 90}\n" * 9000 + "torchrun a.py", "line 46: cd leads to a path of more than 4,096"),
    "hosts": ("a[1-9999]\n" * 1000, "more than 500,000 mentions of hosts"),
    "a path of nodes": (
        f"/{'a' * 900_000}/python3 -m torch.distributed.run --nnodes 10000 a.py\n",
        r"nodes\[0\]\.python",
    ),
    "placements": (  # the script of these must be read once only
        format_document(
            {
                "version": "2.0",
                "services": {"a": {"args": ["sh", "-c", "x y\n" * 9000 + "torchrun a.py " + "a " * 40_000]}},
                "profiles": {"compute": {"c": {}}},
                "deployment": {"a": {f"p{number}": {"profile": "c"} for number in range(1000)}},
            },
            ".json",
        ),
        "services: nodes 1 and 2 and 3",
    ),
}

_NAMES = " ".join(f"h{number}" for number in range(9000))
SQUARES |= {  # these once took minutes, or gigabytes
    "a jump of hosts": (f"Host {_NAMES}\nHost *\n ProxyJump {'a,' * 300_000}a", "proxyjump .*at most 4,096 characters"),
    "jumps of hosts": (f"Host {_NAMES}\nHost *\n ProxyJump {'a,' * 2000}a", "names more than 20 hosts"),
    "a name in a host": (f"Host {'a' * 250}\n HostName {'%h' * 450_000}", "hostname .*at most 4,096 characters"),
    "a long name of a host": (f"Host {'a' * 990_000}", "Host a{60}: "),
    "escaped signs": ("torchrun a.py\n" + r"\ #" * 320_000, "more than 200,000 blanks"),
    "texts of shells": (
        f"sh -c '{'x' * 99}\n'\n" * 9000 + "torchrun a.py",
        "text passed to shells up to here is",
    ),
    "commands of shells": ((f"sh -c '{'x;' * 9000}'\n") * 3 + "torchrun a.py", "more than 20,000 commands up to here"),
    "setup of launches": ("ulimit -n 9\n" * 4900 + ONCE_MORE[:60_000], "too many variables, or too many setup lines"),
    "variables of one line": (f"{MANY}\ntorchrun a.py", "more than 1,000 variables"),
    "commands of services": (
        format_document(
            {
                "version": "2.0",
                "services": {
                    f"a{number}": {"args": ["sh", "-c", "x;" * 300 + "torchrun a.py"]} for number in range(900)
                },
                "profiles": {"compute": {"c": {"resources": {}}}},
                "deployment": {f"a{number}": {"p": {"profile": "c"}} for number in range(900)},
            },
            ".json",
        ),
        r"services.a66.args: .* too many commands, or too many words",
    ),
    "a long name of containers": (
        format_document(
            {
                "version": "2.0",
                "services": {"a" * 400_000: {"args": ["torchrun", "a.py"]}},
                "profiles": {"compute": {"c": {"resources": {}}}},
                "deployment": {"a" * 400_000: {"p": {"profile": "c", "count": 1000}}},
            },
            ".json",
        ),
        "services.a{60}: give it a name of at most",
    ),
}

kinds = pytest.mark.parametrize("kind", IMPORTERS)


def _import(kind: str, text: str, name: str) -> None:
    """Check that a text is read, or refused in one line per fault, each of which begins with the file name."""
    try:
        import_text(text, name=name, kind=kind)
    except SpecError as exc:
        assert all(line.startswith(name) for line in str(exc).splitlines()), str(exc)
        assert str(exc).isprintable() or "\n" in str(exc), "signs of a terminal"
        assert len(str(exc)) < 10_000


def test_every_importer_has_a_sample_that_it_reads_and_no_other_takes() -> None:
    assert SAMPLES.keys() == IMPORTERS.keys() == set(KINDS)
    for kind, (name, text) in SAMPLES.items():
        assert import_text(text, name=name).kind == kind
        assert [each for each, importer in IMPORTERS.items() if importer.is_one(Foreign(text, name))] == [kind]


@kinds
def test_text_that_is_cut_off_anywhere_is_read_or_told(kind: str) -> None:
    name, text = SAMPLES[kind]
    for length in range(len(text)):
        _import(kind, text[:length], name)


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_stands_in_the_place_of_a_part_is_read_or_told(kind: str, data: st.DataObject) -> None:
    name, text = SAMPLES[kind]
    content = Foreign(text, name).document if name.endswith(SUFFIXES) else None
    if content is None:
        words = list(re.finditer(r"[^\s=:,/\"']+", text))
        place = data.draw(st.sampled_from(words))
        nasty = data.draw(st.sampled_from([each for each in NASTY if isinstance(each, str)]))
        _import(kind, text[: place.start()] + nasty + text[place.end() :], name)
        return
    table = content
    while True:
        key = data.draw(st.sampled_from(list(table) if isinstance(table, dict) else range(len(table))))
        if not table[key] or not isinstance(table[key], dict | list) or data.draw(st.booleans()):
            break
        table = table[key]
    table[key] = data.draw(st.sampled_from(NASTY))
    suffix = next(suffix for suffix in SUFFIXES if name.endswith(suffix))
    try:
        text = format_document(content, suffix)
    except SpecError:  # no document can hold such a value
        return
    _import(kind, text, name)


@kinds
@pytest.mark.parametrize("case", BAD_TEXTS)
def test_text_of_no_kind_is_told(kind: str, case: str) -> None:
    name = SAMPLES[kind][0]
    with pytest.raises(SpecError, match=f"^{re.escape(name)}: "):
        import_text(BAD_TEXTS[case], name=name)
    _import(kind, BAD_TEXTS[case], name)


@kinds
def test_long_text_is_told_in_time_by_its_length(kind: str) -> None:
    name, text = SAMPLES[kind]
    pieces = LONG[:12] if name.endswith(SUFFIXES) else LONG  # documents have a suite of their own
    for piece in pieces:
        _import(kind, text[: len(text) // 2] + piece * (200_000 // len(piece)), name)


def test_many_options_of_many_hosts_are_told_in_time() -> None:
    hosts = " ".join(f"h{number}" for number in range(9000))
    options = "\n".join(f"  Option{number} x" for number in range(40_000))
    assert len(import_text(f"Host {hosts}\n{options}", name="config").nodes) == 9000


@pytest.mark.parametrize("case", SQUARES)
def test_parts_that_are_small_alone_make_nothing_large_together(case: str) -> None:
    text, said = SQUARES[case]
    with pytest.raises(SpecError, match=said):
        import_text(text, name="a.json" if text.startswith("{") else "")


WIDE: dict[str, str] = {  # these are read, but once took gigabytes
    "files of commands": f"sh -c '{'x;' * 3000}' {'>a ' * 15_000}\ntorchrun a.py",
    "places": '{"training_definition": {}, ' + f'"{"k" * 400_000}": [{"[...]," * 2000}]}}',
}


@pytest.mark.parametrize("case", WIDE)
def test_parts_that_are_wide_alone_are_read_with_little_memory(case: str) -> None:
    tracemalloc.start()
    try:
        import_text(WIDE[case])
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def test_options_of_many_hosts_are_named_once() -> None:
    text = "Host " + " ".join(f"a{number}" for number in range(3000)) + "\n" + MANY[:20_000].replace("=", " b\n")
    tracemalloc.start()
    try:
        import_text(text)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def test_no_part_of_a_file_controls_a_terminal_or_begins_a_line() -> None:
    text = "export A=$(\n) B='\x1b[2J'\n/a/\x1b[31m/torchrun a.py \"$(x\nsecrets: [A]\n)\"\nx'\x9b'y\n"
    imported = import_text(text, name="a.sh")
    assert all(line.isprintable() for line in imported.left_out)
    assert "\nsecrets: [A]" not in str(imported)
    assert len(imported.left_out) > 3


@pytest.mark.parametrize("suffix", ["", ".json", ".yaml", ".toml", ".sh"])
def test_file_that_is_no_text_is_never_unpickled_and_never_read_whole(suffix: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "unpickled",)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (pickled := tmp_path / f"pickled{suffix}").write_bytes(pickle.dumps(Bomb(), protocol))
        for kind in ("", *IMPORTERS):
            with pytest.raises(SpecError, match=f"^{re.escape(str(pickled))}: "):
                import_file(pickled, kind=kind)
    assert not (tmp_path / "unpickled").exists()
    with (large := tmp_path / f"large{suffix}").open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(SpecError, match=f"^{re.escape(str(large))}: larger than 1 MB: shorten it$"):
        import_file(large)
    (binary := tmp_path / f"binary{suffix}").write_bytes(bytes(range(256)))
    with pytest.raises(SpecError, match=f"^{re.escape(str(binary))}: line 2: is not UTF-8"):
        import_file(binary)
    for path in (tmp_path, tmp_path / f"absent{suffix}"):
        with pytest.raises(SpecError, match=f"^{re.escape(str(path))} cannot be read: "):
            import_file(path)
