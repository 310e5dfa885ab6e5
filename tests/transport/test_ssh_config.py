from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import DetrainError, SpecError
from detrain_nb.transport.ssh import find_route, resolve
from detrain_nb.transport.ssh_config import HostSettings, SshTarget, list_hosts, read_config


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own; returns its .ssh."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "me")
    (tmp_path / ".ssh").mkdir()
    return tmp_path / ".ssh"


def user_of(host: str, home: Path) -> str:
    return resolve(SshTarget(host), read_config(home / "config")).user


# Reading, with Include


_AS_PEOPLE_WRITE_IT = """
Include conf.d conf.d/* # all of them
Host a b # two
  Port 46 # not 22
  User 'bob' # the second
  HostName "ten.example" #x
  IdentityFile ${HOME}/k#1
  UserKnownHostsFile ${HOME}/kh
Host cable
  HostName fe80::1%%eth0
Host paths
  UserKnownHostsFile "/a b/kh"
Host paths2
  UserKnownHostsFile "/a b" C:\\kh "D:\\a b" e\\ f 'g\\\\h\\"i' \\\\srv\\x "q\\ r" # last
Match host=c
  User "of-c"
Match originalhost=f
  Port ssh
Host domain
  User DOMAIN\\bob
Host domain2
  User "DOMAIN\\\\bob"
Host *
  User me
"""


@pytest.mark.needs_debian("openssh-server")
@pytest.mark.parametrize("host", ["a", "b", "c", "cable", "domain", "domain2", "f", "in", "paths", "paths2"])
def test_what_people_write_is_read_as_ssh_reads_it(host: str, home: Path) -> None:
    (home / "conf.d" / "sub").mkdir(parents=True)
    (home / "conf.d" / "one").write_text("Host in\n  Port 47\n")
    (home / "config").write_text(_AS_PEOPLE_WRITE_IT)
    asked = ["ssh", "-G", "-F", str(home / "config"), host]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    known = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    found = resolve(SshTarget(host), read_config(home / "config"))
    assert (found.hostname, str(found.port), found.user) == (known["hostname"], known["port"], known["user"])
    if host.startswith("paths"):
        assert " ".join(str(file) for file in found.known_hosts_files[:-2]) == known["userknownhostsfile"]
    if found.identity_files:  # ssh shows these as they are written
        assert host in "ab" and known["identityfile"] == "${HOME}/k#1"
        assert found.identity_files == (f"{home.parent}/k#1",)
        assert found.known_hosts_files[0] == home.parent / "kh"


@pytest.mark.needs_debian("openssh-server")
@pytest.mark.parametrize("alias", ["", "HostKeyAlias rack"])
def test_signs_in_paths_stand_for_what_ssh_puts_there(alias: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):  # variables that ssh does not read
        monkeypatch.delenv(name, raising=False)
    signs = "%h_%p_%r_%n_%k_%L_%l_%i_%u_%%h"
    (home / "config").write_text(
        f"{alias}\nHostName ten.example\nPort 47\nUser bob\nIdentityFile /keys/{signs}\n"
        f'UserKnownHostsFile ${{HOME}}/kh_{signs} "/a b/%h"\n'
    )
    asked = ["ssh", "-F", str(home / "config"), "-v", "-o", "ProxyCommand=true", "-o", "BatchMode=yes", "host.a"]
    names = subprocess.run([*asked, "-G"], capture_output=True, text=True, check=True, timeout=20).stdout
    tried = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20, stdin=subprocess.DEVNULL)
    found = resolve(SshTarget("host.a"), read_config(home / "config"))
    assert f"\nuserknownhostsfile {' '.join(map(str, found.known_hosts_files[:2]))}\n" in names
    assert f"debug1: identity file {found.identity_files[0]} type -1" in tried.stderr.splitlines()
    assert found.identity_files[0].startswith("/keys/ten.example_47_bob_host.a_") and len(found.identity_files) == 1


