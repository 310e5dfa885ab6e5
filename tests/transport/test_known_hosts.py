from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shlex
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import HostKeyError, TransportError
from detrain_nb.transport.known_hosts import KnownHosts, fingerprint

ED25519, ECDSA, RSA = "ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"


def make_blob(key_type: str, seed: str = "a") -> bytes:
    """Return a public key in SSH's wire format: its type, and arbitrary bytes."""
    rest = hashlib.sha256(seed.encode()).digest()
    return struct.pack(">I", len(key_type)) + key_type.encode() + struct.pack(">I", len(rest)) + rest


def write_key(key_type: str, seed: str = "a") -> str:
    return f"{key_type} {base64.b64encode(make_blob(key_type, seed)).decode()}"


def hash_name(name: str, salt: bytes = b"0123456789abcdefghij") -> str:
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def read(folder: Path, *lines: str) -> KnownHosts:
    file = folder / "known_hosts"
    file.write_text("".join(f"{line}\n" for line in lines))
    return KnownHosts.read([file])


def is_known(known: KnownHosts, host: str, port: int = 22, key_type: str = ED25519) -> bool:
    try:
        known.check(host, port, key_type, make_blob(key_type))
    except TransportError:
        return False
    return True


FOUND = {
    "a name": ("gpu1", "gpu1", 22),
    "a name in capitals": ("GPU1", "gpu1", 22),
    "a host in capitals": ("gpu1", "GPU1", 22),
    "one of a list": ("gpu1,10.0.0.1", "10.0.0.1", 22),
    "a star": ("gpu*.example.org", "gpu17.example.org", 22),
    "a star for nothing": ("gpu*", "gpu", 22),
    "a question mark": ("gpu?", "gpu1", 22),
    "a port": ("[gpu1]:2222", "gpu1", 2222),
    "a port behind a star": ("[gpu*]:2222", "gpu1", 2222),
    "a star for all, ports too": ("*", "gpu1", 2222),
    "a name for any port": ("gpu1", "gpu1", 2222),
    "an IPv6 address": ("fe80::1", "fe80::1", 22),
    "an IPv6 address with a port": ("[fe80::1]:2222", "fe80::1", 2222),
    "a hash": (hash_name("gpu1"), "gpu1", 22),
    "a hash of a port": (hash_name("[gpu1]:2222"), "gpu1", 2222),
    "not negated": ("gpu*,!gpu9", "gpu1", 22),
}
NOT_FOUND = {
    "another name": ("gpu2", "gpu1", 22),
    "the beginning of a name": ("gpu", "gpu1", 22),
    "a name with a port on port 22": ("[gpu1]:2222", "gpu1", 22),
    "another port": ("[gpu1]:2222", "gpu1", 2223),
    "a question mark for nothing": ("gpu?", "gpu", 22),
    "a question mark for two": ("gpu?", "gpu12", 22),
    "negated": ("gpu*,!gpu1", "gpu1", 22),
    "negated before": ("!gpu1,gpu*", "gpu1", 22),
    "negated by a star": ("*,!gpu*", "gpu1", 22),
    "only a negation": ("!gpu2", "gpu1", 22),
    "brackets as a set of letters": ("gpu[12]", "gpu1", 22),
    "a hash of another": (hash_name("gpu2"), "gpu1", 22),
    "a hash that is none": ("|1|====|gpu1", "gpu1", 22),
    "a hash of another kind": (hash_name("gpu1").replace("|1|", "|2|"), "gpu1", 22),
}


@pytest.mark.parametrize("case", FOUND)
def test_key_is_known(case: str, tmp_path: Path) -> None:
    patterns, host, port = FOUND[case]
    assert is_known(read(tmp_path, f"{patterns} {write_key(ED25519)} a comment"), host, port)


@pytest.mark.parametrize("case", NOT_FOUND)
def test_key_is_not_known(case: str, tmp_path: Path) -> None:
    patterns, host, port = NOT_FOUND[case]
    known = read(tmp_path, f"{patterns} {write_key(ED25519)}")
    assert not is_known(known, host, port)
    assert known.key_types(host, port) == ()


