"""API keys: which are known, and errors in the keys file, which never contain a key."""

from __future__ import annotations

import ast
import hmac
import inspect
import re
from hashlib import sha256
from pathlib import Path

import pytest

import servekit
from servekit.api.auth.keys import Key, Keyring, parse_api_key, parse_keys_file
from servekit.api.auth.rate_limits import Limits
from servekit.errors import ConfigError

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


def test_known_key_is_found_and_similar_ones_are_not() -> None:
    keyring = Keyring(parse_keys_file(FILE.encode(), "keys.toml"))
    assert keyring.find(SECRET.encode()) == keyring.keys[0]
    assert keyring.find(b"another") == keyring.keys[1]
    digest = sha256(b"another").hexdigest().encode()
    for shown in (b"", SECRET.upper().encode(), SECRET[:-1].encode(), SECRET.encode() + b" ", b"\xff" * 99, digest):
        assert keyring.find(shown) is None
    assert Keyring([]).find(b"") is None


def test_keys_of_the_setting_share_one_tenant() -> None:
    keys = parse_api_key("old-key, new-key")
    assert [key.digest for key in keys] == [sha256(b"old-key").digest(), sha256(b"new-key").digest()]
    assert {key.tenant for key in keys} == {"default"}


@pytest.mark.parametrize(
    "setting", ["", " ", ",", f"{SECRET},", f"{SECRET}\u00e9", f"{SECRET} x", f"{SECRET},{SECRET}"]
)
def test_empty_api_key_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_api_key(setting)
    assert refused.value.message.startswith("api_key: ") and SECRET not in refused.value.message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("", "keys.toml: the file must have one or more [[key]] entries"),
        ("key = []", "keys.toml: the file must have one or more [[key]] entries"),
        ("[key]\ntenant = 'a'", "keys.toml: the file must have one or more [[key]] entries"),
        (f"'{SECRET}' = 'search'", "keys.toml: the file must have one or more [[key]] entries"),
        (f"{FILE}\n[more]", "keys.toml: the file must have one or more [[key]] entries"),
        (SECRET, "keys.toml: not a valid TOML file"),
        (f"a = 1\n{SECRET} b", "keys.toml: not a valid TOML file (line 2, column"),
        ("\udcff", "keys.toml: not a valid TOML file"),
        (f"{FILE}min_priority = {'9' * 5000}", "keys.toml: a number has too many digits"),
        (f"{FILE}x = {'[' * 50_000}'{SECRET}'{']' * 50_000}", "or values are nested too deeply"),
        (f"{FILE}x = {'{a = ' * 5000}'{SECRET}'{'}' * 5000}", "or values are nested too deeply"),
        (f"key = ['{SECRET}']", "keys.toml: [[key]] 1: Expected `object`"),
        (f"[[key]]\nkey = '{SECRET}'", "keys.toml: [[key]] 1: Object missing required field `tenant`"),
        ("[[key]]\ntenant = 'a'", "keys.toml: [[key]] 1: it needs either key or sha256"),
        (f"[[key]]\ntenant = 'a'\nkey = 'x'\nsha256 = '{'0' * 64}'", "[[key]] 1: it needs either key or sha256"),
        (f"[[key]]\ntenant = 'a'\nsha256 = '{SECRET}'", "[[key]] 1: sha256 must be 64 hex digits"),
        (f"[[key]]\ntenant = 'a'\nkey = ' {SECRET}'", "[[key]] 1: key is empty or not visible"),
        ("[[key]]\ntenant = 'a'\nkey = ''", "[[key]] 1: key is empty or not visible"),
        (f"[[key]]\ntenant = 'a b'\nkey = '{SECRET}'", "[[key]] 1: tenant must be 1 to 64 letters"),
        (f"[[key]]\ntenant = 'a'\n{SECRET} = 'key'", "[[key]] 1: unknown field; the known fields are tenant, key,"),
        (f"[[key]]\ntenant = 'a'\nkey = '{SECRET}'\nrpm = 60", "[[key]] 1: unknown field 'rpm'; the known fields are"),
        (f"[[key]]\ntenant = 'a'\n{'x' * 41} = 'key'", "[[key]] 1: unknown field; the known fields are"),
        (f"[[key]]\ntenant = 'a'\nonly = '{SECRET}'", "[[key]] 1: only must be 'metrics'"),
        (f"[[key]]\ntenant = 'a'\nkey = '{SECRET}'\nrequests_per_minute = 0", "at `$.requests_per_minute`"),
        (f"[[key]]\ntenant = 'a'\nkey = '{SECRET}'\nmin_priority = 2000", "at `$.min_priority`"),
        (FILE + f"[[key]]\ntenant = 'b'\nkey = '{SECRET}'", "keys.toml: [[key]] 1 and 3 are the same key"),
    ],
)
def test_error_in_the_keys_file_names_the_place_and_never_the_key(toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys_file(toml.encode("utf-8", "surrogateescape"), "keys.toml")
    assert message in refused.value.message
    assert SECRET not in refused.value.message


def test_every_key_is_compared_whichever_one_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, shown: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, shown)

    monkeypatch.setattr(servekit.api.auth.keys, "compare_digest", compare)
    keyring = Keyring([Key(sha256(b"%d" % number).digest()) for number in range(5)])
    for shown in (b"0", b"4", b"none of them"):
        compared.clear()
        keyring.find(shown)
        assert compared == [key.digest for key in keyring.keys], "no early end"


def test_keys_are_compared_by_compare_digest_only() -> None:
    """`==` and `in` stop at the first difference, so neither may touch a key or its digest."""
    for path in ("api/auth/keys.py", "api/middleware/authentication.py"):
        tree = ast.parse((Path(servekit.__file__).parent / path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and any(isinstance(op, UNSAFE) for op in node.ops):
                assert not re.search(r"\bshown\b|digest", ast.unparse(node)), ast.unparse(node)
    find = inspect.getsource(Keyring.find)
    assert "compare_digest(key.digest, digest)" in find and "break" not in find and find.count("return") == 1
