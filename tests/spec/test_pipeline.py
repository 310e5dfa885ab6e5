"""Specs of pipelines: errors name the field and a valid value, and a document contains the whole spec."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from detrain_nb.documents import format_document, parse_document
from detrain_nb.errors import FieldError, SpecError
from detrain_nb.spec import Node, PipelineSpec, Source, Training, read_nodes, worst
from detrain_nb.spec.schema import FILE, make_schema


def _spec(**fields: Any) -> PipelineSpec:
    return PipelineSpec(**{"name": "mnist", "source": {"script_text": "job_spec()"}, **fields})


def test_name_and_source_are_a_spec_for_this_machine() -> None:
    spec = _spec()
    assert spec.to_dict() == {"name": "mnist", "source": {"script_text": "job_spec()"}}
    assert spec.plan().world_size == 2
    assert spec.plan(gpus={"": 3}).device == "cuda"
    assert spec.check() == []


REFUSED = {
    "name": ({"name": "тренировка"}, "name 'тренировка': give a-z, A-Z, 0-9 and . _ -, at most 63, the first a letter"),
    "a number in a part": (
        {"training": {"epochs": 0}},
        "training.epochs 0: give a whole number, 1 to 1,000,000,000,000: passes",
    ),
    "too many steps": (
        {"training": {"steps": 10**13}},
        "training.steps 10000000000000: give a whole number, 1 to 1,000,",
    ),
    "a kind": ({"training": {"epochs": "2"}}, "training.epochs '2': give a whole number"),
    "a truth that is none": ({"training": {"dev": 1}}, "training.dev 1: give true or false"),
    "a seed of 33 bits": (
        {"training": {"seed": 1 << 32}},
        "training.seed 4294967296: give a whole number, 0 to 4294967295",
    ),
    "no number": ({"training": {"clip": float("nan")}}, "training.clip nan: give a number above 0"),
    "both of two": ({"training": {"epochs": 1, "steps": 2}}, "training: epochs 1 and steps 2 are both given: leave"),
    "too long a warm-up": ({"training": {"steps": 2, "warmup_steps": 3}}, "training: warmup_steps 3 is more than"),
    "an unknown field": ({"training": {"epoch": 1}}, "training.epoch is not a field: did you mean 'epochs'?"),
    "an unknown field at the top": ({"trainning": {}}, "trainning is not a field: did you mean 'training'?"),
    "a field far from any": ({"zzz": 1}, "zzz is not a field: choose from name, description, parallelism"),
    "nothing where a number goes": (
        {"training": {"learning_rate": None}},
        "training.learning_rate None: give a number",
    ),
    "a tuple by a comma": ({"training": ({"steps": 1},)}, "training ({'steps': 1},): give a table: epochs or steps, b"),
    "a name that is no text": ({"source": {("script",): 1}}, "source: the name ('script',) is not a text: put it in"),
    "one of a node": ({"nodes": [{"host": "a"}, {1: "b"}]}, "nodes[1]: the name 1 is not a text: put it in quotes"),
    "a path of Windows": (
        {"data": {"url": r"\\server\share"}},
        "data.url: is a Windows path but ranks run on Linux",
    ),
    "one of a disk": ({"checkpoint": {"url": "C:/kept"}}, "checkpoint.url: is a Windows path but ranks run"),
    "one of a schedule": (
        {"parallelism": {"schedule": r"\\s\x.csv"}},
        r"parallelism.schedule '\\\\s\\x.csv': is a Windows path",
    ),
    "one of a Python": (
        {"nodes": [{"host": "a", "python": "C:\\py"}]},
        "nodes[0].python 'C:\\\\py': is a Windows path",
    ),
    "no table": ({"training": 3}, "training 3: give a table"),
    "a field of a node": ({"nodes": [{"host": "a"}, {"host": "b", "port": 0}]}, "nodes[1].port 0: give a number"),
    "a node's unknown field": (
        {"nodes": [{"host": "a", "prt": 1}]},
        "nodes[0].prt is not a field: did you mean 'port'?",
    ),
    "twins": ({"nodes": [{"host": "a"}, {"host": "a", "port": 3}]}, "nodes: nodes 1 and 2 have the same name 'a'"),
    "a set of nodes": ({"nodes": {"a": 1}}, "nodes: give a list of nodes"),
    "two open axes": ({"parallelism": {"pp": -1}}, "parallelism: pp and dp_shard are both -1: only one axis"),
    "an axis of 0": ({"parallelism": {"tp": 0}}, "parallelism: tp is 0: give a number of ranks"),
    "what is not there yet": (
        {"parallelism": {"algorithm": "diloco"}},
        "parallelism: algorithm 'diloco' is not",
    ),
    "a schedule": ({"parallelism": {"schedule": "2F2B"}}, "parallelism.schedule '2F2B': give GPipe, 1F1B"),
    "no source": ({"source": {}}, "source: nothing to run is given: give exactly one of script, script_text"),
    "two sources": ({"source": {"script": "a.py", "module": "b"}}, "source: script and module are given: give exactly"),
    "a folder without entry": ({"source": {"path": "x"}}, "source.entry is missing: path is a folder"),
    "an entry beside a script": ({"source": {"script": "a.py", "entry": "b.py"}}, "source.entry 'b.py' does not apply"),
    "an entry outside": ({"source": {"path": "x", "entry": "../a.py"}}, "source.entry '../a.py': give the Python file"),
    "a script of another kind": ({"source": {"script": "a.sh"}}, "source.script 'a.sh': give the path of a Python"),
    "an argument": ({"source": {"script": "a.py", "arguments": ["a", 1]}}, "source.arguments[1]: give a list of texts"),
    "a NUL": ({"source": {"script": "a.py", "arguments": ["a\0"]}}, "source.arguments[0]: give a list of texts"),
    "artifacts outside": ({"artifacts": ["/etc/*"]}, "artifacts[0] '/etc/*': give a list of patterns"),
    "artifacts above": ({"artifacts": ["a/../../b"]}, "artifacts[0] 'a/../../b': give a list of patterns"),
    "a variable of torchrun": ({"env": {"MASTER_ADDR": "x"}}, "env.MASTER_ADDR: MASTER_ADDR is set on every rank"),
    "an option of torchrun": ({"env": {"PET_NO_PYTHON": "1"}}, "env.PET_NO_PYTHON: PET_NO_PYTHON is set on every"),
    "a password of data": ({"data": {"url": "s3://AKIA:S3CRET@bucket/d"}}, "data.url: contains a user or password"),
    "a token of a checkpoint": (
        {"checkpoint": {"url": "https://S3CRET@host/x"}},
        "checkpoint.url: contains a user or password",
    ),
    "a password of a folder": (
        {"source": {"path": "https://me:S3CRET@host/x", "entry": "a.py"}},
        "source.path: contains a user or password",
    ),
    "a token of ours": (
        {"source": {"git": {"url": "https://a.org/b", "token": "DETRAIN_NB_JOB_FOLDER"}, "entry": "a.py"}},
        "source.git.token: DETRAIN_NB_JOB_FOLDER is set on every rank",
    ),
    "a variable of ours": ({"secrets": ["DETRAIN_NB_JOB_KEY"]}, "secrets[0]: DETRAIN_NB_JOB_KEY is set on every rank"),
    "no variable": ({"env": {"A B": "x"}}, "env.A B: give a table of environment variables"),
    "a secret in env": ({"env": {"T": "x"}, "secrets": ["T"]}, "T is in both env and secrets: leave it out of env"),
    "a port": ({"rendezvous": {"port": 65536}}, "rendezvous.port 65536: give a number from 1 to 65535"),
    "an address of all": ({"rendezvous": {"endpoint": "0.0.0.0"}}, "rendezvous.endpoint '0.0.0.0': give the address"),
    "a range": ({"rendezvous": {"min_nodes": 3, "max_nodes": 2}}, "rendezvous: min_nodes 3 is more than max_nodes 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line_with_its_field(case: str) -> None:
    fields, start = REFUSED[case]
    with pytest.raises(FieldError) as caught:
        _spec(**fields)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(start)
    assert caught.value.__suppress_context__  # a traceback must not show pydantic's own error


def test_every_fault_has_its_line_and_its_field() -> None:
    with pytest.raises(FieldError) as caught:
        PipelineSpec(
            training={"epochs": 0, "lr": 1}, nodes=[{"host": "a b"}], source={"git": {"url": "-x", "how": "x"}}
        )
    assert [fault.path for fault in caught.value.faults] == [
        "name",
        "training.epochs",
        "training.lr",
        "nodes[0].host",
        "source.git.url",
        "source.git.how",
    ]
    assert len(str(caught.value).splitlines()) == 6


def test_document_of_another_kind_is_refused_in_few_lines() -> None:
    with pytest.raises(FieldError) as caught:
        PipelineSpec.from_dict({f"key{number}": 1 for number in range(50_000)})
    lines = str(caught.value).splitlines()
    assert len(lines) < 100 and lines[-1] == "and 49952 more"


def test_number_where_a_text_goes_is_told_of_by_its_place_and_not_shown() -> None:
    data = {"name": "x", "source": {"script": "a.py", "arguments": ["--sleep", 0.125]}, "env": {"A": 125, "B": True}}
    with pytest.raises(SpecError) as caught:
        PipelineSpec.from_dict(data)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["source.arguments[1]", "env.A", "env.B"]
    assert all(line.endswith("; put a number or true in quotes") and "125" not in line for line in lines)


def test_part_alone_says_its_faults_without_the_whole() -> None:
    with pytest.raises(FieldError, match=r"^epochs 0: give "):
        Training(epochs=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"source": {"git": {"url": "https://alice:s3cret@host/x"}, "entry": "a.py"}},
        {"source": {"git": {"url": "https://s3cret@host/x"}, "entry": "a.py"}},
        {"source": {"git": {"url": "https://host/x", "token": "s3cret-token"}, "entry": "a.py"}},
        {"source": {"script": "a.py", "arguments": ["--key=s3cret\0"]}},
        {"source": {"script": "a.py", "setup": "export A=s3cret\0"}},
        {"secrets": ["A=s3cret"]},
        {"env": {"A": "s3cret\0"}},
        {"data": {"url": "-s3://key:s3cret@bucket"}},
        {"source": {"path": "https://me:s3cret@host/x", "entry": "a.py"}},
        {"source": {"path": "-https://host/x?sig=s3cret", "entry": "a.py"}},
    ],
)
def test_no_error_repeats_a_secret(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as caught:
        _spec(**fields)
    assert "s3cret" not in str(caught.value)


def test_spec_is_frozen() -> None:
    spec = _spec(training={"epochs": 1})
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"
    with pytest.raises(SpecError, match="epochs cannot be set: a spec is frozen; get a changed copy"):
        spec.training.epochs = 2


# Plans


def test_mesh_that_does_not_fit_says_ranks_and_nodes() -> None:
    spec = _spec(parallelism={"pp": 2, "tp": 4}, nodes=[{"host": "a", "ranks": 2}, {"host": "b", "ranks": 2}])
    with pytest.raises(
        SpecError, match=r"^mesh pp=2 x tp=4 needs 8 ranks but nodes a, b offer 4: add nodes or lower tp"
    ):
        spec.plan()
    assert [(each.field, each.severity) for each in spec.check()] == [("parallelism", "error")]


def test_batch_that_does_not_divide_is_told_with_its_field() -> None:
    nodes = [{"host": "a", "ranks": 4}]
    (finding,) = _spec(training={"batch_size": 8}, parallelism={"microbatches": 3}, nodes=nodes).check()
    assert str(finding).startswith("training.batch_size: batch size 8 is not divisible by 4 replicas x 3 microbatches")
    assert worst([finding]) == "error"
    (finding,) = _spec(parallelism={"pp": 4, "microbatches": 3}, nodes=nodes).check()
    assert str(finding).startswith("parallelism.microbatches: 1F1B needs at least as many microbatches as stages")


def test_node_that_may_have_gpus_makes_a_misfit_a_warning() -> None:
    spec = _spec(parallelism={"tp": 8}, nodes=[{"host": "a"}, {"host": "b", "ranks": 4}])
    (finding,) = spec.check()
    assert finding.severity == "warning"
    assert str(finding).endswith("but nodes a, b offer 5: add nodes or lower tp; unless node a has GPUs")
    with pytest.raises(SpecError, match=r"add nodes or lower tp; unless node a has GPUs$"):
        spec.plan()
    with pytest.raises(SpecError, match=r"add nodes or lower tp$"):
        spec.plan(gpus={"a": 1})
    assert spec.plan(gpus={"a": 4, "b": 4}).world_size == 8
    assert _spec(parallelism={"tp": 8}).check()[0].severity == "warning"


def test_plan_has_gpus_that_the_spec_asks_for_or_that_were_found() -> None:
    spec = _spec(nodes=[Node(host="a", devices=[1, 3]), Node(host="b"), Node(host="c", devices="cpu", ranks=3)])
    plan = spec.plan()
    assert [(node.name, node.device, node.gpus, node.ranks) for node in plan.nodes] == [
        ("a", "cuda", (1, 3), (0, 1)),
        ("b", "cpu", None, (2,)),
        ("c", "cpu", None, (3, 4, 5)),
    ]
    assert spec.plan(gpus={"a": 4, "b": [0, 2]}).nodes[1].gpus == (0, 2)
    with pytest.raises(SpecError, match="node a has no GPU 3"):
        spec.plan(gpus={"a": 2})
    with pytest.raises(SpecError, match="gpus has 'd', which is not a node: choose from a, b, c"):
        spec.plan(gpus={"d": 2})


def test_script_reads_a_spec_without_open_numbers() -> None:
    spec = _spec(
        parallelism={"pp": 2},
        training={"batch_size": 64, "epochs": 2},
        nodes=[{"host": "a", "ranks": 2}, {"host": "b", "ranks": 2}],
        checkpoint={"url": "runs", "keep": "all"},
    )
    job = spec.job_spec(spec.plan())
    assert (job.world_size, job.parallelism.pp, job.parallelism.dp_shard) == (4, 2, 2)
    assert [(node.name, node.ranks) for node in job.nodes] == [("a", (0, 1)), ("b", (2, 3))]
    assert job.batch and job.batch.replica_size == 32 and job.batch.microbatches == job.parallelism.microbatches
    assert job.checkpoint and job.checkpoint.keep is None
    tried = spec.with_overrides({"training.dev": True}).job_spec(spec.plan())
    assert (tried.checkpoint, tried.training.epochs, tried.training.steps) == (None, None, 3)


def test_axes_stay_open_where_a_round_may_have_fewer_nodes() -> None:
    def spec(**rendezvous: int) -> PipelineSpec:
        nodes = [{"host": host, "ranks": 2} for host in "abcd"]
        return _spec(
            source={"script_text": "job = detrain_nb.job_spec()"},
            training={"batch_size": 16},
            nodes=nodes,
            rendezvous=rendezvous,
            checkpoint={"url": "/runs"},
        )

    varies, fixed = spec(min_nodes=1, max_restarts=2), spec(max_restarts=2)
    job, same = (each.job_spec(each.plan()) for each in (varies, fixed))
    assert (job.nodes_vary, job.parallelism.dp_shard, job.parallelism.microbatches) == (True, -1, None)
    assert (same.nodes_vary, same.parallelism.dp_shard, same.parallelism.microbatches) == (False, 8, 1)
    (finding,) = varies.check()
    assert (finding.field, finding.severity) == ("rendezvous.min_nodes", "warning")
    assert "with 3 of 4 nodes a script that reads its spec cannot continue: batch size 16" in str(finding)
    assert fixed.check() == [] == spec(min_nodes=4).check()


def test_largest_number_that_a_spec_takes_reaches_the_script() -> None:
    spec = _spec(training={"clip": sys.float_info.max})
    assert spec.job_spec(spec.plan()).training.clip == sys.float_info.max


def test_arguments_in_the_style_of_detrain_stand_behind_the_users() -> None:
    source = {"script": "main.py", "arguments": ["--samples", "10"], "argument_style": "detrain"}
    spec = _spec(
        source=source,
        training={"epochs": 3, "batch_size": 40, "learning_rate": 0.01},
        parallelism={"pp": 3},
        nodes=[{"host": "a", "devices": "cpu"}, {"host": "b", "devices": [0, 1]}],
    )
    assert spec.program_arguments(spec.plan()) == (
        "--samples",
        "10",
        "--gpu=0_1_1",
        "--epochs=3",
        "--batch_size=40",
        "--lr=0.01",
        "--model_name=mnist",
        "--split_size=5",
    )
    with pytest.raises(SpecError, match=r"^training\.steps 5: the arguments of DeTrain have only epochs"):
        spec.with_overrides({"training.steps": 5})


# Findings


def _notebook(*cells: tuple[str, list[str]]) -> str:
    written = [{"cell_type": "code", "source": text, "metadata": {"tags": tags}} for text, tags in cells]
    return json.dumps({"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


FOUND = {
    "no script": ({"script": "gone.py"}, "source.script: ", "gone.py: no such file, looked for in "),
    "a name that is too long": ({"script": f"{'x' * 300}.py"}, "source.script: ", "xxx.py: cannot be read: "),
    "a folder of that": ({"path": "x" * 300, "entry": "a.py"}, "source.path: ", "xxx: no such folder"),
    "nobody's home": ({"script": "~nobody-here/a.py"}, "source.script: ", "~nobody-here/a.py: no such file"),
    "no Python": ({"script": "bad.py"}, "source.script: ", "bad.py, line 2: is not Python: "),
    "a text": ({"script_text": "a b"}, "source.script_text: ", "the text, line 1: is not Python"),
    "a folder": ({"script": "folder.py"}, "source.script: ", "folder.py: is not a file"),
    "Latin": ({"script": "latin.py"}, "source.script: ", "latin.py, line 1: is not UTF-8"),
    "no folder": ({"path": "gone", "entry": "a.py"}, "source.path: ", "gone: no such folder"),
    "no entry": ({"path": ".", "entry": "gone.py"}, "source.path: ", "gone.py: no such file"),
    "no notebook": ({"notebook": "bad.ipynb"}, "source.notebook: ", "bad.ipynb: is not a notebook: save it"),
    "no tag": ({"notebook": "plain.ipynb"}, "source.notebook: ", "plain.ipynb: no code cell has the tag 'job'"),
    "a magic": (
        {"notebook": "magic.ipynb"},
        "source.notebook: ",
        "magic.ipynb, cell 2, line 1: is not Python: a script cannot have magics",
    ),
    "a shell line": (
        {"notebook": "shell.ipynb"},
        "source.notebook: ",
        "shell.ipynb, cell 1, line 1: is not Python: a script cannot have magics",
    ),
    "a late future": (
        {"notebook": "late.ipynb"},
        "source.notebook: ",
        "late.ipynb, its cells together, line 6: is not Python: from __future__ imports must ",
    ),
    "await": ({"script_text": "await a"}, "source.script_text: ", "is not Python: 'await' outside function"),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_wrong_with_a_source_is_found_without_a_node(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("a = 1\nb = (\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "bad.ipynb").write_text("[" * 100_000)
    (tmp_path / "plain.ipynb").write_text(_notebook(("a = 1", [])))
    (tmp_path / "magic.ipynb").write_text(_notebook(("a = 1", ["job"]), ("%matplotlib inline", ["job"])))
    (tmp_path / "shell.ipynb").write_text(_notebook(("files = !ls", ["job"])))
    late = "from __future__ import annotations"
    (tmp_path / "late.ipynb").write_text(_notebook(("a = 1", ["job"]), (late, ["job"])))
    source, field, text = FOUND[case]
    (finding,) = _spec(source=source).check()
    assert str(finding).startswith(field) and text in str(finding)
    assert worst([finding]) == "error"


@pytest.mark.timeout(20)
def test_script_that_is_a_link_to_a_file_without_an_end_holds_up_no_form(tmp_path: Path) -> None:
    endless = Path("/proc/kmsg")  # a repository can contain a link to it
    try:
        endless.open("rb").close()
    except OSError:
        pytest.skip("only who may read the log of the kernel has such a file")
    (tmp_path / "train.py").symlink_to(endless)
    (tmp_path / "nodes.toml").symlink_to(endless)
    spec = PipelineSpec.from_dict({"name": "x", "source": {"script": str(tmp_path / "train.py")}})
    assert {each.field for each in spec.check()} <= {"source.script", "source"}
    for _ in range(2):  # the first call may read kernel messages, the second none
        with pytest.raises(SpecError, match="nodes"):
            read_nodes(tmp_path / "nodes.toml")


def test_warnings_do_not_stop_a_job() -> None:
    spec = _spec(image="ghcr.io/a/b:1", rendezvous={"max_restarts": 1})
    assert [each.field for each in spec.check()] == ["checkpoint", "image"]
    assert worst(spec.check()) == "warning"


def test_node_that_all_others_wait_for_is_told_of() -> None:
    nodes = [{"host": "a", "relative_speed": 1.0}, {"host": "b", "relative_speed": 0.49}, {"host": "c"}]
    (finding,) = _spec(nodes=nodes).check()
    assert (finding.field, finding.severity) == ("nodes.b.relative_speed", "warning")
    assert finding.text.startswith("0.49, the fastest has 1, and every step waits for the slowest rank")
    assert _spec(nodes=[{**node, "relative_speed": 0.5} for node in nodes[1:]]).check() == []
    assert _spec(nodes=[nodes[0], {"host": "b", "relative_speed": 0.5}]).check() == []


NOT_READ = {
    "a text": {"script_text": "import torch"},
    "a file": {"script": "train.py"},
    "a notebook": {"notebook": "train.ipynb"},
}


@pytest.mark.parametrize("case", NOT_READ)
def test_fields_that_the_script_does_not_read_are_told(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "train.ipynb").write_text(_notebook(("import torch", ["job"])))
    fields = {"training": {"epochs": 3, "dev": True}, "checkpoint": {"url": "c"}, "data": {"url": "d", "chunks": ["a"]}}
    (finding,) = _spec(source=NOT_READ[case], **fields).check()
    named = "training.epochs, training.dev, data.url, data.chunks, checkpoint.url"
    assert str(finding).startswith(
        f"warning: source: the script does not call job_spec(), which it needs to read {named}"
    )
    assert _spec(source=NOT_READ[case]).check() == []


def test_script_that_may_read_its_fields_is_not_complained_of(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import beside")
    for source in (
        {"script_text": "from detrain_nb import job_spec"},
        {"script_text": "os.environ['DETRAIN_NB_JOB_SPEC']"},
        {"script_text": "1", "argument_style": "detrain"},
        {"path": str(tmp_path), "entry": "a.py"},
        {"module": "package.train"},
    ):
        assert _spec(source=source, training={"epochs": 3}).check() == []


def test_what_may_be_a_signature_is_told_of() -> None:
    fields = {"data": {"url": "https://host/d?sig=1"}, "checkpoint": {"url": "s3://bucket/c"}}
    fields["model"] = {"url": "abfs://container@account.dfs.core.windows.net/model"}  # its user is no password
    (finding,) = _spec(**fields).check()
    assert str(finding) == (
        "warning: data.url: the part after ? is stored with the job and sent to all nodes: leave keys and "
        "signatures out"
    )


@pytest.mark.parametrize("url", ["http://git.example/x", "git@git.example:x", "ssh://git.example/x"])
def test_token_is_for_urls_that_hide_it(url: str) -> None:
    (finding,) = _spec(source={"git": {"url": url, "token": "TOKEN"}, "entry": "a.py"}).check()
    assert str(finding).startswith("source.git.token: a token is sent over https only")
    assert _spec(source={"git": {"url": url}, "entry": "a.py"}).check() == []


def test_more_nodes_than_the_spec_has_are_an_error() -> None:
    (finding, _) = _spec(rendezvous={"max_nodes": 2}, nodes=[{"host": "a"}]).check()
    assert str(finding) == "rendezvous.max_nodes: 2, but the spec has 1 node: add nodes or lower it"


# Overrides


def test_words_of_a_command_line_win_over_the_spec() -> None:
    spec = _spec(training={"epochs": 3}, nodes=[{"host": "x"}])
    words = "--training.steps 5 --training.dev --nodes gpu1,bob@gpu2:2222 --parallelism.tp=2 --data.chunks a,b"
    more = ["--data.url", "s3://b/x", "--source.arguments=--a 'b c'", "--env.A", "1", "--checkpoint.url=c"]
    changed = spec.with_overrides(PipelineSpec.parse_overrides([*words.split(), *more, "--checkpoint.keep", "all"]))
    assert changed.to_dict() == {
        "name": "mnist",
        "training": {"steps": 5, "dev": True},
        "parallelism": {"tp": 2},
        "nodes": [{"host": "gpu1"}, {"host": "gpu2", "user": "bob", "port": 2222}],
        "source": {"script_text": "job_spec()", "arguments": ["--a", "b c"]},
        "data": {"url": "s3://b/x", "chunks": ["a", "b"]},
        "checkpoint": {"url": "c", "keep": "all"},
        "env": {"A": "1"},
    }
    assert spec.training.epochs == 3  # the original is frozen
    assert spec.with_overrides({"source.module": "a.b"}).source == Source(module="a.b")
    assert spec.with_overrides({}) is spec


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--training.epoch 2", "'--training.epoch' is not a field: did you mean '--training.epochs'?"),
        ("--trainin.epochs 2", "'--trainin.epochs' is not a field: did you mean '--training'?"),
        ("--training.epochs x", "--training.epochs 'x': give a whole number"),
        ("--training.epochs 1e3", "--training.epochs '1e3': give a whole number"),
        ("--training.clip inf", "--training.clip 'inf': give a number"),
        ("--training.epochs", "--training.epochs: no value, give a whole number or none"),
        ("--training 3", "training 3: give a table"),
        ("--training.epochs.x 3", "'--training.epochs.x' is not a field: training.epochs has no fields"),
        ("--nodes a,a", "--nodes: nodes 'a,a': nodes 1 and 2 have the same name"),
        ("training.epochs 2", "'training.epochs' is not an override: write --training.epochs"),
        ("spec.toml", "'spec.toml' is not an override: give --field value"),
        ("--training.epochs 0", "training.epochs 0: give a whole number, 1 to 1,000,000,000,000"),
    ],
)
def test_word_that_cannot_be_is_refused_with_what_to_write(words: str, complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        _spec().with_overrides(PipelineSpec.parse_overrides(words.split()))
    assert str(caught.value).startswith(complaint)


# Documents


@pytest.mark.parametrize("suffix", ["json", "toml", "yaml"])
def test_saved_spec_is_loaded_as_it_was(suffix: str, tmp_path: Path) -> None:
    spec = _spec(description="two\nlines", nodes=[Node(host="::1", memory_gb=8, relative_speed=0.5), Node(host="b")])
    path = tmp_path / f"spec.{suffix}"
    spec.save(path)
    assert PipelineSpec.load(path) == PipelineSpec.load(f"file://{path}") == spec


def test_file_says_where_its_faults_are(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("name: x\nsource: {script: a.py}\ntraining: {epoch: 2, epochs: true}\n")
    with pytest.raises(FieldError) as caught:
        PipelineSpec.load(path)
    assert str(caught.value).splitlines() == [
        f"{path}: training.epochs True: give a whole number, 1 to 1,000,000,000,000: passes over the data",
        f"{path}: training.epoch is not a field: did you mean 'epochs'?",
    ]
    path.write_text("name: x\nsource: [\n")
    with pytest.raises(SpecError, match=r"spec\.yaml.*line 3"):
        PipelineSpec.load(path)


EMPTY = """
name: mnist
source:
  script_text: job_spec()
  arguments:
  # - --fast