@pytest.mark.needs_debian("openssh-server")
@pytest.mark.parametrize("case", [*FOUND, *NOT_FOUND])
def test_ssh_keygen_finds_the_same_lines(case: str, tmp_path: Path) -> None:
    patterns, host, port = (FOUND | NOT_FOUND)[case]
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "known_hosts").write_text(f"{patterns} {(tmp_path / 'key.pub').read_text()}")
    ours = bool(KnownHosts.read([tmp_path / "known_hosts"]).key_types(host, port))
    names = [host.lower()] if port == 22 else [f"[{host.lower()}]:{port}", host.lower()]
    asked = [["ssh-keygen", "-F", name, "-f", tmp_path / "known_hosts"] for name in names]
    assert ours == any(subprocess.run(line, capture_output=True).returncode == 0 for line in asked)


def test_ssh_keygen_shows_the_same_fingerprint(tmp_path: Path) -> None:
    public = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"  # github.com's
    assert fingerprint(base64.b64decode(public.split()[1])) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"


def test_key_types_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(f"gpu1 {write_key(ED25519)}\ngpu1 {write_key(RSA)}\n")
    (tmp_path / "one").write_text(f"gpu1 {write_key(RSA)}\ngpu2 {write_key(ECDSA)}\n")
    assert KnownHosts.read([tmp_path / "one", other, tmp_path / "missing"]).key_types("gpu1", 22) == (RSA, ED25519)


def test_lines_that_are_none_are_passed_over(tmp_path: Path) -> None:
    known = read(
        tmp_path,
        "",
        "   ",
        "# a comment",
        f"#gpu1 {write_key(RSA)}",
        "gpu1",
        "gpu1 ssh-ed25519",
        "gpu1 ssh-ed25519 !!!!",
        "gpu1 ssh-ed25519 AAAA",
        f"gpu1 ssh-rsa {write_key(ED25519).split()[1]}",
        "gpu1 1024 35 1234567890123456789",
        "\x00\x01\x02 \udce4".encode(errors="replace").decode(errors="replace"),
        f"@unknown-marker gpu1 {write_key(RSA)}",
        f"@cert-authority gpu1 {write_key(RSA)}",
        "@revoked",
        f"\t gpu1 \t {write_key(ED25519)}\r",
    )
    assert known.key_types("gpu1", 22) == (ED25519,)
    assert is_known(known, "gpu1")


def test_file_that_is_not_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_bytes(bytes(range(256)) + f"\ngpu1 {write_key(ED25519)}\n".encode())
    assert is_known(KnownHosts.read([tmp_path / "known_hosts"]), "gpu1")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text() | st.text(alphabet="@#|![]*?, 1gpuAssh-ed25519=\t")))
