"""A command line of torchrun or accelerate as fields of a spec; nothing in it is run or expanded."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from ..plan import MOST_RANKS
from ..plan.names import NAME, make_name
from ..spec.node import is_address
from ..spec.words import check_free
from ..storage import shown
from ..text import count_of, split_target
from .command_words import ASSIGNMENT, KEYWORDS, WRAPPERS, name_before
from .imported import MOST_NODES
from .launch_options import ACCELERATE, TORCHRUN, Launcher, Options, read_options
from .reading import NO_FIELD
from .secret_words import may_be_secret, warn_of_secrets
from .shell_words import Word, as_words

__all__ = [
    "Launch",
    "describe_nodes",
    "find_launcher",
    "put_secret",
    "put_variable",
    "put_variables",
    "read_command",
]

_MOST_SECRETS = 1000
_MODULES = {"torch.distributed.run": TORCHRUN, "torch.distributed.launch": TORCHRUN}
_MODULES |= {"accelerate.commands.launch": ACCELERATE}
_PYTHON = re.compile(r"python[0-9.]*")
_RANGE = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")
_GPUS = re.compile(r"[0-9]{1,3}(?:,[0-9]{1,3}){0,99}")
_PORT = re.compile(r"[0-9]{1,5}")
_MACRO = re.compile(r"(?<!\$)(?:\$\$)*\$(?:\{\w+\}|[A-Za-z_]\w*)")
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")
_FILLED_IN = "the shell expands it: write out the value"


@dataclass
class Launch:
    """What one command line starts: fields as in the document of a spec, and what is known of its nodes."""

    fields: dict[str, Any]  # source, rendezvous, env, secrets, parallelism
    name: str = ""
    run_id: str = ""  # the id of the rendezvous
    nodes: tuple[int, int] = (1, 1)  # the fewest and the most
    node: dict[str, Any] = field(default_factory=dict)  # the fields of every node: ranks, devices, python
    node_rank: int = 0
    address: str = ""  # of the first node
    left_out: list[str] = field(default_factory=list)


def read_command(words: Sequence[str]) -> Launch:
    """Parse the words of one command line. Raises: SpecError."""
    if found := find_launcher(as_words(words)):
        return found
    said = f"{shown(repr(words[0]), most=60)} starts no ranks" if words else "no command was given"
    raise SpecError(f"{said}: give a command line of torchrun or accelerate launch")


def find_launcher(words: Sequence[Word]) -> Launch | None:
    """Parse a command line; returns None if it starts neither torchrun nor accelerate. Raises: SpecError."""
    at, variables = 0, dict[str, Word]()
    before: list[str] = []
    while at < len(words):
        text = words[at].text
        if launcher := _find_here(words, at):
            return _read(launcher, words, at, variables, before)
        if match := ASSIGNMENT.fullmatch(text):
            variables[match[1]] = Word(match[2], words[at].fills)
        elif text in KEYWORDS:
            pass
        elif posixpath.basename(text) in WRAPPERS or before or (at and text.startswith("-")):
            before.append(text)
        else:
            return None
        at += 1
    return None


def _find_here(words: Sequence[Word], at: int) -> tuple[Launcher, int, bool] | None:
    """Return the launcher at that word, where its options begin, and whether it passes --local-rank to scripts."""
    texts = [word.text for word in words[at : at + 8]]
    program = posixpath.basename(texts[0])
    if program == "torchrun":
        return TORCHRUN, at + 1, False
    if program == "accelerate-launch" or (program == "accelerate" and texts[1:2] == ["launch"]):
        return ACCELERATE, at + (1 if program == "accelerate-launch" else 2), False
    if _PYTHON.fullmatch(program) or texts[1:2] == ["-m"]:
        for number, text in enumerate(texts[1:], 1):
            if text == "-m" and (module := texts[number + 1 : number + 2]) and module[0] in _MODULES:
                return _MODULES[module[0]], at + number + 2, module[0].endswith("distributed.launch")
            if not text.startswith("-") or text in ("-m", "-c"):
                break
    return None


def _read(
    found: tuple[Launcher, int, bool], words: Sequence[Word], at: int, variables: Mapping[str, Word], before: list[str]
) -> Launch:
    launcher, begin, gives_rank = found
    options = read_options(launcher, words[begin:])
    launch = Launch({"source": {}})
    others: dict[str, Word] = {}
    for name, word in variables.items():
        option = name.removeprefix("PET_").lower().replace("_", "-")
        if name.startswith("PET_") and launcher is TORCHRUN and option in (launcher.valued or ()):
            options.given.setdefault(option, word)
        else:
            others[name] = word
    launch.left_out += name_before(before, launcher.name)
    _read_program(options, launch)
    (_read_torchrun if launcher is TORCHRUN else _read_accelerate)(options, launch)
    put_variables(launch, others)
    if words[begin - 1].text in _MODULES:  # after a Python executable, whatever its name
        if not words[at].is_known():
            launch.left_out.append(f"{shown(words[at].text, most=60)}: {_FILLED_IN}, as nodes.python")
        elif words[at].text != "python3":
            launch.node["python"] = words[at].text
    elif "/" in words[at].text:
        launch.left_out.append(f"{words[at].text}: a spec names a node's Python, not its launcher: give nodes.python")
    if options.given.pop("use-env", None) is None and gives_rank:
        launch.left_out.append("--local-rank: is not passed to ranks: read LOCAL_RANK in the script")
    for option in list(options.given):
        options.leave(option, NO_FIELD)
    launch.left_out += options.left_out
    return launch


def put_variables(launch: Launch, variables: Mapping[str, Word]) -> None:
    """Add environment variables to a launch without replacing its own; visible GPUs become the nodes' devices."""
    for name, word in variables.items():
        if name == "CUDA_VISIBLE_DEVICES" and _GPUS.fullmatch(word.text):
            _put_devices(launch, word.text)
        elif name == "CUDA_VISIBLE_DEVICES" and not word.text:
            launch.node["devices"] = "cpu"
        elif name not in launch.fields.get("env", {}) and name not in launch.fields.get("secrets", ()):
            put_variable(launch, name, word)