@pytest.mark.parametrize("line", ["IdentityFile ~/%C", "UserKnownHostsFile ~/kh_%C", "IdentityFile ~/100%"])
def test_sign_that_is_not_read_is_named(line: str, home: Path) -> None:
    with pytest.raises(SpecError, match=r"^the SSH configuration of a has a path with %C?, which is not supported: "):
        resolve(SshTarget("a"), line)
    given = SshTarget("a", identity_file="~/%C")  # a plain path, without % signs to expand
    assert resolve(given, "IdentityFile ~/%j").identity_files == (f"{home.parent}/%C",)


def test_missing_file_is_empty(home: Path) -> None:
    assert read_config(home / "config") == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
@pytest.mark.parametrize("name", ["config", "included"])
def test_file_that_others_can_write_is_refused_as_ssh_does(name: str, home: Path) -> None:
    (home / "config").write_text("Include included\n")
    (home / "included").write_text("Host a\n  User x\n")
    assert user_of("a", home) == "x"
    (home / name).chmod(0o666)
    with pytest.raises(SpecError, match=rf"others can write {home / name} \(mode 0666, .*: chmod go-w {home / name}"):
        user_of("a", home)
    (home / name).chmod(0o644)
    assert user_of("a", home) == "x"


def test_text_without_include_stays_as_it_is(home: Path) -> None:
    text = "Host a b\n  User x\n# Include no\nMatch host c\n\tPort=23"
    (home / "config").write_text(text)
    assert read_config(home / "config") == text


@pytest.mark.timeout(30)
@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in a folder")
@pytest.mark.parametrize(
    "config, complaint",
    [
        ("Include pipe\n", "cannot be read: it is not a regular file"),
        ("Include /dev/zero\n", "cannot be read: it is not a regular file"),
        ("Include again0\n", "has more than 1 MB with all included files"),
        ("Host a\n  User" + " " * 200_000 + "\n", ""),
    ],
)
def test_config_takes_neither_all_memory_nor_all_time(config: str, complaint: str, home: Path) -> None:
    os.mkfifo(home / "pipe")
    for number in range(15):
        (home / f"again{number}").write_text(f"Include again{number + 1}\n" * 9)
    (home / "config").write_text(config)
    if complaint:
        with pytest.raises(SpecError, match=complaint):
            list_hosts(home / "config")
    else:
        assert list_hosts(home / "config") == ("a",)


def test_include_before_any_host_is_for_all(home: Path) -> None:
    (home / "config").write_text("Include other\nHost *\nUser late\n")
    (home / "other").write_text("User first\n")
    assert user_of("any", home) == "first"


def test_options_after_an_include_stay_in_their_block(home: Path) -> None:
    (home / "config").write_text("Host gpu1\n  Include other\n  User x\nHost *\n  User y\n")
    (home / "other").write_text("Host gpu2\n  Port 2222\n")
    assert "Host gpu1\n  User x" in read_config(home / "config")
    assert user_of("gpu1", home) == "x"
    assert user_of("gpu2", home) == "y"


def test_options_after_an_include_at_the_top_are_for_all(home: Path) -> None:
    (home / "config").write_text("Include other\nUser all\n")
    (home / "other").write_text("Host gpu2\n  User two\n")
    assert user_of("gpu1", home) == "all"
    assert user_of("gpu2", home) == "two"


def test_included_options_hold_where_the_block_around_does(home: Path) -> None:
    (home / "config").write_text("Host gpu*\n  Include other\nHost *\n  User nobody\n")
    (home / "other").write_text("User all-gpus\n")
    assert user_of("gpu1", home) == "all-gpus"
    assert user_of("cpu1", home) == "nobody"


def test_included_host_holds_only_within_the_block_around(home: Path) -> None:
    (home / "config").write_text("Host gpu* !gpu9\n  Include other\nHost *\n  User nobody\n")
    (home / "other").write_text("Host *1 gpu9\n  User one\nMatch user nobody\n  Port 3\nMatch all\n  Port 2222\n")
    assert user_of("gpu1", home) == "one"
    assert user_of("cpu1", home) == "nobody"
    assert user_of("gpu9", home) == "nobody"
    text = read_config(home / "config")
    assert [resolve(SshTarget(name), text).port for name in ("gpu1", "gpu2", "gpu9", "cpu1")] == [2222, 2222, 22, 22]