def test_no_line_at_all_stops_the_reading(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    file = tmp_path_factory.mktemp("garbage") / "known_hosts"
    text = "\n".join([*lines, f"gpu1 {write_key(ED25519)}"])
    file.write_bytes(text.encode(errors="surrogatepass"))
    known = KnownHosts.read([file])
    assert is_known(known, "gpu1") or any("gpu1" in line for line in lines)
    known.key_types("[gpu1", 2222)


def test_revoked_key_is_refused_though_another_line_lists_it(tmp_path: Path) -> None:
    for host, port in (("gpu1", 22), ("gpu1", 2222)):
        known = read(tmp_path, f"* {write_key(ED25519)}", f"@revoked gpu1 {write_key(ED25519)}")
        with pytest.raises(TransportError, match=rf"is revoked \({tmp_path}/known_hosts, line 2\)"):
            known.check(host, port, ED25519, make_blob(ED25519))
        assert known.key_types(host, port) == ()
    assert is_known(known, "gpu2"), "revoked for gpu1 only"


def test_unknown_key_is_refused_with_its_fingerprint_and_the_command_that_adds_it(tmp_path: Path) -> None:
    known = read(tmp_path, f"gpu2 {write_key(ED25519)}")
    with pytest.raises(TransportError) as caught:
        known.check("gpu1", 2222, ED25519, make_blob(ED25519))
    message = str(caught.value)
    assert "the host key of [gpu1]:2222 is not known" in message
    assert fingerprint(make_blob(ED25519)) in message
    assert "compare this fingerprint" in message
    assert message.endswith(f"add the key: echo '[gpu1]:2222 {write_key(ED25519)}' >> {tmp_path}/known_hosts")


@pytest.mark.parametrize("key_type", [ED25519, ECDSA, RSA])
@pytest.mark.parametrize("port", [22, 2222])
def test_command_that_adds_a_key_adds_the_one_that_was_shown(
    key_type: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "a file's $name"
    with pytest.raises(HostKeyError) as caught:
        KnownHosts.read([file]).check("gpu1", port, key_type, make_blob(key_type))
    command = caught.value.command
    assert command.endswith(""" >> ~/'a file'"'"'s $name'"""), "a file in the home is named shortly"
    subprocess.run(["sh", "-c", command], check=True)
    assert is_known(KnownHosts.read([file]), "gpu1", port, key_type)


CHANGED = {
    "another key of that type": ("gpu1", 22, write_key(ED25519, "b"), "gpu1"),
    "only a key of another type": ("gpu1", 22, write_key(RSA), "gpu1"),
    "on a port": ("[gpu1]:2222", 2222, write_key(ED25519, "b"), "[gpu1]:2222"),
    "hashed": (hash_name("gpu1"), 22, write_key(ED25519, "b"), "gpu1"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_changed_key_is_refused_with_the_place_of_the_known_one(case: str, tmp_path: Path) -> None:
    patterns, port, known_key, name = CHANGED[case]
    known = read(tmp_path, "# first", f"{patterns} {known_key}")
    with pytest.raises(TransportError) as caught:
        known.check("gpu1", port, ED25519, make_blob(ED25519))
    message = str(caught.value)
    assert f"the host key of {name} has changed" in message
    assert fingerprint(make_blob(ED25519)) in message
    assert f"{tmp_path}/known_hosts, line 2" in message
    assert shlex.join(["ssh-keygen", "-R", name, "-f", str(tmp_path / "known_hosts")]) in message


def test_key_known_without_the_port_says_nothing_of_another_key_on_a_port(tmp_path: Path) -> None:
    known = read(tmp_path, f"gpu1 {write_key(ED25519, 'b')}")
    with pytest.raises(TransportError, match=r"\[gpu1\]:2222 is not known"):
        known.check("gpu1", 2222, ED25519, make_blob(ED25519))


def test_one_right_key_among_others_is_enough(tmp_path: Path) -> None:
    known = read(tmp_path, f"gpu1 {write_key(ED25519, 'b')}", f"gpu1 {write_key(RSA)}", f"gpu1 {write_key(ED25519)}")
    assert is_known(known, "gpu1")


def test_nothing_is_written(tmp_path: Path) -> None:
    known = read(tmp_path, f"gpu1 {write_key(ED25519, 'b')}")
    before = (tmp_path / "known_hosts").read_bytes()
    for host in ("gpu1", "gpu2"):
        with pytest.raises(TransportError):
            known.check(host, 22, ED25519, make_blob(ED25519))
    assert (tmp_path / "known_hosts").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["known_hosts"]


@pytest.mark.timeout(30)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in a folder")
def test_pipe_is_an_error_and_dev_null_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TransportError, match="cannot be read: it is not a regular file"):
        KnownHosts.read([tmp_path / "pipe"])
    (tmp_path / "known_hosts").symlink_to(os.devnull)
    assert KnownHosts.read([tmp_path / "known_hosts"]).key_types("gpu1", 22) == ()


def test_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be read: Is a directory"):
        KnownHosts.read([tmp_path])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("change", ["owner", "mode"])
def test_user_s_file_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """HOME may be another user's, as after sudo -E; ssh itself does not use HOME."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    read(tmp_path / ".ssh", f"gpu1 {write_key(ED25519)}")
    (tmp_path / ".ssh" / "known_hosts").chmod(0o646) if change == "mode" else os.chown(
        tmp_path / ".ssh" / "known_hosts", 12345, 12345
    )
    with pytest.raises(
        TransportError, match=r"others can write .*known_hosts \(mode 0\d+, uid \d+\), which lists trusted"
    ):
        KnownHosts.read([tmp_path / ".ssh" / "known_hosts"])
    os.rename(tmp_path / ".ssh", tmp_path / "colleague's")  # a file named in the user's config is the user's choice
    KnownHosts.read([tmp_path / "colleague's" / "known_hosts"]).check("gpu1", 22, ED25519, make_blob(ED25519))