training:
  # epochs: 2
nodes:
env:
"""


def test_section_with_nothing_below_it_is_as_if_it_were_not_there() -> None:
    assert PipelineSpec.from_dict(parse_document(EMPTY, ".yaml")) == _spec()


SCHEMA = Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
WORD = LINE.filter(lambda text: bool(text.strip()) and not text.startswith("-"))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
COUNT = st.integers(1, 10**9)
ABOVE_0 = st.floats(min_value=1e-12, max_value=1e12)
SIZE = st.integers(1, 4)
VARIABLE = st.from_regex(r"X[A-Za-z0-9_]{0,8}", fullmatch=True)
PLACE = st.fixed_dictionaries({"url": WORD}, optional={"format": WORD, "chunks": st.lists(WORD, unique=True)})
SOURCES = st.one_of(
    st.fixed_dictionaries({"script_text": TEXT.map(lambda text: f"# {text}")}),
    st.fixed_dictionaries({"script": WORD.map(lambda text: f"{text}.py")}),
    st.fixed_dictionaries(
        {"git": st.fixed_dictionaries({"url": st.just("git@host:a/b")}, optional={"how": st.just("bundle")})}
    ).map(lambda fields: {**fields, "entry": "train.py"}),
)
SPECS = st.fixed_dictionaries(
    {"name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True), "source": SOURCES},
    optional={
        "description": LINE,
        "parallelism": st.fixed_dictionaries({}, optional={"pp": SIZE, "tp": SIZE, "compile": st.booleans()}),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "epochs": COUNT,
                "learning_rate": ABOVE_0,
                "seed": st.integers(0, (1 << 32) - 1),
                "scheduler": st.sampled_from(["cosine", "wsd"]),
                "dev": st.booleans(),
            },
        ),
        "nodes": st.lists(st.sampled_from(["a", "b", "c"]).map(lambda host: {"host": host}), unique_by=str),
        "data": PLACE,
        "model": PLACE,
        "checkpoint": st.fixed_dictionaries({"url": WORD}, optional={"keep": COUNT | st.just("all")}),
        "env": st.dictionaries(VARIABLE, TEXT, max_size=3),
        "secrets": st.lists(VARIABLE.map(lambda name: f"S{name}"), unique=True, max_size=3),
        "rendezvous": st.fixed_dictionaries({}, optional={"timeout_s": st.floats(1, 86400), "port": SIZE}),
    },
)


@given(SPECS, st.sampled_from([".json", ".toml", ".yaml"]))
def test_every_format_holds_every_spec(data: dict[str, Any], suffix: str) -> None:
    spec = PipelineSpec.from_dict(data)
    assert PipelineSpec.from_dict(parse_document(format_document(spec.to_dict(), suffix), suffix)) == spec
    assert PipelineSpec.from_dict(parse_document(str(spec), ".yaml")) == spec
    SCHEMA.validate(data)  # editors must not mark a valid document


def test_schema_takes_what_the_models_take_and_no_unknown_field() -> None:
    nodes = [{"host": "a", "devices": [0, 1], "setup": "module load cuda"}, {"host": "b", "setup": ["a", "b"]}]
    SCHEMA.validate(_spec(nodes=nodes).to_dict() | {"nodes": nodes})
    assert not SCHEMA.is_valid({**_spec().to_dict(), "trainning": {}})
    assert not SCHEMA.is_valid({"name": "x"})


def _node(**fields: Any) -> dict[str, Any]:
    return {"nodes": [{"host": "a", **fields}]}


MARKED: list[dict[str, Any]] = [
    {"name": "a b"},
    {"description": "x" * 4001},
    *({"parallelism": {"pp": size}} for size in (0, -2)),
    {"parallelism": {"schedule": "foo"}},
    {"parallelism": {"algorithm": "diloco"}},
    *({"training": {name: "a\nb"}} for name in ("optimizer", "loss")),
    *(_node(devices=devices) for devices in ([], [0, 0], [-1], "0")),
    *(_node(host=host) for host in ("u@a", "-a", "")),
    *(_node(name=name) for name in ("0-3", "ALL", "a/b")),
    *(_node(**{name: "-x y\n"}) for name in ("user", "address", "python", "workdir", "identity_file")),
    *(_node(env=names) for names in (["A-B"], ["A", "A"])),
    *({"env": {name: "1"}} for name in ("A-B", "RANK", "DETRAIN_NB_JOB_KEY")),
    *({"secrets": names} for names in (["A-B"], ["MASTER_PORT"], ["A", "A"])),
    *({"artifacts": texts} for texts in (["../x"], ["a/.."], ["/x"], ["~/x"], ["a\\b"], [" "], ["a", "a"])),
    *({"data": {"url": "x", **fields}} for fields in ({"url": "-x"}, {"format": " "}, {"chunks": [""]})),
    {"image": "a b"},
    {"rendezvous": {"id": "a b"}},
]


@pytest.mark.parametrize("fields", MARKED, ids=str)
def test_schema_marks_what_the_models_refuse(fields: dict[str, Any]) -> None:
    assert not SCHEMA.is_valid({**_spec().to_dict(), **fields})
    with pytest.raises(FieldError):
        _spec(**fields)


TAKEN: list[dict[str, Any]] = [
    *({"parallelism": {"schedule": name}} for name in ("gpipe", "zbvzerobubble", "a b/x.csv")),
    *({"parallelism": {"dp_shard": size}} for size in (-1, 1 << 16)),
    *(_node(host=host) for host in ("fe80::1%eth0", "10.0.0.1", "a_.b-c")),
    *(_node(name=name) for name in ("all1", "0a")),
    _node(devices=[1, 0], user="a@b", workdir="~/a b", python="python3.12"),
    {"env": {"RANKS": "", "_a": "\n"}, "secrets": ["A"], "artifacts": ["a..b/*.pt", "..."]},
    {"training": {"optimizer": "é.Adam", "loss": " "}, "data": {"url": "c:x\\y", "chunks": ["-"]}},
    {"training": None, "nodes": None, "parallelism": None, "env": None, "artifacts": None},
]


@pytest.mark.parametrize("fields", TAKEN, ids=str)
def test_schema_does_not_mark_what_the_models_take(fields: dict[str, Any]) -> None:
    SCHEMA.validate({**_spec().to_dict(), **fields})
    PipelineSpec.from_dict({**_spec().to_dict(), **fields})


def test_spec_prints_as_a_document_that_a_notebook_shows_as_text() -> None:
    spec = _spec(description="<b>")
    assert str(spec) == 'name: mnist\ndescription: "<b>"\nsource:\n  script_text: job_spec()\n'
    assert "&lt;b&gt;" in spec._repr_html_()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | LINE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LINE, inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*PipelineSpec.model_fields, "x"])


@given(st.dictionaries(FIELDS, JSON | st.dictionaries(st.sampled_from(["git", "url", "epochs", "x"]), JSON)))
def test_whatever_a_document_holds_is_a_spec_or_faults_with_fields(data: dict[str, Any]) -> None:
    try:
        PipelineSpec.from_dict(data)
    except FieldError as exc:
        assert exc.faults and all(str(fault).isprintable() for fault in exc.faults)


def test_schema_is_that_of_the_models() -> None:
    assert FILE.read_text(encoding="utf-8") == make_schema(), "run python -m detrain_nb.spec.schema"


def test_document_may_name_its_schema() -> None:
    spec = _spec()
    assert PipelineSpec.from_dict({"$schema": "x.json", **spec.to_dict()}) == spec
    assert json.loads(make_schema())["properties"]["$schema"]["type"] == "string"
