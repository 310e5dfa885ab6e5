"""A pipeline of DeTrain's console, as stored in MongoDB (a record, or only its ``state``), as a spec."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath
from typing import Any

from ..errors import SpecError
from ..plan.names import MOST_NAME_CHARS
from .imported import Foreign, Imported, Importer
from .reading import Part, Whole

_NUMBERS = {"$numberInt": int, "$numberLong": int, "$numberDouble": float}  # of MongoDB's extended JSON
_FORMS = ("parallelForm", "nodesForm", "trainingScriptForm")
_NO_SSH = "is for DeTrain's agent, but nodes are reached over SSH: give port if sshd does not listen on 22"
_OWN_FOLDER = "each job clones into its own folder"
_PASSWORD = "a spec contains no password: give source.git.token, the name of the variable that holds a token"
_OF_CONSOLE = "belongs to the console, not to the pipeline"


def _is_one(foreign: Foreign) -> bool:
    state = _state_of(foreign.document)
    return isinstance(state, dict) and any(isinstance(state.get(form), dict) for form in _FORMS)


def _state_of(document: Any) -> Any:
    record = document[0] if isinstance(document, list) and document else document
    return record.get("state", record) if isinstance(record, dict) else None


def _read(foreign: Foreign) -> Imported:
    content = foreign.content
    if isinstance(content, list):
        if len(content) != 1:
            raise SpecError(f"{foreign.name}: has {len(content)} records: give a file with one of them")
        content = content[0]
    whole = Whole(foreign, _make_plain(content))
    state = whole.part("state") if "state" in whole else whole
    for key in whole if "state" in whole else ():
        if key != "state":
            whole.leave(key, _OF_CONSOLE)
    for key in state:
        if key not in _FORMS:
            state.leave(key, _OF_CONSOLE)
    general, nodes = state.part("parallelForm"), state.part("nodesForm")
    _read_general(whole, general)
    _read_nodes(whole, nodes, general)
    _read_meeting(nodes, is_pipeline=general.look("type") == "pipeline")
    _read_source(whole, state.part("trainingScriptForm"))
    return whole.imported("detrain")


def _make_plain(value: Any) -> Any:
    """Return the content with numbers of extended JSON as plain numbers."""
    if isinstance(value, list):
        return [_make_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (number := next(iter(value))) in _NUMBERS and isinstance(value[number], str):
        try:
            return _NUMBERS[number](value[number][:30])
        except ValueError:
            return value[number]
    return {key: _make_plain(item) for key, item in value.items()}


def _read_general(whole: Whole, form: Part) -> None:
    form.need("type")
    axis = {"pipeline": "pp", "tensor": "tp"}.get(form.text("type"))
    if axis is None:
        raise form.fault("type", 'give "pipeline" or "tensor"')
    whole.put("parallelism", {axis: -1, "dp_shard": 1})  # all ranks, as in DeTrain
    name = form.text("modelName")
    whole.put("name", whole.name_after(name))
    if name and whole.fields["name"] != name:
        form.leave("modelName", f"is not a valid pipeline name: replaced by {whole.fields['name']}")
    form.carry("epochs", "training.epochs")
    form.carry("batchSize", "training.batch_size")
    form.carry("learningRate", "training.learning_rate")
    form.leave("akashOnly", _OF_CONSOLE)


def _read_nodes(whole: Whole, form: Part, general: Part) -> None:
    nodes = form.parts("nodes")
    ranks = general.whole_number("nprocPerNode", 1, least=1, most=1 << 16)
    count = general.whole_number("nnodes", len(nodes), least=1 if "nnodes" in general else 0)
    if not nodes:
        for key in ("nnodes", "nprocPerNode"):
            general.leave(key, "the record has no nodes: add nodes, each with its host and ranks")
    elif count != len(nodes):
        raise general.fault("nnodes", f"{count}, but {form.path}.nodes has {len(nodes)}: give the same number")
    hosts = [node.text("ip") for node in nodes]
    times = Counter(hosts)
    form.stands_for("nodes", "nodes")
    for index, node in enumerate(nodes):
        field = f"nodes[{index}]"
        node.need("ip")
        node.carry("ip", f"{field}.host")
        if times[hosts[index]] > 1 or len(hosts[index]) > MOST_NAME_CHARS:
            whole.put(f"{field}.name", f"node-{index}")
        whole.put(f"{field}.ranks", ranks)
        whole.put(f"{field}.devices", "auto" if node.flag("gpu") else "cpu")
        node.leave("protocol", _NO_SSH)
        node.leave("agentPort", _NO_SSH)


def _read_meeting(form: Part, *, is_pipeline: bool) -> None:
    """Read where the ranks meet: at the master node for a pipeline, otherwise at the rendezvous backend."""
    master, backend = form.part("masterNode"), form.part("rendezvousBackend")
    used, host = (master, "address") if is_pipeline else (backend, "hostIP")
    if used.look(host) in ("", "localhost", "127.0.0.1") and "nodes" in form:
        used.leave(host, "the other nodes cannot reach the first one there: give rendezvous.endpoint")
    else:
        used.carry(host, "rendezvous.endpoint")
    used.carry("port", "rendezvous.port")
    backend.leave("backend", "a job chooses c10d or static itself")
    if is_pipeline:
        form.leave("rendezvousBackend", "is only for tensor parallelism: the ranks of a pipeline meet at masterNode")
    else:
        form.leave("masterNode", "is only for pipelines: tensor-parallel ranks meet at rendezvousBackend")
        name = backend.look("id")
        backend.carry("id", "rendezvous.id", str(name) if type(name) is int else name)


def _read_source(whole: Whole, form: Part) -> None:
    form.need("repo", "filePath")
    form.carry("repo", "source.git.url")
    path = PurePosixPath(form.text("filePath"))
    form.carry("filePath", "source.entry", path.name)
    if path.parent.parts:
        form.carry("filePath", "source.git.folder", str(path.parent))
    whole.put("source.argument_style", "detrain")
    for key in ("username", "password"):
        if form.look(key) != "":
            form.leave(key, _PASSWORD)
        else:
            form.take(key)
    if form.flag("isPrivate"):
        form.leave("isPrivate", _PASSWORD)
    form.leave("toFolder", _OWN_FOLDER)
    form.leave("isClone", _OWN_FOLDER)


DETRAIN = Importer(_is_one, _read, "a pipeline of DeTrain's console, as stored in MongoDB")
