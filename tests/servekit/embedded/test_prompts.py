from array import array
from typing import Any

import pytest

from servekit.embedded.prompts import is_one_prompt, to_prompt
from servekit.errors import InvalidRequest


@pytest.mark.parametrize("value", ["a text", {"prompt": "a text"}])
def test_a_text(value: Any) -> None:
    assert to_prompt(value).content == "a text"


@pytest.mark.parametrize("value", [[1, 2], (1, 2), array("i", [1, 2]), {"prompt_token_ids": [1, 2]}])
def test_token_ids(value: Any) -> None:
    assert to_prompt(value).content == array("i", [1, 2])


@pytest.mark.parametrize("value", [None, 5, {}, {"text": "a"}, ["a text"], [1.5], [2**40], [-1]])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt"):
        to_prompt(value)


def test_a_list_is_several_prompts() -> None:
    assert is_one_prompt("a") and is_one_prompt({"prompt": "a"})
    assert not is_one_prompt(["a"])