def test_include_takes_patterns_quotes_several_files_and_the_home(home: Path, tmp_path: Path) -> None:
    (home / "conf.d").mkdir()
    for number in (2, 1):
        (home / "conf.d" / f"{number}.conf").write_text(f"Host h{number}\nUser u{number}\n")
    (tmp_path / "a b").write_text("Host h3\nUser u3\n")
    (home / "config").write_text(f'Include conf.d/*.conf "{tmp_path}/a b" ~/.ssh/none missing*\nINCLUDE=~/.ssh/last\n')
    (home / "last").write_text("Host h4\nUser u4\n")
    assert [user_of(f"h{number}", home) for number in (1, 2, 3, 4)] == ["u1", "u2", "u3", "u4"]


def test_includes_nest_sixteen_deep_and_no_deeper(home: Path) -> None:
    for depth in range(18):
        (home / f"c{depth}").write_text(f"Include c{depth + 1}\nHost d{depth}\nUser u{depth}\n")
    assert user_of("d16", _rename(home, 1)) == "u16"
    with pytest.raises(SpecError, match="nested deeper than 16"):
        read_config(_rename(home, 0) / "config")


def _rename(home: Path, first: int) -> Path:
    (home / "config").write_text((home / f"c{first}").read_text())
    return home


def test_file_that_includes_itself_is_an_error(home: Path) -> None:
    (home / "config").write_text("Include config\n")
    with pytest.raises(SpecError, match="check that no file includes itself"):
        read_config(home / "config")


def test_match_that_cannot_be_decided_never_holds(home: Path) -> None:
    (home / "config").write_text("Match sessiontype shell host *\n  User wrong\nMatch Host gpu1\n  User right\n")
    assert user_of("gpu1", home) == "right"


def test_never_is_a_name_like_others(home: Path) -> None:
    (home / "config").write_text("Host never\n  User x\n  Include other\n")
    (home / "other").write_text("Host ne*\nPort 23\n")
    assert resolve(SshTarget("never"), read_config(home / "config")).port == 23


@pytest.mark.parametrize("text", ["Host", "Match host", "Host 'a", "Include 'a", "Match host 'a", "Host a\n  User"])
def test_line_that_cannot_be_read_is_an_error_of_ours(text: str, home: Path) -> None:
    (home / "config").write_text(text)
    try:
        resolve(SshTarget("a"), read_config(home / "config"))
    except SpecError:
        pass


