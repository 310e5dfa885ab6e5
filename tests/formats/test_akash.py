"""The SDL of Akash: checked by its own parser and our lint, how nodes of a lease meet, and two nodes run for real."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.formats import akash, export_spec
from detrain_nb.spec import PipelineSpec

from ..testbed.fixtures import MakeTestbed
from ..testbed.pods import Pod
from .akash import templates
from .akash.parser import find_faults, require_sound
from .akash.sdl_lint import lint
from .on_nodes import container_of, fill_in, run_on_node, write_recorder
from .test_torchrun import ONCE

GPUS = ({"host": "a", "devices": [0, 1]}, {"host": "b", "devices": [0, 1]})
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl you@here"


def _spec(*nodes: dict[str, Any], **fields: Any) -> PipelineSpec:
    given = {"name": "train", "image": "ghcr.io/you/train:1", "source": {"script_text": "print()"}, "nodes": nodes}
    return PipelineSpec.from_dict(given | fields)


def _export(spec: PipelineSpec, **options: str) -> dict[str, Any]:
    sdl: dict[str, Any] = yaml.safe_load(export_spec(spec, "akash", options=options))
    return sdl


# Changes to a good SDL: Akash's parser must refuse those of PARSER, and our lint those of LINT, with the key's words.

Change = tuple[str, Any]
GONE = object()


def _change(sdl: Any, *changes: Change) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(sdl)
    for path, value in changes:
        *above, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        place: Any = changed
        for step in above:
            place = place[step]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return changed


A, NODE_A, GPU_A = "services/a", "profiles/compute/a/resources", "profiles/compute/a/resources/gpu"
VENDOR = f"{GPU_A}/attributes/vendor"
OTHER = ("profiles/placement/other", {"pricing": {"b": {"denom": "uact", "amount": 1}}})
ELSEWHERE = ("deployment/b", {"other": {"profile": "b", "count": 1}})
PARSER: dict[str, list[Change]] = {
    "no image": [(f"{A}/image", GONE)],
    "another protocol": [(f"{A}/expose/0/proto", "icmp")],
    "a version that is none": [("version", "3.0")],
    "a denomination that is none": [("profiles/placement/akash/pricing/a/denom", "usd")],
    "another coin by IBC": [("profiles/placement/akash/pricing/a/denom", "ibc/DEADBEEF")],
    "no such profile": [("deployment/b/akash/profile", "none")],
    "an interface that no GPU has": [(VENDOR, {"nvidia": [{"model": "a100", "interface": "nvlink"}]})],
    "no containers": [("deployment/b/akash/count", 0)],
    "an address without its endpoint": [(f"{A}/expose/0/to/0/ip", "none")],
    "another vendor": [(VENDOR, {"amd": None})],
    "a service that is deployed nowhere": [("deployment/b", GONE)],
    "a mounted volume that no profile has": [(f"{A}/params/storage/none", {"mount": "/none"})],
    "GPUs without attributes": [(f"{GPU_A}/attributes", GONE)],
    "an endpoint for nothing": [("endpoints", {"lost": {"kind": "ip"}})],
    "two volumes in one place": [(f"{A}/params/storage/checkpoint/mount", "/dev/shm")],
    "a field that is none": [(f"{A}/ports", [22])],
    "attributes of no GPU": [(f"{GPU_A}/units", 0)],
    "a persistent volume that is not mounted": [(f"{A}/params/storage/checkpoint", GONE)],
    "no such placement": [("deployment/b", {"elsewhere": {"profile": "b", "count": 1}})],
    "variables as a mapping": [(f"{A}/env", {"A": "1"})],
    "a port that is none": [(f"{A}/expose/0/port", 70000)],
    "memory that is persistent": [(f"{NODE_A}/storage/1/attributes/persistent", True)],
    "no price": [("profiles/placement/akash/pricing", {})],
}
LINT: dict[str, list[Change]] = {
    "b: deployed, and no service": [("services/b", GONE)],
    "'lots' is no size": [(f"{NODE_A}/memory/size", "lots")],
    "'32GB' is no size": [(f"{NODE_A}/memory/size", "32GB")],
    "to service 'ghost', which is none": [(f"{A}/expose/1/to/0/service", "ghost")],
    "to service 'b', which is in another placement": [OTHER, ELSEWHERE],
    "no service is exposed globally": [("services/a/expose", []), ("services/b/expose", [])],
    "0.5 units of gpu": [(f"{GPU_A}/units", 0.5)],
    "99 units of gpu": [(f"{GPU_A}/units", 99)],
    "accept '0.0.0.0/0' is no host name": [(f"{A}/expose/0/accept", ["0.0.0.0/0"])],
    "port 29500 is exposed to nobody": [(f"{A}/expose/1/to", [])],
    "in several denominations": [(OTHER[0], {"pricing": {"b": {"denom": "uakt", "amount": 1}}}), ELSEWHERE],
    "'1 BAD ' is no name of a variable": [(f"{A}/env", ["1 BAD =x"])],
    "accept 'here.org' stands twice": [(f"{each}/expose/0/accept", ["here.org"]) for each in (A, "services/b")],
    "400 units of cpu": [(f"{NODE_A}/cpu/units", 400)],
    "3Ti is not between": [(f"{NODE_A}/memory/size", "3Ti")],
    "of class beta3 and not persistent": [(f"{NODE_A}/storage/2/attributes/persistent", False)],
    "without persistent: false": [(f"{NODE_A}/storage/1/attributes", {"class": "ram"})],
    "a count of 51": [("deployment/b/akash/count", 51)],
    "a price of 10000001": [("profiles/placement/akash/pricing/a/amount", 10_000_001)],
}


def _good() -> dict[str, Any]:
    return _export(_spec(*GPUS, checkpoint={"url": "/checkpoints"}), gpu_model="a100:80Gi,h100")


def test_each_fault_is_found() -> None:
    good = _good()
    assert (find_faults([yaml.safe_dump(good)]), lint(good)) == ([[]], [])
    found = find_faults([yaml.safe_dump(_change(good, *changes)) for changes in [*PARSER.values(), *LINT.values()]])
    by_parser = dict(zip([*PARSER, *LINT], found, strict=True))
    assert [name for name in PARSER if not by_parser[name]] == [], "the parser takes them"
    assert [words for words in LINT if words not in "; ".join(lint(_change(good, *LINT[words])))] == []


def test_bad_name_of_a_service_and_too_many_of_them_are_found() -> None:
    good = _good()
    named = yaml.safe_load(yaml.safe_dump(good).replace(" a:", " Node_0:").replace("service: a", "service: Node_0"))
    assert lint(named) == ["service 'Node_0': invalid name"]
    many = _change(good, *((f"deployment/n{index}", good["deployment"]["a"]) for index in range(20)))
    assert "akash: 22 services, at most 20" in lint(many)


# What an export writes


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
URLS = ("/checkpoints", "s3://bucket/x", "/data/my $model 'x'", "file:///c/d/", "local:///c", "//x/é", "/a\u2003b\\")
OPTIONS = {
    "ssh_key": [KEY],
    "gpu_model": ["a100", "a100:80Gi,h100", "rtx4090"],
    "denom": ["uact", "uakt"],
    "price": ["1", "10000000"],
    "cpus": ["1", "384"],
    **{name: ["1Gi", "64", "2048Gi"] for name in ("memory", "disk", "shm", "volume")},
}
ODD = ("0", "-1", "1.5", "x", "1Mi", "4GB", "100000000", "a100:80GB", "-", "usd", "\n", "$")


@st.composite
def _exports(draw: st.DrawFn) -> str:
    """Draw the text of an export; it is empty if the export was refused."""
    hosts = draw(st.lists(st.sampled_from(["a", "gpu-1", "10.0.0.7", "x.example.org", "b2", "localhost"]), unique=True))
    devices = st.sampled_from(["cpu", [0], [3, 1], "auto"])
    nodes = [{"host": host, "devices": draw(devices)} for host in hosts]
    if nodes and draw(st.booleans()):
        nodes[0]["memory_gb"] = draw(st.floats(0.001, 2000))
    given = {name: draw(st.sampled_from(values)) for name, values in OPTIONS.items() if draw(st.booleans())}
    if draw(st.booleans()):
        given |= {"start": "session", "part": draw(st.sampled_from(["all", "first", "others"]))}
    if draw(st.integers(0, 3)) == 0:
        given[draw(st.sampled_from([*OPTIONS]))] = draw(st.sampled_from(ODD))
    fields: dict[str, Any] = {
        "env": {"VALUE": draw(WORDS)},
        "secrets": draw(st.sampled_from([[], ["HF_TOKEN"]])),
        "rendezvous": {"port": draw(st.sampled_from([0, 80, 65535])), "max_restarts": draw(st.integers(0, 1))},
        "source": {"script_text": draw(WORDS), "arguments": [draw(WORDS)]},
    }
    if "volume" in given or draw(st.booleans()):
        fields["checkpoint"] = {"url": draw(st.sampled_from(URLS))}
    try:
        return export_spec(_spec(*nodes, **fields), "akash", gpus=draw(st.integers(0, 3)), options=given)
    except SpecError:
        return ""


@settings(max_examples=8, deadline=None)
@given(texts=st.lists(_exports(), min_size=20, max_size=20))
def test_whatever_is_not_refused_the_parser_and_our_lint_take(texts: list[str]) -> None:
    require_sound(*filter(None, texts))


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_template_is_what_an_export_writes(name: str) -> None:
    assert (templates.FOLDER / name).read_text(encoding="utf-8") == templates.write(name), f"run {templates.COMMAND}"


def test_parser_and_our_lint_take_all_templates() -> None:
    files = sorted(templates.FOLDER.glob("*.yaml"))
    assert {file.name for file in files} == templates.TEMPLATES.keys()
    require_sound(*(file.read_text(encoding="utf-8") for file in files))


def test_first_node_is_where_the_others_meet_it_and_nobody_else_does() -> None:
    services = _export(_spec(*GPUS, {"host": "c"}), ssh_key=KEY)["services"]
    for name, peers in (("a", "bc"), ("b", "ac"), ("c", "ab")):
        to_peers = [{"service": peer} for peer in peers]
        ssh = {"port": 2222, "as": 2222, "proto": "tcp", "to": [{"global": True}, *to_peers]}
        store = {"port": 29500, "as": 29500, "proto": "tcp", "to": to_peers}
        assert services[name]["expose"] == ([ssh, store] if name == "a" else [ssh])
        assert services[name]["env"] == [f"SSH_PUBKEY={KEY}"]
        assert services[name]["params"] == {"storage": {"shm": {"mount": "/dev/shm"}}}


def test_profile_has_what_the_node_has() -> None:
    nodes = ({"host": "a", "devices": "cpu", "ranks": 3, "memory_gb": 10}, {"host": "b", "devices": [1, 3]})
    spec = _spec(*nodes, checkpoint={"url": "local:///checkpoints"})
    sdl = _export(spec, gpu_model="a100:80Gi,h100", cpus="5", disk="30", price="7", denom="uakt")
    of_a, of_b = (sdl["profiles"]["compute"][name]["resources"] for name in "ab")
    assert of_a["cpu"] == {"units": 5} and of_a["memory"] == {"size": "10Gi"} and "gpu" not in of_a
    shm = {"name": "shm", "size": "2Gi", "attributes": {"persistent": False, "class": "ram"}}
    volume = {"name": "checkpoint", "size": "50Gi", "attributes": {"persistent": True, "class": "beta3"}}
    assert of_a["storage"] == [{"size": "30Gi"}, shm, volume]
    models = [{"model": "a100", "ram": "80Gi"}, {"model": "h100"}]
    assert of_b["gpu"] == {"units": 2, "attributes": {"vendor": {"nvidia": models}}}
    price = {"denom": "uakt", "amount": 7}
    assert sdl["profiles"]["placement"] == {"akash": {"pricing": {"a": price, "b": price}}}
    assert sdl["services"]["b"]["params"]["storage"]["checkpoint"] == {"mount": "/checkpoints"}
    assert sdl["deployment"] == {name: {"akash": {"profile": name, "count": 1}} for name in "ab"}


def test_session_runs_nothing_and_has_the_variables() -> None:
    fields = {"source": {"script": "gone.py"}, "secrets": ["HF_TOKEN"], "checkpoint": {"url": "s3://b/c"}}
    spec = _spec(*GPUS, env={"VALUE": "a $(SSH_PUBKEY)\n$$ b"}, **fields)
    text = export_spec(spec, "akash", options={"start": "session"})
    service = yaml.safe_load(text)["services"]["b"]
    assert "args" not in service
    assert [fill_in(line, {"SSH_PUBKEY": "x"}) for line in service["env"]] == [
        "SSH_PUBKEY=",
        "VALUE=a $(SSH_PUBKEY)\n$$ b",
    ]
    assert "# Fill in the empty values below: SSH_PUBKEY." in text and "HF_TOKEN" not in text
    assert "%distributed start --nodes lease.json\n" in text
    assert "checkpoint" not in service["params"]["storage"]


def test_secrets_of_a_job_are_named_to_you_and_to_the_entrypoint() -> None:
    nodes = [{**node, "env": ["OTHER_TOKEN"]} for node in GPUS]
    text = export_spec(_spec(*nodes, secrets=["HF_TOKEN"]), "akash", options={"ssh_key": KEY})
    assert "# Fill in the empty values below: HF_TOKEN, OTHER_TOKEN." in text
    env = [f"SSH_PUBKEY={KEY}", "HF_TOKEN=", "OTHER_TOKEN=", "DETRAIN_NB_SECRETS=HF_TOKEN OTHER_TOKEN"]
    assert yaml.safe_load(text)["services"]["b"]["env"] == env


def test_part_of_the_nodes_is_a_lease_for_sessions_without_a_group() -> None:
    spec = _spec(*GPUS, {"host": "c"})
    for part, names in (("first", ["a"]), ("others", ["b", "c"])):
        text = export_spec(spec, "akash", options={"start": "session", "part": part})
        assert [*yaml.safe_load(text)["services"]] == names
        assert "%distributed start --nodes lease.json --no-init\n" in text
        with pytest.raises(SpecError, match=rf"^--part {part}: .* hangs in its first collective: .* with --no-init$"):
            export_spec(spec, "akash", options={"part": part})
    assert _export(_spec({"host": "a"}), part="first") == _export(_spec({"host": "a"}))


def test_kubernetes_fills_in_nothing(tmp_path: Path) -> None:
    words = ["$(SSH_PUBKEY)", "$$", "$(hostname) $$(x)", "${PATH}"]
    python = write_recorder(tmp_path / "python")
    spec = _spec({"host": "a", "python": python}, source={"script_text": "print()", "arguments": words})
    seen = run_on_node("akash", akash.export(spec, spec.plan()), shell="sh", folder=tmp_path / "a").seen
    assert seen and seen.program[1:] == words


def test_restarts_begin_on_the_first_node_and_lead_to_addresses(tmp_path: Path) -> None:
    python = write_recorder(tmp_path / "python")
    spec = _spec({"host": "a", "python": python}, {"host": "b", "python": python}, rendezvous={"max_restarts": 1})
    text = akash.export(spec, spec.plan())
    for node_rank, host in enumerate(("localhost", "a")):
        seen = run_on_node("akash", text, shell="sh", folder=tmp_path / str(node_rank), node_rank=node_rank).seen
        assert seen and {f"--rdzv-endpoint={host}:29500", "--local-addr=10.1.2.3"} <= set(seen.options)


def test_services_are_named_as_nodes_that_have_such_names() -> None:
    def names(*hosts: str) -> list[str]:
        return [*_export(_spec(*({"host": host} for host in hosts)))["services"]]

    assert names("gpu-1", "b") == ["gpu-1", "b"]
    assert names("gpu-1", "10.0.0.7") == names("localhost", "b") == names("A", "b") == ["node-0", "node-1"]
    assert names() == ["node-0"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "99 GPUs": (
        {"nodes": [{"host": "a", "devices": [*range(99)]}]},
        {},
        "99 GPUs on node a: Akash allows at most 24: spread",
    ),
    "a name": ({"nodes": [{"host": "a", "name": "GPU_1"}]}, {}, r"nodes\[0\]\.name GPU_1: .*: give a-z, 0-9 and -"),
    "21 nodes": ({"nodes": [{"host": f"n{each}"} for each in range(21)]}, {}, "21 nodes: .* at most 20: give fewer"),
    "the port of sshd": ({"rendezvous": {"port": 2222}}, {}, r"rendezvous\.port 2222: .*: give another, such as 29500"),
    "a folder of the job": ({"checkpoint": {"url": "out"}}, {}, r"checkpoint\.url out: .*: give the absolute path"),
    "no whole path": (
        {"checkpoint": {"url": "local://c"}},
        {},
        r"checkpoint\.url local://c: .*: give the absolute",
    ),
    "the root": ({"checkpoint": {"url": "/"}}, {}, r"checkpoint\.url /: .*: give the absolute path"),
    "shared memory": ({"checkpoint": {"url": "/dev/shm"}}, {}, r"checkpoint\.url /dev/shm: .*: give the absolute path"),
    "the system": ({"checkpoint": {"url": "//usr/lib"}}, {}, r"checkpoint\.url //usr/lib: .*: give the absolute path"),
    "a long script": ({"source": {"script_text": "#" * 140_000}}, {}, r"source: .* at most 131,071: give source\.git"),
    "4 TB of memory": ({"nodes": [{"host": "a", "memory_gb": 4000}]}, {}, "memory_gb 4000 of a node: .* 2048Gi"),
    "a price": ({}, {"price": "1.5"}, "--price '1.5': give a whole number of uact per block, 1 to 10000000"),
    "no price": ({}, {"price": "0"}, "--price '0': give a whole number"),
    "a size": ({}, {"memory": "32GB"}, "--memory '32GB': give a size in GiB, 1Gi to 2048Gi"),
    "a large size": ({}, {"disk": "33000Gi"}, "--disk '33000Gi': give a size in GiB, 1Gi to 32768Gi"),
    "processors": ({}, {"cpus": "385"}, "--cpus '385': give a whole number, 1 to 384"),
    "a denomination": ({}, {"denom": "usd"}, "--denom 'usd': give one of uact, uakt"),
    "a model": ({"nodes": GPUS[:1]}, {"gpu_model": "a100:80GB"}, "--gpu-model 'a100:80GB': give NVIDIA models"),
    "no model": (
        {"nodes": GPUS[:1]},
        {"gpu_model": "h100,,a100"},
        "--gpu-model '': give NVIDIA models",
    ),
    "a model of no GPU": (
        {},
        {"gpu_model": "a100"},
        "--gpu-model 'a100': no node of this lease has a GPU: leave it out",
    ),
    "a volume of nothing": (
        {"checkpoint": {"url": "s3://b/c"}},
        {"volume": "9Gi"},
        "--volume '9Gi': no checkpoints are saved to",
    ),
    "a private key": (
        {},
        {"ssh_key": "-----BEGIN OPENSSH PRIVATE KEY-----"},
        "--ssh-key: not a public key: give the text of its file",
    ),
    "a key of whoever wrote the spec": (
        {"env": {"SSH_PUBKEY": "ssh-ed25519 AAAA mallory"}},
        {"start": "session", "ssh_key": KEY},
        "SSH_PUBKEY holds the keys that may log in: leave it out of env and secrets, and give --ssh-key",
    ),
    "a key that is to be filled in": (
        {"secrets": ["SSH_PUBKEY"]},
        {"ssh_key": KEY},
        "SSH_PUBKEY holds the keys that may log in",
    ),
    "a start": ({}, {"start": "now"}, "--start 'now': give one of job, session"),
    "others of one": ({}, {"part": "others"}, "--part others: the spec has only one node: give --part all"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_akash_cannot_do_is_refused_with_one_line(case: str) -> None:
    fields, options, message = REFUSED[case]
    with pytest.raises(SpecError, match=f"^{message}") as caught:
        export_spec(_spec(**fields), "akash", options=options)
    assert "\n" not in str(caught.value)


# Real runs: the image's entrypoint in two pods, which have the names of the services


@contextmanager
def _deployed(spec: PipelineSpec, make_testbed: MakeTestbed, folder: Path) -> Iterator[list[Pod]]:
    """Start a container for each of two nodes as the SDL describes, and wait until their jobs have succeeded."""
    testbed = make_testbed(2)
    pods = [Pod(testbed, host.name, folder) for host in testbed.hosts]
    spec = spec.with_overrides({"nodes": [{"host": host.name} for host in testbed.hosts]})
    sdl = _export(spec, ssh_key=pods[0].public_key.strip())
    with ExitStack() as started:
        for pod, service in zip(pods, sdl["services"].values(), strict=True):
            container = container_of(service)
            pod.start(*container.argv, **container.env)
            started.callback(pod.stop)
        for pod in pods:
            pod.wait_for("container: the job has exited with status")
            assert "with status 0; sshd keeps running" in pod.output, pod.output
        yield pods


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name, who_tells, model",
    [
        ("pipeline-cpu.yaml", 1, "stage-1.pt"),
        pytest.param("tensor-cpu.yaml", 0, "model.pt", marks=pytest.mark.thorough),
    ],
)
def test_model_of_a_template_is_trained_in_containers_and_fetched(
    name: str, who_tells: int, model: str, make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    spec = templates.TEMPLATES[name].spec
    with _deployed(spec, make_testbed, tmp_path) as pods:
        told = [[line for line in pod.output.splitlines() if line.startswith("step ")] for pod in pods]
        path = f"{spec.name}.job/{who_tells}/artifacts/{model}"
        listed = pods[who_tells].run("python3", "-m", "zipfile", "-l", path)
    losses = [float(line.split()[-1]) for line in told[who_tells]]
    assert len(losses) > 2 and losses[-1] < losses[0] / 2
    assert not told[1 - who_tells]
    assert "data.pkl" in listed, "a file of torch.save"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_in_two_containers_begin_anew_together(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    restarts = {"max_restarts": 2}
    spec = _spec(source={"script_text": ONCE}, env={"MARK": "mark"}, rendezvous=restarts)
    with _deployed(spec, make_testbed, tmp_path) as pods:
        told = [pod.output for pod in pods]
    first, second = ([line for line in text.splitlines() if line.startswith("store at")] for text in told)
    assert first == second and len(first) == 2, "a store for each round"