def put_variable(launch: Launch, name: str, word: Word) -> None:
    """Add an environment variable to a launch; only its name, if the value looks like a secret or has a password."""
    if not _is_free(launch, name):
        return
    if may_be_secret(name, word.text):
        put_secret(launch, name)
        if not word.fills:
            launch.left_out.append(f"{name}: the value may be a secret and is not put into the spec: export it instead")
        return
    if word.fills:
        launch.left_out.append(f"{name}: {shown(word.fills[0], most=60)}: {_FILLED_IN}")
    launch.fields.setdefault("env", {})[name] = word.text


def put_secret(launch: Launch, name: str) -> None:
    """Add a variable to a launch by its name only. Raises: SpecError when there are too many."""
    secrets = launch.fields.setdefault("secrets", [])
    if not _is_free(launch, name):
        return
    if len(secrets) == _MOST_SECRETS:
        raise SpecError(f"more than {_MOST_SECRETS:,} secrets: give fewer")
    secrets += [] if name in secrets else [name]


def _is_free(launch: Launch, name: str) -> bool:
    """Return whether the user may set the variable; otherwise report it as left out."""
    try:
        check_free(name)
    except ValueError as exc:
        # without its advice to rename: the name is right in its own file
        said = str(exc).removeprefix(f"{name} ").partition(": give")[0]
        launch.left_out.append(f"{name}: {shown(said)}")
        return False
    return True


def _read_program(options: Options, launch: Launch) -> None:
    if options.has("no-python"):
        raise SpecError(f"{options.launcher.name} --no-python: a spec runs Python: give a script, or -m and a module")
    first, *arguments = options.program
    is_module = options.has("module")
    if not is_module and not first.text.lower().endswith(".py"):
        said = "the shell expands it" if first.fills[:1] == (first.text,) else "a spec runs a Python file"
        raise SpecError(f"{shown(repr(first.text), most=60)}: {said}: give a file that ends in .py")
    for word in options.program:
        if word.fills:
            launch.left_out.append(f"{shown(word.fills[0], most=60)}: {_FILLED_IN}")
    launch.left_out += warn_of_secrets([word.text for word in arguments])
    kept = [_fill(word, options, launch) for word in options.program]
    launch.fields["source"] = {"module" if is_module else "script": kept[0]}
    if arguments:
        launch.fields["source"]["arguments"] = kept[1:]
    last = first.text.rpartition(".")[2] if is_module else posixpath.splitext(posixpath.basename(first.text))[0]
    launch.name = make_name(last, default="imported")