def test_folder_in_place_of_a_file_is_an_error_of_ours(home: Path) -> None:
    (home / "config").mkdir()
    with pytest.raises(SpecError, match="config cannot be read"):
        read_config(home / "config")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.text(max_size=30)
        | st.builds(
            "{} {}".format,
            st.sampled_from(
                [
                    "Host",
                    "Match",
                    "Include",
                    "User",
                    "Port",
                    "ProxyJump",
                    "HostName",
                    "IdentityFile",
                    "UserKnownHostsFile",
                ]
            ),
            st.text(alphabet="abc *?!,%~'\"0189.@:[]\\", max_size=12),
        )
    )
)
def test_no_text_at_all_raises_anything_but_ours(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("config") / "config"
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        find_route(SshTarget("abc"), read_config(path))
    except DetrainError:
        pass


# Targets


def test_target_overrides_the_configuration() -> None:
    text = "Host gpu1\nHostName 10.0.0.1\nPort 2222\nUser root\nIdentityFile ~/a\nProxyJump b\n"
    assert resolve(SshTarget("gpu1"), text) == HostSettings(
        hostname="10.0.0.1",
        port=2222,
        user="root",
        identity_files=(str(Path.home() / "a"),),
        proxy_jump=(SshTarget("b"),),
        known_hosts_files=resolve(SshTarget("x"), "").known_hosts_files,
    )
    mine = SshTarget("gpu1", host="10.0.0.2", port=23, user="me", identity_file="~/b", proxy_jump="none")
    settings = resolve(mine, text)
    assert (settings.hostname, settings.port, settings.user) == ("10.0.0.2", 23, "me")
    assert settings.identity_files == (str(Path.home() / "b"),)
    assert settings.identities_only
    assert settings.proxy_jump == ()


def test_nothing_said_means_what_ssh_does() -> None:
    settings = resolve(SshTarget("gpu1"), "")
    assert (settings.hostname, settings.port, settings.user) == ("gpu1", 22, "me")
    assert settings.identity_files == ()
    assert settings.use_agent
    assert not settings.identities_only
    assert settings.host_key_alias is None
    assert settings.known_hosts_files[:2] == (Path.home() / ".ssh/known_hosts", Path.home() / ".ssh/known_hosts2")
    if sys.platform == "linux":
        assert settings.known_hosts_files[2] == Path("/etc/ssh/ssh_known_hosts")


def test_options_that_decide_on_keys_are_read() -> None:
    text = (
        "IdentityFile ~/a\nIdentityFile ~/%h\nIdentitiesOnly yes\nIdentityAgent none\nHostKeyAlias rack\n"
        'UserKnownHostsFile ~/one "%d/a b"\nGlobalKnownHostsFile /three\n'
    )
    settings = resolve(SshTarget("gpu1"), text)
    assert settings.identity_files == (str(Path.home() / "a"), str(Path.home() / "gpu1"))
    assert settings.identities_only
    assert not settings.use_agent
    assert settings.host_key_alias == "rack"
    assert settings.known_hosts_files == (Path.home() / "one", Path.home() / "a b", Path("/three"))


def test_known_hosts_files_that_keep_nothing_count_as_not_given() -> None:
    text = "UserKnownHostsFile /dev/null\nGlobalKnownHostsFile none\nStrictHostKeyChecking no\n"
    assert resolve(SshTarget("a"), text).known_hosts_files == resolve(SshTarget("a"), "").known_hosts_files


def test_route_goes_through_the_hosts_in_between_and_what_leads_to_them() -> None:
    text = "Host gpu1\nProxyJump b1,me@b2:2222\nHost b1\nHostName 10.0.0.1\nUser x\nProxyJump outer\n"
    route = find_route(SshTarget("gpu1", user="root", identity_file="~/k"), text)
    assert [settings.where for settings in route] == ["me@outer:22", "x@10.0.0.1:22", "me@b2:2222", "root@gpu1:22"]
    assert [len(settings.identity_files) for settings in route] == [0, 0, 0, 1]


def test_host_that_leads_to_itself_is_reached_directly() -> None:
    route = find_route(SshTarget("gpu1"), "Host *\nProxyJump bastion\n")
    assert [settings.hostname for settings in route] == ["bastion", "gpu1"]
    route = find_route(SshTarget("a"), "Host a\nProxyJump b\nHost b\nProxyJump a\n")
    assert [settings.hostname for settings in route] == ["b", "a"]


def test_first_of_proxyjump_and_proxycommand_holds() -> None:
    assert resolve(SshTarget("a"), "ProxyJump b\nProxyCommand nc %h %p\n").proxy_jump == (SshTarget("b"),)
    assert resolve(SshTarget("a"), "ProxyCommand none\nProxyJump b\n").proxy_jump == ()
    with pytest.raises(SpecError, match="a has a ProxyCommand, which is not supported: use ProxyJump"):
        resolve(SshTarget("a"), "ProxyCommand nc %h %p\nProxyJump b\n")


@pytest.mark.parametrize(
    "text, target",
    [
        ("gpu1", SshTarget("gpu1")),
        ("me@gpu1", SshTarget("gpu1", user="me")),
        ("gpu1:23", SshTarget("gpu1", port=23)),
        ("me@gpu1:23", SshTarget("gpu1", user="me", port=23)),
        ("ssh://me@gpu1:23", SshTarget("gpu1", user="me", port=23)),
        ("me@corp.org@gpu1", SshTarget("gpu1", user="me@corp.org")),
        ("fe80::1", SshTarget("fe80::1")),
        ("me@fe80::1", SshTarget("fe80::1", user="me")),
        ("me@[fe80::1]:23", SshTarget("fe80::1", user="me", port=23)),
        ("me@[fe80::1%eth0]:23", SshTarget("fe80::1%eth0", user="me", port=23)),
    ],
)
def test_host_is_read_as_ssh_writes_it(text: str, target: SshTarget) -> None:
    assert SshTarget.parse(text) == target


BAD_NAMES = [
    "",
    "-oProxyCommand=x",
    "a b",
    "a\tb",
    "a\nb",
    "a\0b",
    "a\x7fb",
    "a'b",
    'a"b',
    "a;b",
    "a$b",
    "$(a)",
    "a`b",
    "a<b",
    "a>b",
    "a|b",
    "a&b",
    "a\\b",
    "a/b",
    "a\u202eb",
    "a\u200bb",
    "büro",
    "а1",  # noqa: RUF001  # a Cyrillic letter
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_name_that_could_be_more_than_a_name_is_refused(name: str) -> None:
    for make in (
        lambda: SshTarget(name),
        lambda: SshTarget("a", host=name),
        lambda: SshTarget("a", user=name if name != "a\\b" else "a\\"),
        lambda: SshTarget("a", proxy_jump=f"b,{name}"),
        lambda: HostSettings(name, 22, "me"),
        lambda: HostSettings("a", 22, name if name != "a\\b" else "\\b"),
        lambda: HostSettings("a", 22, "me", host_key_alias=name),
    ):
        with pytest.raises(SpecError) as caught:
            make()
        assert str(caught.value).isprintable()


def test_letter_outside_ascii_is_named() -> None:
    with pytest.raises(SpecError, match=r"'\\xfc' is not an ASCII letter"):
        SshTarget("büro")


@pytest.mark.parametrize(
    "line", ["HostName a;b", "HostName -oX", "User $(x)", "Port 0", "Port 70000", "Port x", "ProxyJump a;b"]
)
def test_configuration_is_held_to_the_same(line: str) -> None:
    with pytest.raises(SpecError):
        resolve(SshTarget("a"), line)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_port_is_a_port(port: int) -> None:
    with pytest.raises(SpecError, match=f"port {port} of a is not between 1 and 65535"):
        SshTarget("a", port=port)


@pytest.mark.parametrize("path", ["", "  ", "a\nb", "a\x1b[2J"])
def test_identity_file_is_a_file_name(path: str) -> None:
    with pytest.raises(SpecError, match="is not a valid path"):
        SshTarget("a", identity_file=path)


def test_at_sign_is_for_users_only() -> None:
    assert SshTarget("a", user="me@corp.org").user == "me@corp.org"
    with pytest.raises(SpecError, match="'@' is not allowed"):
        SshTarget("me@a")


# The hosts that are named


def test_hosts_are_those_that_are_named_not_patterns(home: Path) -> None:
    text = "Host gpu1 gpu-* !gpu9 10.0.0.? # not this\n  HostName a\nHost *\nMatch user gpu4\nHost gpu1\n"
    text += "host=\"gpu 2\" 'gpu3'\n"
    (home / "config").write_text(text)
    assert list_hosts(home / "config") == ("gpu1", "gpu3")


def test_hosts_of_included_files_are_named_too_also_inside_a_block(home: Path) -> None:
    (home / "config").write_text("Include top\nHost gpu*\n  Include inner\nHost last\n")
    (home / "top").write_text("Host first\nUser x\n")
    (home / "inner").write_text("Host gpu7 gpu8\nUser y\n")
    assert list_hosts(home / "config") == ("first", "gpu7", "gpu8", "last")


def test_no_config_names_no_host(home: Path) -> None:
    assert list_hosts(home / "config") == ()
