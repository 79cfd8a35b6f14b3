"""Claims about keys: which are known, what a wrong file is told, and what is never told."""

from __future__ import annotations

import ast
import hmac
import inspect
import re
from hashlib import sha256
from pathlib import Path

import pytest

import servekit.keys
from servekit.errors import ConfigError
from servekit.keys import Key, Keyring, parse_api_key, parse_keys_file
from servekit.rate_limits import Limits

SECRET = "canary-of-a-key"  # noqa: S105
UNSAFE = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)

FILE = f"""
[[key]]
key = "{SECRET}"
tenant = "search"
max_concurrent_requests = 4
requests_per_minute = 60
tokens_per_minute = 10_000
min_priority = 5

[[key]]
sha256 = "{sha256(b"another").hexdigest().upper()}"
tenant = "search"
only = "metrics"
"""


def test_a_file_gives_each_key_its_tenant_and_limits() -> None:
    first, second = parse_keys_file(FILE.encode(), "keys.toml")
    assert first == Key(sha256(SECRET.encode()).digest(), "search", Limits(4, 60, 10_000), 5)
    assert second == Key(sha256(b"another").digest(), "search", only="metrics")
    assert first.only is None
    assert second.min_priority == -1000 and second.limits == Limits()


def test_a_key_that_is_shown_is_found_and_nothing_like_it_is() -> None:
    keyring = Keyring(parse_keys_file(FILE.encode(), "keys.toml"))
    assert keyring.find(SECRET.encode()) == keyring.keys[0]
    assert keyring.find(b"another") == keyring.keys[1]
    digest = sha256(b"another").hexdigest().encode()
    for shown in (b"", SECRET.upper().encode(), SECRET[:-1].encode(), SECRET.encode() + b" ", b"\xff" * 99, digest):
        assert keyring.find(shown) is None
    assert Keyring([]).find(b"") is None


def test_the_keys_of_the_setting_are_one_tenants() -> None:
    keys = parse_api_key("old-key, new-key")
    assert [key.digest for key in keys] == [sha256(b"old-key").digest(), sha256(b"new-key").digest()]
    assert {key.tenant for key in keys} == {"default"}


@pytest.mark.parametrize(
    "setting", ["", " ", ",", f"{SECRET},", f"{SECRET}\u00e9", f"{SECRET} x", f"{SECRET},{SECRET}"]
)
def test_a_setting_with_no_key_in_it_is_refused_rather_than_letting_everybody_in(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_api_key(setting)
    assert refused.value.message.startswith("api_key: ") and SECRET not in refused.value.message


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("", "keys.toml: it takes [[key]] entries"),
        ("key = []", "keys.toml: it takes [[key]] entries"),
        ("[key]\ntenant = 'a'", "keys.toml: it takes [[key]] entries"),
        (f"'{SECRET}' = 'search'", "keys.toml: it takes [[key]] entries"),
        (f"{FILE}\n[more]", "keys.toml: it takes [[key]] entries"),
        (SECRET, "keys.toml: it is not TOML"),
        (f"a = 1\n{SECRET} b", "keys.toml: it is not TOML (line 2, column"),
        ("\udcff", "keys.toml: it is not TOML"),
        (f"key = ['{SECRET}']", "keys.toml: [[key]] 1: Expected `object`"),
        (f"[[key]]\nkey = '{SECRET}'", "keys.toml: [[key]] 1: Object missing required field `tenant`"),
        ("[[key]]\ntenant = 'a'", "keys.toml: [[key]] 1: it takes either key or sha256"),
        (f"[[key]]\ntenant = 'a'\nkey = 'x'\nsha256 = '{'0' * 64}'", "[[key]] 1: it takes either key or sha256"),
        (f"[[key]]\ntenant = 'a'\nsha256 = '{SECRET}'", "[[key]] 1: sha256 takes 64 hex digits"),
        (f"[[key]]\ntenant = 'a'\nkey = ' {SECRET}'", "[[key]] 1: key is empty, or not of visible"),
        ("[[key]]\ntenant = 'a'\nkey = ''", "[[key]] 1: key is empty, or not of visible"),
        (f"[[key]]\ntenant = 'a b'\nkey = '{SECRET}'", "[[key]] 1: tenant takes 1 to 64 letters"),
        (f"[[key]]\ntenant = 'a'\n{SECRET} = 'key'", "[[key]] 1: it has an unknown field; it takes tenant, key,"),
        (f"[[key]]\ntenant = 'a'\nkey = '{SECRET}'\nrpm = 60", "[[key]] 1: it has an unknown field 'rpm'; it takes"),
        (f"[[key]]\ntenant = 'a'\n{'x' * 41} = 'key'", "[[key]] 1: it has an unknown field; it takes"),
        (f"[[key]]\ntenant = 'a'\nonly = '{SECRET}'", "[[key]] 1: only takes 'metrics'"),
        (f"[[key]]\ntenant = 'a'\nkey = '{SECRET}'\nrequests_per_minute = 0", "at `$.requests_per_minute`"),
        (f"[[key]]\ntenant = 'a'\nkey = '{SECRET}'\nmin_priority = 2000", "at `$.min_priority`"),
        (FILE + f"[[key]]\ntenant = 'b'\nkey = '{SECRET}'", "keys.toml: [[key]] 1 and 3 are the same key"),
    ],
)
def test_a_wrong_file_is_told_where_and_never_what_the_key_is(toml: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys_file(toml.encode("utf-8", "surrogateescape"), "keys.toml")
    assert told in refused.value.message
    assert SECRET not in refused.value.message


def test_every_key_is_compared_whichever_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, shown: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, shown)

    monkeypatch.setattr(servekit.keys, "compare_digest", compare)
    keyring = Keyring([Key(sha256(b"%d" % number).digest()) for number in range(5)])
    for shown in (b"0", b"4", b"none of them"):
        compared.clear()
        keyring.find(shown)
        assert compared == [key.digest for key in keyring.keys], "no early end"


def test_what_is_shown_is_compared_in_no_other_way() -> None:
    """Neither `==` nor `in`, which end at the first difference, touches it or its digest on its way."""
    for path in ("keys.py", "api/access.py"):
        tree = ast.parse((Path(servekit.keys.__file__).parent / path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and any(isinstance(op, UNSAFE) for op in node.ops):
                assert not re.search(r"\bshown\b|digest", ast.unparse(node)), ast.unparse(node)
    find = inspect.getsource(Keyring.find)
    assert "compare_digest(key.digest, digest)" in find and "break" not in find and find.count("return") == 1
