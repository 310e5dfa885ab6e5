"""Wrong lines of magics: a one-line error says what is wrong and what to do, and names the command's options."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from detrain_nb.magics import options
from detrain_nb.magics.candidates import similar_nodes
from detrain_nb.magics.holder import SessionHolder, StartOptions, ask_passphrase
from IPython.core.error import StdinNotImplementedError, UsageError

from detrain_nb.deploy.known import remember
from detrain_nb.errors import SessionError, TransportError
from detrain_nb.spec.node import Node

_PARSERS: dict[str, Callable[[], options.LineParser]] = {
    "%distributed": options.session_parser,
    "%%distributed": options.cell_parser,
    "%%rank": lambda: options.cell_parser("%%rank"),
    "%pull": options.pull_parser,
    "%push": options.push_parser,
    "%broadcast": options.broadcast_parser,
}
_COMMANDS = (
    "start, status, board, where, vars, stop, restart, shrink, interrupt, replay, attach, detach, list, put, get, "
    "data, doctor, nodes, config, log"
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # no such command
        ("%distributed statsu", "unknown command 'statsu': did you mean status or start?"),
        ("%distributed START", f"unknown command 'START': choose from {_COMMANDS}"),
        ("%distributed intrrupt", "unknown command 'intrrupt': did you mean interrupt?"),
        ("%distributed nosuch", f"unknown command 'nosuch': choose from {_COMMANDS}"),
        ("%distributed --nodes gpu1", "--nodes must follow a subcommand: %distributed start --nodes"),
        ("%distributed -n 2", "-n must follow a subcommand: %distributed start -n"),
        # no such option
        ("%distributed start --node gpu1", "unknown option --node: did you mean --nodes?"),
        ("%distributed start --no-synk", "unknown option --no-synk: did you mean --no-sync?"),
        ("%distributed start --group-timout=3", "unknown option --group-timout: did you mean --group-timeout?"),
        ("%distributed attach --steel", "unknown option --steel: did you mean --steal?"),
        ("%distributed doctor --bandwith", "unknown option --bandwith: did you mean --bandwidth?"),
        ("%distributed doctor --sped", "unknown option --sped: did you mean --speed?"),
        ("%distributed list -x", "unknown option -x: choose from --help"),
        ("%distributed stop --force", "unknown option --force: choose from --help"),
        ("%distributed put a -r 0", "unknown option -r: choose from --help, --to, --nodes"),
        ("%%distributed --quite", "unknown option --quite: did you mean --quiet?"),
        ("%pull x --into y", "unknown option --into: choose from --help, -r, --ranks, --as"),
        # a value is missing
        ("%distributed start --nodes", "--nodes needs a value: --nodes NODES"),
        ("%distributed start --nodes --no-init", "--nodes needs a value: --nodes NODES"),
        ("%distributed start -n", "-n needs a value: -n N"),
        ("%distributed start --device", "--device needs a value: --device auto|cpu|cuda"),
        ("%distributed start --env", "--env needs a value: --env K=V"),
        ("%distributed restart --env", "--env needs a value: --env K=V"),
        ("%distributed interrupt -r", "--ranks needs a value: --ranks RANKS"),
        ("%distributed interrupt --kill", "--kill needs a value: --kill RANKS"),
        ("%distributed replay -r", "--ranks needs a value: --ranks RANKS"),
        ("%distributed replay", "the following arguments are required: -r/--ranks"),
        ("%distributed put", "the following arguments are required: FILE"),
        ("%distributed put a --to", "--to needs a value: --to FOLDER"),
        ("%distributed get", "the following arguments are required: REMOTE"),
        ("%distributed data", "the following arguments are required: check, PATH"),
        ("%distributed data check", "the following arguments are required: PATH"),
        ("%distributed doctor --nodes", "--nodes needs a value: --nodes NODES"),
        ("%distributed attach --nodes", "--nodes needs a value: --nodes NODES"),
        ("%distributed log --cell", "--cell needs a value: --cell CELL"),
        ("%%distributed -r", "--ranks needs a value: --ranks RANKS"),
        ("%%distributed --merge", "--merge needs a value: --merge same|all|rank0"),
        ("%%rank", "the following arguments are required: RANKS"),
        ("%push", "the following arguments are required: NAME[,NAME...]"),
        ("%broadcast x --from", "--from needs a value: --from RANK"),
        # an invalid value
        ("%distributed put ''", "argument FILE: a name must not be empty"),
        ("%distributed data check ''", "argument PATH: a name must not be empty"),
        ("%distributed start --name ''", "argument --name: a name must not be empty"),
        ("%distributed start -n x", "argument -n: 'x' is not a whole number"),
        ("%distributed start -n 1.5", "argument -n: '1.5' is not a whole number"),
        ("%distributed start -n 0", "argument -n: 0 ranks: give 1 or more"),
        ("%distributed start -n -1", "argument -n: -1 ranks: give 1 or more"),
        ("%distributed restart -n 100000", "argument -n: 100000 ranks: give at most 65,536"),
        ("%distributed start --seed 1e3", "argument --seed: '1e3' is not a whole number"),
        (f"%distributed start --seed {10**30}", "give a number from -2**62 to 2**62"),
        ("%distributed start --linger 1e300", "argument --linger: 1e300 seconds: give 0 or more, at most 100000000"),
        ("%%distributed --timeout nan", "argument --timeout: nan seconds: give more than 0, at most 100000000"),
        ("%%distributed --timeout 1e300", "argument --timeout: 1e300 seconds: give more than 0, at most 100000000"),
        (
            f"%%distributed --max-lines {10**12}",
            f"argument --max-lines: {10**12} is more than 1000000000; 0 means no limit",
        ),
        ("%distributed start --device gpu", "--device 'gpu': give one of auto, cpu, cuda"),
        ("%distributed start --start spawn", "--start 'spawn': give one of fork, exec"),
        ("%distributed start --seed x", "argument --seed: 'x' is not a whole number"),
        ("%distributed start --linger x", "argument --linger: 'x' is not a number"),
        ("%distributed start --linger inf", "argument --linger: inf seconds: give 0 or more"),
        ("%distributed start --linger -1", "argument --linger: -1 seconds: give 0 or more"),
        ("%distributed start --group-timeout 0", "argument --group-timeout: 0 seconds: give more than 0"),
        ("%distributed start --group-timeout nan", "argument --group-timeout: nan seconds: give more than 0"),
        ("%distributed start --env TOKEN", "argument --env: 'TOKEN': give KEY=VALUE"),
        ("%distributed restart -n 2 -r 1", "argument -r/--ranks: not allowed with argument -n"),
        ("%distributed data chekc x", "check 'chekc': give one of check"),
        ("%distributed log --cell last", "argument --cell: 'last' is not a whole number"),
        ("%%distributed --timeout x", "argument --timeout: 'x' is not a number"),
        ("%%distributed --max-lines -1", "argument --max-lines: -1 is less than 0; 0 means no limit"),
        ("%%distributed --merge some", "--merge 'some': give one of same, all, rank0"),
        ("%broadcast x --from gpu1", "argument --from: 'gpu1' is not a whole number"),
        # an extra word
        ("%distributed start gpu1,gpu2", "unexpected argument 'gpu1,gpu2': did you mean --nodes gpu1,gpu2?"),
        ("%distributed doctor gpu1", "unexpected argument 'gpu1': did you mean --nodes gpu1?"),
        ("%distributed restart 1", "unexpected argument '1': did you mean -r 1?"),
        ("%distributed interrupt 0,1", "unexpected argument '0,1': did you mean -r 0,1?"),
        ("%distributed replay -r 1 3", "unexpected argument '3': did you mean --cells 3?"),
        ("%distributed log 3", "unexpected argument '3': did you mean --cell 3?"),
        ("%distributed status now", "unexpected argument 'now': leave it out"),
        ("%distributed attach one two", "unexpected argument 'two': leave it out"),
        ("%distributed start 'a b'", "unexpected argument 'a b': did you mean --nodes 'a b'?"),
        ("%%distributed gpu1", "unexpected argument 'gpu1': did you mean -r gpu1?"),
        ("%%rank 0 1", "unexpected argument '1': separate several ranks by commas, as in 0,2"),
        ("%pull a b", "unexpected argument 'b': separate names by commas; ranks must follow -r"),
        ("%distributed start 'x", "No closing quotation: start 'x"),
    ],
)
def test_wrong_line_says_what_to_do(line: str, said: str) -> None:
    prog, _, rest = line.partition(" ")
    with pytest.raises(UsageError) as caught:
        _PARSERS[prog]().parse_line(rest)
    words = str(caught.value)
    assert said in words
    assert words.count("\n") == 0
    if "quotation" not in said:
        command = rest.split()[0] if prog == "%distributed" and "command" not in said else ""
        assert words.startswith(f"{prog} {command}".strip() + ": ")
        assert words.endswith(" --help)")


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("hang=nan", "hang must be a number, 0 or more, not 'nan'"),
        ("hang=1e300", "hang must be at most 100000000, not '1e300'"),
        ("timeout=-1", "timeout must be a number, 0 or more, not '-1'"),
        ("warm=inf", "warm must be a number, 0 or more, not 'inf'"),
        (f"max_lines={10**12}", f"max_lines must be at most 1000000000, not '{10**12}'"),
        ("max_chars=1e3", "max_chars must be a number, 0 or more, not '1e3'"),
    ],
)
def test_setting_that_cannot_be_says_what_is_allowed(assignment: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"^%distributed config: {said}$"):
        options.Settings().changed(assignment)


def test_value_that_begins_like_an_option_follows_an_equals_sign() -> None:
    assert options.session_parser().parse_line("log --cell=-2 -r=-1").ranks == "-1"


@pytest.mark.parametrize(
    ("prog", "line", "expected"),
    [
        ("%pull", "a, b ,c -r 0, 2", {"names": "a,b,c", "ranks": "0,2"}),
        ("%push", "a,b, -r 1", {"names": "a,b,", "ranks": "1"}),
        ("%broadcast", "model, opt --from 1", {"names": "model,opt", "source": 1}),
        ("%%rank", "0, 2 --quiet", {"ranks": "0,2", "quiet": True}),
    ],
)
def test_blanks_beside_the_commas_of_a_list_mean_nothing(prog: str, line: str, expected: dict[str, object]) -> None:
    assert expected.items() <= vars(_PARSERS[prog]().parse_line(line)).items()


def test_log_takes_ranks_as_the_others_do() -> None:
    parser = options.session_parser()
    assert {parser.parse_line(f"log {option} 1").ranks for option in ("-r", "--ranks", "--rank")} == {"1"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an SSH config, a nodes file and a run directory; it is the current folder."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host gpu1 gpu2 gpu1.invalid\nHost *\n")
    (tmp_path / "nodes.toml").touch()
    (tmp_path / "cluster").touch()
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "question"),
    [
        ("gpu11", "did you mean gpu1?"),
        ("gpu1,gpu22", "did you mean gpu2?"),
        ("alice@gqu2:22", "did you mean gpu2?"),
        ("nodes.tmol", "did you mean nodes.toml?"),
        ("nodes.toml", ""),
        (
            "cluster",
            "cluster is not a nodes file: %pipeline import cluster -o nodes.toml converts a list of hosts",
        ),
        ("gpu1", ""),
        ("elsewhere.example.org", ""),
        ("", ""),
    ],
)
def test_host_that_nobody_knows_is_perhaps_another(home: Path, nodes: str, question: str) -> None:
    assert similar_nodes(nodes) == question


@pytest.fixture
def holder(home: Path) -> SessionHolder:
    return SessionHolder(SimpleNamespace(user_ns={}))


def test_start_on_a_host_with_a_typo_asks_for_the_other(holder: SessionHolder) -> None:
    with pytest.raises(TransportError) as caught:
        holder.start(StartOptions(nodes="gpu11.invalid"))
    first, question = str(caught.value).splitlines()
    assert first.startswith("gpu11.invalid: ")
    assert "does not resolve" in first
    assert question == "did you mean gpu1.invalid?"


def test_session_with_a_typo_is_perhaps_another(holder: SessionHolder) -> None:
    said = "no session 'trian' is running on this machine, or was started from it; "
    with pytest.raises(SessionError, match=f"^{said}known sessions: none$"):
        holder.attach("trian", nodes=None, steal=False)
    remember("train", [Node(host="gpu1")], holder="a notebook")
    with pytest.raises(SessionError, match=f"^{said}did you mean train\\?$"):
        holder.attach("trian", nodes=None, steal=False)
    with pytest.raises(SessionError, match=f"^{said}did you mean train\\?$"):
        holder.end("trian")


@pytest.mark.parametrize("error", [StdinNotImplementedError("no frontend"), EOFError()])
def test_no_passphrase_is_given_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Without a passphrase, the error about the key says what the user can do."""

    def ask(prompt: str) -> str:
        raise error

    monkeypatch.setattr(getpass, "getpass", ask)
    assert ask_passphrase("key") is None
