"""The URLs and refs that git is given, and those that never reach it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.plan.git_urls import check_git_ref, check_git_url, parse_git_url, resolve_submodule

TAKEN = {
    "https://github.com/a/b.git": ("https", "github.com", 443, "/a/b.git"),
    "HTTPS://GitHub.com:8443/a": ("https", "github.com", 8443, "/a"),
    "http://127.0.0.1:8000/x.git": ("http", "127.0.0.1", 8000, "/x.git"),
    "ssh://git@host:2222/~/x": ("ssh", "host", 2222, "/~/x"),
    "git@github.com:a/b.git": ("ssh", "github.com", 22, "/a/b.git"),
    "host.example:x": ("ssh", "host.example", 22, "/x"),
    "https://[::1]:99/x": ("https", "[::1]", 99, "/x"),
    "/srv/git/x.git": ("file", "", None, "/srv/git/x.git"),
    "file:///srv/x.git": ("file", "", None, "/srv/x.git"),
}
REFUSED = [
    "",
    "-oProxyCommand=touch /x",
    "--upload-pack=touch",
    "ext::sh -c touch% /x",
    "ext::sh",
    "https::http://h/x",
    "fd::3",
    "git://host/x",
    "ftp://host/x",
    "s3://bucket/x",
    "https://user:secret@host/x",
    "https://ghp_secret@host/x",
    "https://us/er:secret@host@h/x",
    "ssh://u:secret@host/x",
    "u:secret@host:x",
    "ssh://-oProxyCommand=x/y",
    "-x@host:y",
    "ssh://-x@host/y",
    "host:-x",
    "https://host",
    "https:///x",
    "https://host:0/x",
    "https://host:70000/x",
    "https://host/a b",
    "https://host/a\nb",
    "https://host/\x1b[31m",
    "file://host/x",
    "relative/path",
    "C:\\x",
    "https://" + "h" * 3000,
]


@pytest.mark.parametrize("text, parts", TAKEN.items())
def test_url_is_taken_apart(text: str, parts: tuple[object, ...]) -> None:
    found = parse_git_url(text)
    assert (found.scheme, found.host, found.port, found.path) == parts and check_git_url(text) == text


@pytest.mark.parametrize("text", REFUSED)
def test_url_is_refused_and_no_secret_is_shown(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_git_url(text)
    assert "secret" not in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize("ref", ["", "main", "v1.2", "feature/x-1", "0" * 40, "größe", "refs/tags/v1"])
def test_ref_is_taken(ref: str) -> None:
    assert check_git_ref(ref) == ref


@pytest.mark.parametrize(
    "ref",
    [
        "-x", "--upload-pack=x", "+main", "a..b", "a b", "a\n", "a:b", "a^", "a~1", "@{u}", "a*", "x.lock", "/a", "a/",
        "@", ".a", "a/.b", "a" * 300, "a\\b", "a\x1bb",
    ],
)  # fmt: skip
def test_ref_is_refused(ref: str) -> None:
    with pytest.raises(SpecError):
        check_git_ref(ref)


def test_password_in_a_ref_is_not_shown() -> None:
    for ref in ("https://me:secret@host/a", f"https://me:{'secret' * 99}@host/a", "https://secret@host/a"):
        with pytest.raises(SpecError, match=r"git ref 'https://\*\*\*@host/a' is not a branch"):
            check_git_ref(ref)


@given(st.text())
def test_whatever_is_given_is_taken_or_refused(text: str) -> None:
    for check in (check_git_url, check_git_ref):
        try:
            assert check(text) == text and not text.startswith("-")
        except SpecError:
            pass


def test_submodule_is_of_the_same_host() -> None:
    parent = parse_git_url("https://host/a/b.git")
    assert resolve_submodule(parent, "../c.git").text == "https://host/a/c.git"
    assert resolve_submodule(parent, "./c").text == "https://host/a/b.git/c"
    assert resolve_submodule(parent, "../../../../c").text == "https://host/c"
    assert resolve_submodule(parse_git_url("git@host:a/b"), "../c").text == "git@host:a/c"
    for other in ("https://other/x", "http://host/x", "https://host:444/x", "/etc", "file:///etc", "ext::sh",
                  "git@host:x", "https://host:443@other/x", "../../\nx"):  # fmt: skip
        with pytest.raises(SpecError):
            resolve_submodule(parent, other)
    with pytest.raises(SpecError):
        resolve_submodule(parse_git_url("/srv/x.git"), "../y.git")


@pytest.mark.parametrize(
    "text, hides",
    {"https://h/x": True, "http://h/x": False, "http://127.0.0.1:1/x": True, "http://127.0.0.1.evil/x": False}.items(),
)
def test_token_goes_where_nobody_reads_it(text: str, hides: bool) -> None:
    assert parse_git_url(text).hides_token is hides


def test_relative_path_is_told_what_to_give() -> None:
    with pytest.raises(SpecError, match=r"'./repo' is invalid: .* or the full path of a repository on the nodes$"):
        check_git_url("./repo")
