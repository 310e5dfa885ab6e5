"""Imports of torchrun and accelerate commands, and of scripts with one: nothing is run, guessed or lost."""

from __future__ import annotations

import posixpath
import re
import shlex
import subprocess
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from detrain_nb.errors import SpecError
from detrain_nb.formats import export_spec, import_command, import_text
from detrain_nb.formats.command_import import read_command
from detrain_nb.formats.launch_options import ACCELERATE, TORCHRUN
from detrain_nb.formats.shell_words import split_script
from detrain_nb.spec import PipelineSpec

from .drawn_specs import NAMES, TEXTS, VARIABLES, Draw, draw_job, draw_node
from .drawn_specs import SOURCES as DRAWN_SOURCES
from .round_trips import come_back

HOSTS = st.lists(st.from_regex(r"h[a-z]{1,6}", fullmatch=True), min_size=1, max_size=3, unique=True)
SOURCES = DRAWN_SOURCES | st.just(
    {"git": {"url": "me@example.org:a.git", "ssh_key": "~/a b", "ref": "v1"}, "entry": "e/train.py"}
)


def _fields(text: str, name: str = "start.sh") -> tuple[dict[str, Any], tuple[str, ...]]:
    imported = import_text(text, name=name)
    assert imported.kind == "command" and imported.spec
    return imported.spec.to_dict(), imported.left_out


def _draw_range(draw: Draw, nodes: int) -> dict[str, Any]:
    """Draw min_nodes and max_nodes, each optional; max_nodes differs from the number of nodes."""
    fewest = draw(st.integers(1, nodes))
    most = draw(st.integers(fewest, nodes + 2).filter(lambda count: count != nodes)) if fewest < nodes else None
    return draw(
        st.sampled_from([{}, {"min_nodes": fewest}, {"max_nodes": most}, {"min_nodes": fewest, "max_nodes": most}])
    )