def _fill(word: Word, options: Options, launch: Launch) -> str:
    """Return a word as ranks get it: torchrun reads ``$$`` as ``$``, and expands macros of its own."""
    if options.launcher is not TORCHRUN or word.fills:
        return word.text
    if macro := _MACRO.search(word.text):
        launch.left_out.append(f"{shown(macro[0])}: is a macro of torchrun, which a spec cannot express")
    return word.text.replace("$$", "$")


def _read_torchrun(options: Options, launch: Launch) -> None:
    nodes = options.text("nnodes", "1")
    match = _RANGE.fullmatch(nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST_NODES:
        raise options.fault("nnodes", nodes, f"a number of nodes, 1 to {MOST_NODES:,}, or a range such as 1:4")
    launch.nodes = least, most
    _read_ranks(options, launch)
    launch.node_rank = options.whole("node-rank", 0, most=MOST_NODES)
    _read_meeting(options, launch, address="master-addr", port="master-port")
    _read_conf(options, launch)
    if options.has("standalone") and most > 1:
        raise SpecError(f"torchrun --standalone is for one node, but --nnodes is {nodes}: leave out one of them")


def _read_ranks(options: Options, launch: Launch) -> None:
    ranks = options.text("nproc-per-node", "" if "nproc-per-node" in options.given or options.has_more else "1")
    if ranks == "cpu":
        launch.node["devices"] = "cpu"
        launch.left_out.append("--nproc-per-node cpu: means one rank per CPU: give nodes.ranks")
    elif ranks not in ("auto", "gpu", ""):
        if not re.fullmatch("[0-9]{1,9}", ranks) or not 1 <= int(ranks) <= MOST_RANKS:
            raise options.fault("nproc-per-node", ranks, f"auto, gpu, cpu or a number, 1 to {MOST_RANKS:,}")
        launch.node["ranks"] = int(ranks)


def _read_meeting(options: Options, launch: Launch, *, address: str, port: str) -> None:
    """Read how the nodes meet; ``address`` and ``port`` are the options that name the first node."""
    meeting = _read_id(options, launch)
    if (backend := options.text("rdzv-backend", "static")) not in ("static", "c10d"):
        options.leave("rdzv-backend", f"{shown(backend)}: the nodes of a spec meet at the first node")
    host = options.text(address)
    if endpoint := options.text("rdzv-endpoint"):
        user, host, digits, _ = split_target(endpoint)
        if user is not None or not _PORT.fullmatch(digits or "0"):
            raise options.fault("rdzv-endpoint", endpoint, "host:port")
        options.given[port] = Word(digits or "0")
    if number := options.whole(port, 0, most=65535):
        meeting["port"] = number
    if host not in _HERE:
        if not is_address(host):
            raise options.fault("rdzv-endpoint" if endpoint else address, host, "the address of a host")
        launch.address = host
        if launch.nodes[1] == 1:
            launch.left_out.append(f"{host}: is not a host of the spec: make it the host of the first node")
    elif launch.nodes[1] > 1 and host:
        launch.left_out.append(f"{host}: the other nodes cannot reach the first one there: give rendezvous.endpoint")
    if restarts := options.whole("max-restarts", 0, most=1000):
        meeting["max_restarts"] = restarts
    if launch.nodes[0] < launch.nodes[1]:
        meeting["min_nodes"] = launch.nodes[0]
    if meeting:
        launch.fields["rendezvous"] = meeting


def _read_id(options: Options, launch: Launch) -> dict[str, Any]:
    launch.run_id = run_id = options.text("rdzv-id")
    if run_id in ("", "none"):
        return {}
    if not NAME.fullmatch(run_id):
        options.leave("rdzv-id", "is not a valid name for a spec")
        return {}
    if run_id.isdecimal():
        return {"id": run_id}
    launch.name = run_id  # the default id of a spec's rendezvous
    return {}


def _read_conf(options: Options, launch: Launch) -> None:
    word = options.given.pop("rdzv-conf", Word(""))
    for pair in filter(None, word.text.split(",")):
        name, _, value = pair.strip().partition("=")
        if "$" in value and word.fills:
            launch.left_out.append(f"--rdzv-conf {shown(name)}: {_FILLED_IN}")
        elif name in ("timeout", "join_timeout"):
            if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= 86400:
                raise options.fault("rdzv-conf", pair, "a timeout in seconds, 1 to 86400")
            launch.fields.setdefault("rendezvous", {})["timeout_s"] = float(value)
        elif name == "is_host":  # only elastic nodes have it, and they have no node rank
            launch.node_rank = launch.node_rank or int(value in ("0", "false"))
        elif name != "rank":
            launch.left_out.append(f"--rdzv-conf {shown(name)}: {NO_FIELD}")


def _read_accelerate(options: Options, launch: Launch) -> None:
    has_unknown_nodes = bool(options.given.get("num-machines", Word("")).fills)
    nodes = options.whole("num-machines", 1, least=1, most=MOST_NODES)
    launch.nodes = nodes, nodes
    given = options.given.get("num-processes")
    if has_unknown_nodes and given:
        options.leave("num-processes", "the shell expands the number of machines: give nodes.ranks")
    elif given and given.fills:
        options.text("num-processes")
    elif given:
        ranks = options.whole("num-processes", nodes, least=1, most=MOST_RANKS)
        if ranks % nodes:
            raise options.fault("num-processes", str(ranks), f"a multiple of --num-machines, which is {nodes}")
        launch.node["ranks"] = ranks // nodes
    launch.node_rank = options.whole("machine-rank", 0, most=MOST_NODES)
    if options.has("cpu"):
        launch.node["devices"] = "cpu"
    gpus = options.text("gpu-ids", "all")
    if _GPUS.fullmatch(gpus):
        _put_devices(launch, gpus)
    _read_meeting(options, launch, address="main-process-ip", port="main-process-port")
    _read_conf(options, launch)
    options.has("multi-gpu")
    axes: dict[str, Any] = {}
    if options.has("use-fsdp"):
        axes["dp_shard"] = -1
    elif "use-parallelism-config" not in options.given:
        axes |= {"dp_replicate": -1, "dp_shard": 1}
    precision = options.text("mixed-precision", "no")
    if precision == "bf16":
        axes["precision"] = precision
    elif precision != "no":
        options.leave("mixed-precision", f"{shown(precision)}: a spec has only bf16 and fp32")
    if axes:
        launch.fields["parallelism"] = axes
    if "config-file" in options.given:
        options.leave("config-file", "the file is not read: import it, too")


def _put_devices(launch: Launch, gpus: str) -> None:
    """Set the nodes' devices to these GPU indices, if there is one per rank."""
    indices = [int(index) for index in gpus.split(",")]
    ranks = launch.node.get("ranks", len(indices))
    if ranks != len(indices) or len(set(indices)) < len(indices):
        said = f"a node has {count_of(ranks, 'rank')}, and each needs its own GPU: give nodes.devices"
        launch.left_out.append(f"GPUs {gpus}: {said}")
        return
    launch.node.pop("ranks", None)
    launch.node["devices"] = indices


def describe_nodes(launches: Sequence[Launch], *, count: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the nodes that these command lines start, one line for all nodes or one per node, and what is missing.

    A host that no command line names gets its number, such as node-1; a single node is this machine. ``count`` is the
    number of nodes if it is known from elsewhere.
    """
    first = launches[0]
    most = count or first.nodes[1]
    tables = [dict((launches[index] if index < len(launches) else launches[-1]).node) for index in range(most)]
    if most == 1:
        return ([{"host": "localhost", **tables[0]}] if tables[0] else []), []
    for index, table in enumerate(tables):
        table["host"] = first.address if index == 0 and first.address else f"node-{index}"
    unknown = [table["host"] for table in tables if table["host"] != first.address]
    some = unknown[0] if len(unknown) == 1 else f"{unknown[0]} to {unknown[-1]}"
    return [{"host": table.pop("host"), **table} for table in tables], [
        f"nodes: the command has no host name for {some}: write the real one"
    ]