@pytest.mark.parametrize("to", ["torchrun", "slurm", "runai"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_script_that_was_exported_comes_back_whole(to: str, data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    ranks, hosts = draw(st.integers(1, 4)), draw(HOSTS)
    source = draw(SOURCES.filter(lambda each: to != "runai" or "ssh_key" not in str(each)))  # containers have no key
    cpu = {"devices": "cpu", "ranks": ranks}
    gpus = {"devices": list(range(ranks))}
    has = draw(st.sampled_from([{"ranks": ranks}, cpu, *([gpus] if to == "torchrun" else [])]))
    alike = draw_node(draw)
    nodes = [{"host": host, **has, **(draw_node(draw) if to == "torchrun" else alike)} for host in hosts]
    spec = PipelineSpec.from_dict(
        {
            **draw_job(draw, ranks=ranks * len(nodes)),
            "name": draw(NAMES) if to != "runai" else draw(st.from_regex(r"[a-z]{1,10}", fullmatch=True)),
            "image": "a/b:1" if to == "runai" else None,
            "source": {**source, "arguments": draw(st.lists(TEXTS, max_size=3)), "setup": ["module load 'x y'"]},
            "nodes": nodes,
            "env": draw(st.dictionaries(VARIABLES, TEXTS, max_size=2)),
            "secrets": draw(st.lists(st.sampled_from(["HF_TOKEN", "GIT_TOKEN", "B"]), unique=True)),
            "rendezvous": {
                "id": draw(st.none() | NAMES | st.just("12")),
                "endpoint": draw(st.sampled_from([None, "10.0.0.9", "fe80::1"])) if to != "runai" else None,
                "port": draw(st.sampled_from([0, 1234])) if to != "runai" else 0,
                "timeout_s": 77,
                "max_restarts": draw(st.integers(0, 2)),
                **(_draw_range(draw, len(nodes)) if to == "torchrun" else {}),
            },
        }
    )
    held = [
        *("job", "image", "env", "needed", "nodes.host", "nodes.devices", "nodes.ranks"),
        *("source.script_text", "source.module", "source.git", "source.path", "source.entry", "source.arguments"),
        *("setup", "nodes.python", "nodes.workdir", "rendezvous.timeout_s", "rendezvous.max_restarts"),
        *(["first", "rendezvous.max_nodes"] if to == "torchrun" else []),
        *(["rendezvous.endpoint", "rendezvous.port"] if to == "slurm" else []),
    ]
    imported = come_back(spec, to, held=held)
    again = imported.spec
    assert again and (again.rendezvous.id or again.name) == (spec.rendezvous.id or spec.name)
    assert again.rendezvous.fewest(len(nodes)) == spec.rendezvous.fewest(len(nodes))
    assert [line.partition(":")[0] for line in imported.left_out] == (["runai"] if to == "runai" else [])


@pytest.mark.parametrize("begin", ["torchrun", "python3 -u -m torch.distributed.run", "srun -N2 \\\n  /opt/x/torchrun"])
def test_options_of_torchrun_are_read_in_every_spelling(begin: str) -> None:
    fields, left_out = _fields(
        f"A='b c' PET_MAX_RESTARTS=1 {begin} --nnodes=2:4 --nproc_per_node 2 --rdzv-id=job-7 --rdzv_backend c10d \\\n"
        "  --rdzv_end=10.0.0.1:29400 --rdzv-conf=join_timeout=60,x=1 --role r --max_restarts=3 -r 1 -t3 \\\n"
        "  'my train.py' --lr 3 -- '$$x' >log 2>&1 & # in the background\n"
    )
    assert fields == {
        "name": "job-7",
        "nodes": [{"host": host, "ranks": 2} for host in ("10.0.0.1", "node-1", "node-2", "node-3")],
        "source": {"script": "my train.py", "arguments": ["--lr", "3", "--", "$x"]},
        "env": {"A": "b c"},
        "rendezvous": {"port": 29400, "min_nodes": 2, "max_restarts": 3, "timeout_s": 60.0},
    }
    named = " ".join(left_out)
    assert all(f"{each}: " in named for each in ("--rdzv-conf x", "--role", "--redirects", "--tee", "log"))
    assert "no host name for node-1 to node-3" in named
    assert ("srun: " in named) == ("/opt/x/torchrun: " in named) == begin.startswith("srun")


def test_options_are_those_of_torchrun_itself() -> None:
    parser = get_args_parser()
    flags = {each for action in parser._actions if action.nargs == 0 for each in action.option_strings}
    valued = {each for action in parser._actions if action.nargs is None for each in action.option_strings}
    assert {f"--{name}" for name in TORCHRUN.flags} - {"--use-env"} == _long(flags) - {"--help"}
    assert {f"--{name}" for name in TORCHRUN.valued or ()} == _long(valued)
    assert {f"-{letter}" for letter in TORCHRUN.letters} == {each for each in flags | valued if each[1] != "-"} - {"-h"}


def test_flags_are_those_of_accelerate_itself() -> None:
    actions = launch_command_parser()._actions
    flags = {each for action in actions if action.nargs == 0 for each in action.option_strings}
    assert _long(flags) - {"--help"} <= {f"--{name}" for name in ACCELERATE.flags}
    valued = {each for action in actions if action.nargs is None for each in action.option_strings}
    assert not _long(valued) & {f"--{name}" for name in ACCELERATE.flags}


def _long(options: set[str]) -> set[str]:
    return {each.replace("_", "-") for each in options if each.startswith("--")}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_command_line_is_read_as_torchrun_reads_it(data: st.DataObject) -> None:
    values = {"nnodes": "1:3", "nproc-per-node": "2", "max-restarts": "1", "master-port": "7", "role": "-m", "tee": "3"}
    words = []
    for name in data.draw(st.lists(st.sampled_from([*values]), max_size=5)):
        spelling = "--" + data.draw(st.sampled_from([name, name.replace("-", "_"), name[: max(3, len(name) - 2)]]))
        is_joined = name == "role" or data.draw(st.booleans())
        words += [f"{spelling}={values[name]}"] if is_joined else [spelling, values[name]]
    is_module = data.draw(st.booleans())
    words += ["-m"] if is_module else []
    has_end = data.draw(st.booleans())
    words += [*(["--"] if has_end else []), "a.b" if is_module else "a.py"]
    arguments = data.draw(st.lists(st.sampled_from(["--", "-m", "x", "--nnodes", "", "$$"])))
    words += [each for each in arguments if each != "--" or not has_end]  # torchrun accepts no second one
    read = get_args_parser().parse_args(words)
    launch = read_command(["torchrun", *words])
    source = launch.fields["source"]
    assert (source.get("module"), source.get("script")) == ((read.training_script, None)[:: 1 if is_module else -1])
    # torchrun replaces $$ by $ when it starts the ranks
    assert source.get("arguments", []) == [each.replace("$$", "$") for each in read.training_script_args]
    assert ":".join(map(str, dict.fromkeys(launch.nodes))) == read.nnodes.replace("1:1", "1")
    assert launch.node["ranks"] == int(read.nproc_per_node)
    rendezvous = launch.fields.get("rendezvous", {})
    assert rendezvous.get("max_restarts", 0) == read.max_restarts and rendezvous.get("port") == read.master_port


def test_what_the_shell_would_fill_in_is_kept_and_named() -> None:
    fields, left_out = _fields(
        'export LR=1 HF_TOKEN=abc OTHER_KEY=$K LR=2\nN=4\nN=8\necho "$(rm -rf x)" `id`\n'
        'torchrun --nnodes=$N --nproc-per-node=gpu --master-addr "$HEAD" train.py --lr "$LR" --out $OUT/x\n'
    )
    assert fields == {
        "name": "train",
        "source": {"script": "train.py", "arguments": ["--lr", "$LR", "--out", "$OUT/x"]},
        "env": {"LR": "2"},
        "secrets": ["HF_TOKEN", "OTHER_KEY"],
    }
    begins = ("N: ", "$LR: ", "$OUT: ", "--nnodes: ", "--master-addr: ", "HF_TOKEN: ", "echo (line 4): ")
    assert sorted(each for each in begins if any(line.startswith(each) for line in left_out)) == sorted(begins)
    assert "abc" not in str(import_text("HF_TOKEN=abc torchrun a.py"))
    assert _fields("MASTER_PORT=1 torchrun a.py")[1] == ("MASTER_PORT: is set on every rank by torchrun or detrain_nb",)


def test_what_is_true_of_the_first_machine_alone_is_named() -> None:
    text = "unset OMP_NUM_THREADS\n$HOME/env/bin/python -m torch.distributed.run --rdzv-endpoint 10.0.0.9:1234 a.py\n"
    fields, left_out = _fields(text)
    assert fields["nodes"] == [{"host": "localhost", "ranks": 1}] and fields["rendezvous"] == {"port": 1234}
    named = [line.partition(":")[0] for line in left_out]
    assert named == ["10.0.0.9", "$HOME/env/bin/python", "unset (line 1)"]


def test_variables_with_one_plain_value_and_numbers_of_sbatch_are_filled_in() -> None:
    batch = "#SBATCH -N 2 --time=1:00\n#SBATCH --gres=gpu:a100:8 # all\nNODES=$SLURM_NNODES\n"
    fields, left_out = _fields(
        f'{batch}export D=/data\ncd "$D" && torchrun --nnodes $NODES --nproc-per-node "${{SLURM_GPUS_ON_NODE}}"'
        " a.py $D/x"
    )
    assert fields["nodes"] == [{"host": "node-0", "ranks": 8}, {"host": "node-1", "ranks": 8}]
    assert fields["source"] == {"path": "/data", "entry": "a.py", "arguments": ["/data/x"]}
    assert [line.partition(":")[0] for line in left_out] == ["#SBATCH --time", "nodes"]


@pytest.mark.parametrize(
    "before",
    [
        *("N=1\nN=4", "x && N=4", "N=4 | x", "(N=4)", "if x\nthen\nN=4\nfi", "if x; then N=4; fi", "f() {\nN=4\n}"),
        *("for N in 1; do x; done; N=4", "N=4\nN+=1", "N=4; read N", "N=4; ((N++))", "N=4; : ${N:=5}", "N=$(x)"),
        *("N=4\nunset N", "case x in\na) N=4 ;;\nesac", "#SBATCH -N 4\nN=$SLURM_NNODES\n#SBATCH -N 5", "N='4 x'"),
    ],
)
def test_variable_that_may_have_another_value_is_named(before: str) -> None:
    fields, left_out = _fields(f"{before}\ntorchrun a.py $N")
    assert fields["source"]["arguments"] == ["$N"]
    assert {line.partition(": ")[0] for line in left_out} >= {"$N"}


def test_secrets_and_what_another_shell_has_are_not_filled_in() -> None:
    fields, left_out = _fields(
        "A_TOKEN=abc\nH=abc\nT_KEY+=abc\ntorchrun a.py $A_TOKEN --api-key $H --api-key=$H '$H'$H \"\\$H\""
    )
    assert "abc" not in str(fields) + str(left_out)
    shell = "bash -c 'torchrun a.py $N'"
    for before, found in {"N=2\n": "$N", "export N=2\n": "2", "export N=2\nN=3 ": "$N"}.items():
        assert _fields(before + shell)[0]["source"]["arguments"] == [found]
    assert _fields('bash -c "N=4; torchrun a.py $N"')[0]["source"]["arguments"] == ["$N"]
    assert _fields("bash -c 'N=4; torchrun a.py $N'")[0]["source"]["arguments"] == ["4"]


def test_what_the_shell_expands_is_named_and_a_home_in_the_set_up_stays_one() -> None:
    fields, left_out = _fields(
        "export PATH=~/x:$PATH Q='~' R=$HERE:~ KEY=~\nA=1\nexport A B+=2\ncd ~/p\nsource ~/v/bin/activate\n"
        "torchrun a.py ~/d c*.json {0..7} {x,y} a~ {z} '~/d' \"*\" >log 2>&1\n"
    )
    assert fields["source"] == {
        "path": "~/p",
        "entry": "a.py",
        "setup": ["export PATH=~/x:$PATH", "source ~/v/bin/activate"],
        "arguments": ["~/d", "c*.json", "{0..7}", "{x,y}", "a~", "{z}", "~/d", "*"],
    }
    assert fields["env"] == {"Q": "~", "R": "$HERE:~", "A": "1"} and fields["secrets"] == ["KEY"]
    assert [line.partition(": the shell")[0] for line in left_out if ": the shell" in line] == [
        *("~/d", "c*.json", "{0..7}", "{x,y}", "R: $HERE")
    ]
    assert [line.partition(":")[0] for line in left_out if ": the shell" not in line] == ["B", "log"]


def test_options_in_a_variable_are_named_and_the_program_is_found() -> None:
    fields, left_out = _fields(
        "RUN_ARGS=(\n  --nnodes 2  # it's two\n)\nMORE=()\nMORE+=(--x)\n"
        'torchrun ${RUN_ARGS[@]} --tee 3 pretrain.py "${MORE[@]}"\n'
    )
    assert fields == {"name": "pretrain", "source": {"script": "pretrain.py", "arguments": ["${MORE[@]}"]}}
    assert [line.partition(":")[0] for line in left_out] == [
        "RUN_ARGS",
        "MORE",
        "${MORE[@]}",
        "${RUN_ARGS[@]}",
        "--tee",
    ]
    with pytest.raises(SpecError, match=r"line 1: '\$RUN': the shell expands it: give a file that ends"):
        _fields("torchrun $RUN a.py")
    fields, left_out = _fields("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes $N a.py")
    assert fields["nodes"] == [{"host": "localhost", "devices": [0, 1]}] and "--num-processes: " in left_out[0]
    assert _fields("set -euo pipefail\nset -x A 1\ndocker run -it i torchrun a.py")[1] == (
        "docker: the part before torchrun is not imported, nor its image i",
        "set (line 2): a shell command: put it into source.setup if needed",
    )
    with pytest.raises(SpecError, match="no command starts torchrun or accelerate directly: write that command out"):
        _fields("# torchrun a.py\nssh h 'torchrun a.py'")
    fields, left_out = _fields("accelerate launch --num_machines $N --num_processes 16 a.py")
    assert "nodes" not in fields and len(left_out) == 2
    assert _fields("export A=1 B=2; A=3; unset B; torchrun a.py")[0]["env"] == {"A": "3"}
    secrets = ["HF_TOKEN=abc", "PGPASSWORD=abc", "DB_PASS=abc", "AWS_CREDENTIALS=abc", "D=postgres://me:abc@h/d"]
    shown = str(
        import_text("\n".join(f"export {each}" for each in secrets) + "\nTOKENIZERS_PARALLELISM=no torchrun a.py")
    )
    assert "abc" not in shown and 'TOKENIZERS_PARALLELISM: "no"' in shown


def test_what_looks_like_a_secret_and_is_kept_is_named_without_its_value() -> None:
    token = f"hf_{'abc' * 12}"
    arguments = "--hf-token abc --db_url=s3://u:abc@h --max-tokens 7 https://u:abc@h/d --key=abc x wandb.api_key=abc"
    kept = import_text(f"torchrun a.py {arguments}").left_out
    names = ["--hf-token", "--db_url", "an argument", "--key", "wandb.api_key"]
    assert [line.partition(":")[0] for line in kept] == names
    assert "abc" not in str(kept)
    fields, left_out = _fields(
        "eval 'export MY_TOKEN=abc'\nsource a.sh --token abc\n"
        f'export P="http://me:abc@proxy/$USER" Q={token}\ntorchrun a.py >https://u:abc@h/log'
    )
    assert fields["secrets"] == ["P", "Q"]
    assert "env" not in fields and fields["source"]["setup"] == ["export MY_TOKEN=abc", "source a.sh --token abc"]
    named = [line.split(": ")[1] for line in left_out if line.startswith("source.setup: ")]
    assert named == ["MY_TOKEN", "--token"]
    assert "abc" not in str(left_out)


def test_repository_and_folder_are_found_where_the_script_goes() -> None:
    fields, left_out = _fields(
        "git clone --depth 1 -b v1 https://me:secret@example.org/a/b.git c; cd c/d && torchrun --nproc-per-node=2 a.py"
    )
    assert fields["source"] == {
        "git": {"url": "https://example.org/a/b.git", "ref": "v1", "folder": "d"},
        "entry": "a.py",
    }
    assert left_out == ("git clone: the user and password in its URL: give source.git.token",)
    with pytest.raises(SpecError, match=r"^start\.sh: line 1: git clone: the URL contains a password: leave it out$"):
        _fields("git clone https://me:sec/ret@example.org/a; torchrun a/a.py")
    left_out = _fields("git clone 'https://example.org/a/b.git?private_token=x' b; torchrun b/a.py")[1]
    assert left_out[0].startswith("git clone: the part of its URL after ? may be a secret")
    clone = 'GIT_SSH_COMMAND="ssh -i \'" git clone --depth=1 -u evil --template x -c a.b=c -q https://a.org/b'
    fields, left_out = _fields(f"{clone}\ntorchrun b/a.py")
    assert fields["source"] == {"git": {"url": "https://a.org/b"}, "entry": "a.py"}
    named = ["GIT_SSH_COMMAND", "git clone -u", "git clone --template", "git clone -c"]
    assert [line.partition(":")[0] for line in left_out] == named
    assert _fields("cd x; bash -lc 'cd y; torchrun z/a.py'")[0]["source"] == {"path": "x/y", "entry": "z/a.py"}
    assert _fields("python other.py lr=1\ntorchrun a.py")[1] == (
        "python (line 1): a shell command: put it into source.setup if needed",
    )


def test_text_of_the_program_is_all_that_its_file_has_or_the_command_is_named() -> None:
    write = "cd d; printf '%s' 'import os'"
    assert _fields(f"{write} 2>/dev/null 1>train.py\ntorchrun train.py")[0]["source"] == {"script_text": "import os"}
    for line in (">>train.py", "2>train.py", "<train.py", ">train.py\necho x >>train.py", ">other.py"):
        fields, left_out = _fields(f"{write} {line}\ntorchrun train.py")
        assert fields["source"] == {"path": "d", "entry": "train.py"}
        assert "printf (line 1): a shell command: put it into source.setup if needed" in left_out


def test_lines_that_set_up_a_node_and_the_image_are_carried() -> None:
    fields, left_out = _fields(
        "module load cuda/12 && source 'my env/bin/activate'\n. $HERE/x\nmake\ntorchrun a.py\n"
        "exec runai submit -i a/b:1 -g 8"
    )
    assert fields["source"] == {"script": "a.py", "setup": ["module load cuda/12", "source 'my env/bin/activate'"]}
    assert fields["image"] == "a/b:1"
    assert [line.partition(" ")[0] for line in left_out] == ["runai:", ".", "make"]


def test_options_of_accelerate_are_read() -> None:
    fields, left_out = _fields(
        "accelerate launch --multi_gpu --num_machines 2 --num-processes=4 --machine_rank 0 --main_process_ip 10.0.0.1 "
        "--main_process_port 29501 --mixed_precision bf16 --use_fsdp --fsdp_offload_params true --config_file a.yaml "
        "-m a.b --x"
    )
    assert fields == {
        "name": "b",
        "parallelism": {"precision": "bf16"},
        "nodes": [{"host": "10.0.0.1", "ranks": 2}, {"host": "node-1", "ranks": 2}],
        "source": {"module": "a.b", "arguments": ["--x"]},
        "rendezvous": {"port": 29501},
    }
    assert sorted(line.partition(":")[0] for line in left_out) == ["--config-file", "--fsdp-offload-params", "nodes"]
    assert _fields("accelerate launch --cpu --num_processes 2 a.py")[0]["nodes"] == [
        {"host": "localhost", "devices": "cpu", "ranks": 2}
    ]


def test_gpus_that_are_named_are_those_of_the_node() -> None:
    gpus = "CUDA_VISIBLE_DEVICES=2,3"
    assert _fields(f"{gpus} torchrun --nproc-per-node 2 a.py")[0]["nodes"] == [{"host": "localhost", "devices": [2, 3]}]
    fields, left_out = _fields(f"export {gpus}\ntorchrun --nproc-per-node 3 a.py")
    assert fields["nodes"] == [{"host": "localhost", "ranks": 3}]
    assert left_out == ("GPUs 2,3: a node has 3 ranks, and each needs its own GPU: give nodes.devices",)


def test_exported_script_comes_back_from_other_folders_too() -> None:
    git = {"git": {"url": "https://example.org/a.git", "folder": "b"}, "entry": "c.py"}
    for node in ({"host": "a"}, {"host": "a", "workdir": "/w"}):
        spec = PipelineSpec.from_dict({"name": "a", "image": "i", "source": git, "nodes": [node]})
        source = _fields(export_spec(spec, "runai", options={"pvc": "c:/mnt/d"}))[0]["source"]
        assert posixpath.join(source["git"].get("folder", ""), source["entry"]) == "b/c.py"
    nodes = [{"host": "a"}, {"host": "b", "workdir": "~/w"}]
    spec = PipelineSpec.from_dict({"name": "a", "source": {"path": "/p", "entry": "c.py"}, "nodes": nodes})
    fields, _ = _fields(export_spec(spec, "torchrun"))
    assert fields["source"] == {"path": "/p", "entry": "c.py"} and fields["nodes"][1]["workdir"] == "~/w"
    assert _fields("cd x\ncd ~/y\ntorchrun a.py")[0]["source"] == {"path": "~/y", "entry": "a.py"}


def test_what_was_added_to_an_exported_script_is_named() -> None:
    spec = PipelineSpec.from_dict({"name": "a", "source": {"module": "a.b"}, "nodes": [{"host": "h"}, {"host": "i"}]})
    for to, suffix in [("torchrun", ".sh"), ("slurm", ".sbatch")]:
        lines = export_spec(spec, to, options={"time": "1:00"} if to == "slurm" else {}).splitlines()
        _, left_out = _fields("\n".join([*lines[:-2], "pip install x", *lines[-2:]]), f"a{suffix}")
        assert [line.partition(" ")[0] for line in left_out] == [*(["#SBATCH"] if to == "slurm" else []), "pip"]


@pytest.mark.parametrize(
    "before, image",
    [
        ("srun --container-image nvcr.io#nvidia/pytorch:24.01-py3 -N2", "nvcr.io#nvidia/pytorch:24.01-py3"),
        ("/usr/bin/srun --container-image=$HOME/a.sqsh", "$HOME/a.sqsh"),
        ("srun -N2 singularity exec --nv /data/a.sif", "/data/a.sif"),
        ("apptainer exec docker://me:pw@a.org/b:1", "docker://***@a.org/b:1"),
        ("A=1 podman run --rm ghcr.io/a/b:1", "ghcr.io/a/b:1"),
        ("docker exec mine", ""),
    ],
)
def test_image_that_stands_before_a_command_is_named(before: str, image: str) -> None:
    said = f" is not imported{f', nor its image {image}' if image else ''}"
    for command in (f"{before} torchrun a.py", f"{before} bash -lc 'torchrun a.py'"):
        assert any(line.endswith(said) for line in _fields(command)[1])
    words = [*before.split(), "bash", "-c", "torchrun a.py"]
    assert any(line.endswith(said) for line in import_command(words).left_out)


def test_command_lines_of_several_nodes_are_one_job() -> None:
    lines = [
        f"torchrun --nnodes 2 --node-rank {rank} --nproc-per-node {rank + 1} --master-addr a t.py" for rank in (1, 0)
    ]
    fields, _ = _fields("\n".join(lines))
    assert fields["nodes"] == [{"host": "a", "ranks": 1}, {"host": "node-1", "ranks": 2}]
    text = "\nsrun --container-image=x bash -c '\n\npip install x; torchrun a.py' >log"
    assert [line.partition(": ")[0] for line in _fields(text)[1]] == ["srun", "log", "pip (line 2)"]
    with pytest.raises(SpecError, match=r"^start\.sh: line 2: starts a different job than line 1: give a file with"):
        _fields("torchrun a.py\ntorchrun b.py")


@pytest.mark.parametrize(
    "command, fault",
    [
        (
            "torchrun --nnodes 0 a.py",
            r"torchrun --nnodes '0': give a number of nodes, 1 to 10,000, or a range such as",
        ),
        ("torchrun --nnodes 3:2 a.py", "--nnodes '3:2': give"),
        ("torchrun --nproc-per-node many a.py", "--nproc-per-node 'many': give auto, gpu, cpu or a number"),
        ("torchrun --rdzv-endpoint u:pw@h a.py", r"--rdzv-endpoint 'u:\*\*\*@h': give host:port"),
        ("torchrun --nproc-per-node 99999999 a.py", "--nproc-per-node '99999999': give"),
        ("torchrun --rdzv a.py", "torchrun --rdzv: could be --rdzv-backend or --rdzv-conf"),
        ("torchrun --gpus 2 a.py", "torchrun --gpus: no such option"),
        ("torchrun --nnodes", "torchrun --nnodes has no value: give one"),
        ("torchrun", "torchrun: no program after its options"),
        ("torchrun --no-python ./a", "--no-python: a spec runs Python"),
        ("torchrun train", "'train': a spec runs a Python file"),
        ("torchrun --standalone --nnodes 2 a.py", "--standalone is for one node"),
        ("torchrun --master-port 99999 a.py", "--master-port '99999': give a whole number, 0 to 65,535"),
        ("accelerate launch --num_machines 2 --num_processes 3 a.py", "give a multiple of --num-machines, which is 2"),
        ("make all", "'make' starts no ranks: give a command line of torchrun or accelerate launch"),
    ],
)
def test_what_no_spec_can_hold_is_told_in_one_line(command: str, fault: str) -> None:
    with pytest.raises(SpecError, match=fault) as caught:
        import_command(shlex.split(command))
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(words=st.lists(TEXTS, min_size=1, max_size=5))
def test_words_are_those_of_the_shell(words: list[str]) -> None:
    found = split_script(f'a {shlex.join(words)} | b\\\n c#d "$x\'" # e\n')
    assert [word.text for word in found[0].words] == ["a", *words]
    assert not any(word.fills for word in found[0].words)
    assert [(word.text, word.fills) for word in found[1].words] == [("b", ()), ("c#d", ()), ("$x'", ("$x",))]


CHARS = st.characters(codec="ascii", min_codepoint=33, max_codepoint=126)
PLAIN = CHARS.filter(lambda char: char.isalnum() or char in "-+,.:/@%_=#")
PIECES = st.one_of(
    st.text(PLAIN, min_size=1, max_size=4),
    CHARS.map("\\{}".format),
    st.text(CHARS | st.sampled_from(" \n\\"), max_size=6).map(lambda text: "'" + text.replace("'", "") + "'"),
    st.text(CHARS | st.sampled_from(" \n\\"), max_size=6).map(
        lambda text: '"' + re.sub(r'(?<!\\)(["$`])|\\$', "x", text.replace("\\\\", "y")) + '"'
    ),
)
BLANKS = st.sampled_from([" ", "  ", "\t", " \\\n", "\\\n "])


@settings(max_examples=40, deadline=None)
@given(words=st.lists(st.lists(PIECES, min_size=1, max_size=4).map("".join), max_size=4), blank=BLANKS)
def test_quotes_are_those_of_a_real_shell(words: list[str], blank: str) -> None:
    script = blank.join(["printf '%s\\0'", *words]) + " # 'x\n"
    assume("\n" not in script[:-1] or not any(word.startswith("#") for word in words))  # a comment ends with its line
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True, text=True, timeout=60)
    (command,) = split_script(script)
    printed = done.stdout.split("\0")[:-1]
    assert ([word.text for word in command.words[2:]] or [""]) == printed


def test_words_go_on_behind_an_escaped_sign_and_in_the_next_line() -> None:
    found = split_script("a \\)#b c\\ 2>d e\\\nf \\\n#g\n")
    assert [word.text for word in found[0].words] == ["a", ")#b", "c 2", "ef"]
    assert [word.text for word in found[0].files] == ["d"]


def test_what_a_shell_fills_in_may_hold_quotes_and_brackets() -> None:
    text = """a ${X:-$(b "c d" | awk '{print $1}')}e "$(f "g h" (i) ")")" $((1+(2))) `j k`\n<<-'END' cat >l\n"""
    commands = split_script(text + "a 'b\n\tEND\nm\n")
    assert [len(command.words) for command in commands] == [5, 1, 1]
    assert all(word.fills for word in commands[0].words[1:])
    assert [(str(command), command.line) for command in commands[1:]] == [("cat", 2), ("m", 5)]
    assert [str(each) for each in split_script("a \\\r\n b\r\nc <<E\r\nd\r\nE\r\ne\r\n")] == ["a b", "c", "e"]
    assert [str(each) for each in split_script("a <<E\n\tE\nb\nE\nc <<<d &>e\nf\n")] == ["a", "c", "f"]
    with pytest.raises(SpecError, match=r"^line 2: '\$\(' is not closed"):
        split_script("a\n$(b (c)")
    with pytest.raises(SpecError, match=r"^line 2: the here-document has no line 'END'"):
        split_script("a <<END\nb")
