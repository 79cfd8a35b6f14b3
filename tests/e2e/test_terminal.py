"""Claims about `servekit chat` and `top` at a terminal: what Ctrl-C does at every stage, and what is printed."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator

import pytest

from servekit.live_view import LiveSequence
from tests.scripted_server import DONE, Script, ScriptedServer, event, frame, piece, scripted_server
from tests.server_process import ServerProcess, serving
from tests.terminal import CTRL_C, HARMFUL, HOSTILE, TIMEOUT_S, Terminal, terminal

PROMPT = "\n>"
CTRL_D = "\x04"
CHAT = "/v1/chat/completions"
NEVER = threading.Event()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Ten minutes for an answer of 12,000 tokens; who stops it has some time to do so."""
    log = tmp_path_factory.mktemp("slow") / "log"
    with serving("--model", "sim:step=50ms", "--num-kv-blocks", "2000", log=log) as server:
        yield server


def leave(at: Terminal) -> None:
    at.type(CTRL_C)
    assert at.expect_end() == 0
    assert at.is_as_before()


# -- chat: the conversation --------------------------------------------------------------------------------------------


def test_answers_are_the_servers_and_the_conversation_goes_on(server: ServerProcess) -> None:
    def answer(messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "temperature": 0, "max_tokens": 24}
        content: str = server.client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        return content

    messages = [{"role": "system", "content": "Be kind."}]
    flags = ("--system", "Be kind.", "--temperature", "0", "--max-tokens", "24")
    with terminal("chat", server.url, *flags, columns=200) as at:
        for question in ("What color is the sky?", "And at night?"):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer(messages)})
            at.expect(PROMPT)
            at.type(question + "\r")
            at.expect(question + "\n")
            assert at.expect("[").strip() == messages[-1]["content"].strip()
            assert re.fullmatch(r"\d+ tokens, \d+\.\d\d s to the first, \d+ tok/s(, .*)?", at.expect("]"))
        at.expect(PROMPT)
        leave(at)


def test_commands_and_several_lines(scripted: ScriptedServer) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for typed, told in (
            ("one\r", "[1 token,"),
            ("two \\\rlines\r", "[1 token,"),
            ("/new\r", "[a new conversation]"),
            ("three\r", "[1 token,"),
            ("/system Be brief.\r", "[a new conversation, with this system message]"),
            ("four\r", "[1 token,"),
            ("/sistem\r", "[there is no /sistem;"),
            (" /etc/passwd\r", "[1 token,"),
            ("/help\r", "begin a new conversation"),
        ):
            at.type(typed)
            at.expect(told)
            at.expect(PROMPT)
        at.type("/quit\r")
        assert at.expect_end() == 0 and at.is_as_before()
    one, four = ["user: one", "assistant: yes"], ["system: Be brief.", "user: four", "assistant: yes"]
    assert scripted.chats() == [
        one[:1],
        [*one, "user: two \nlines"],
        ["user: three"],
        four[:2],
        [*four, "user:  /etc/passwd"],
    ]


def test_the_history_is_an_arrow_away(scripted: ScriptedServer) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        at.type("before\r")
        at.expect("yes")
        at.expect(PROMPT)
        # A prompt reads its history when it is there already. Above the only message there is nothing else.
        for _ in range(100):
            at.type("\x1b[A")
            if at.comes("before", within_s=0.3):
                break
        at.type("\r")
        at.expect("yes")
        at.expect(PROMPT)
        leave(at)
    assert scripted.chats()[1][-1] == "user: before"


# -- chat: Ctrl-C, at every stage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_stops_the_answer_and_gives_its_blocks_back(slow: ServerProcess, how: str) -> None:
    with terminal("chat", slow.url) as at:
        for _ in range(2):
            at.expect(PROMPT)
            at.type("hello\r")
            at.expect("hello\n" if how == "key" else "hello")
            slow.wait_for_metric("servekit_num_requests_running", 1, timeout_s=30)
            at.interrupt(how)
            at.expect("[stopped: ")
            slow.wait_until_at_rest()
        at.expect(PROMPT)
        leave(at)


WAITS_WHEN: dict[str, Script] = {
    "nothing was answered": [NEVER],
    "there is no token yet": [b": hello\n\n", NEVER],
    "in the middle": [piece("some"), piece("thing"), NEVER, piece("else"), DONE],
    "all tokens are there": [piece("something"), piece("", "stop"), NEVER],
}


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_in_a_turn_ends_the_turn_and_never_the_program(scripted: ScriptedServer, how: str) -> None:
    """Wherever the answer is, and each time anew."""
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for when, script in WAITS_WHEN.items():
            has_begun = len(script) > 2
            scripted.scripts[CHAT] = [script, script, [piece("the end"), DONE]]
            for _ in range(2):
                num_asked, num_departed = len(scripted.asked), scripted.num_departed
                at.type("hello\r")
                scripted.wait_for(num_asked + 1)
                if has_begun:
                    at.expect("something")
                at.interrupt(how)
                scripted.wait_for(num_asked + 1, num_departed + 1)
                at.expect("[stopped: ")
                at.expect(PROMPT)
            at.type("bye\r")
            at.expect("the end")
            at.expect(PROMPT)
            cut = ["user: hello", "assistant: something…"] if has_begun else []
            assert scripted.chats()[-1] == [*cut, *cut, "user: bye"], when
            at.type("/new\r")
            at.expect("[a new conversation]")
            at.expect(PROMPT)
        leave(at)


def test_ctrl_c_behind_an_enter_is_for_the_answer(scripted: ScriptedServer) -> None:
    """Typed before anything could come of the Enter: keys have their order, however fast they are."""
    scripted.scripts[CHAT] = [[NEVER]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for keys in 3 * ("hello\r" + CTRL_C, "hello\r" + CTRL_C * 3, "hello\rtyped ahead" + CTRL_C):
            at.type(keys)
            at.expect("[stopped: 0 tokens]")
            at.expect(PROMPT)
        at.type("/help\r")  # behind nothing that was typed ahead
        at.expect("Ctrl-C stops an answer")
        at.expect(PROMPT)
        leave(at)


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_empties_a_prompt_and_leaves_an_empty_one(scripted: ScriptedServer, how: str) -> None:
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for wrong in ("aaaa", "bbbb", "cccc"):  # all of which is drawn, even when the one before is still to be seen
            at.type(wrong)
            at.expect(wrong)
            at.interrupt(how)
            if how == "signal":  # which does not wait in line with what is typed
                at.expect_output(b"\x1b[K")
        at.type("right\r")
        at.expect("yes")
        at.expect(PROMPT)
        at.interrupt(how)
        assert at.expect_end() == 0 and at.is_as_before()
    assert scripted.chats() == [["user: right"]]


def test_what_is_typed_while_an_answer_comes_is_the_next_message(scripted: ScriptedServer) -> None:
    goes_on = threading.Event()
    scripted.scripts[CHAT] = [[piece("one"), goes_on, DONE], [piece("two"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        at.type("first\r")
        at.expect("one")
        at.type("second\r")
        goes_on.set()
        at.expect("two")
        at.expect(PROMPT)
        leave(at)
    assert scripted.chats()[1] == ["user: first", "assistant: one", "user: second"]


def test_ctrl_c_before_the_first_prompt_ends_the_program(scripted: ScriptedServer) -> None:
    scripted.scripts["/v1/models"] = [[NEVER]]
    with terminal("chat", scripted.url) as at:
        scripted.wait_for(num_asked=1)
        at.type(CTRL_C)
        assert at.expect_end() == 130 and at.is_as_before()
        assert "Traceback" not in at.plain()


@pytest.mark.parametrize("at_a_prompt", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(
    scripted: ScriptedServer, number: signal.Signals, at_a_prompt: bool
) -> None:
    scripted.scripts[CHAT] = [[piece("some"), NEVER]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        if not at_a_prompt:
            at.type("hello\r")
            at.expect("some")
        at.process.send_signal(number)
        assert at.expect_end() == 128 + number and at.is_as_before()
        assert "Traceback" not in at.plain()


@pytest.mark.parametrize("command", ["chat", "top"])
def test_when_the_terminal_goes_the_program_goes(scripted: ScriptedServer, command: str) -> None:
    scripted.scripts["/ui/events"] = [[frame("demo"), NEVER]]
    with terminal(command, scripted.url) as at:
        at.expect("nobody asks" if command == "top" else PROMPT)
        at.hang_up()
        assert at.process.wait(TIMEOUT_S) == 128 + signal.SIGHUP


def test_what_looks_like_a_terminals_report_is_nothing(scripted: ScriptedServer) -> None:
    """A colour could be a mouse's, as far as prompt_toolkit can tell; and a number may have too many digits."""
    scripted.scripts[CHAT] = [[piece("yes"), DONE]]
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        for keys in ("a\x1b[31mb\r", f"a\x1b[{'1' * 5000};1Rb\r", "a\x1b[<0;1mb\r"):
            for begin in range(0, len(keys), 1000):
                at.type(keys[begin : begin + 1000])
            at.expect("yes")
            at.expect(PROMPT)
        leave(at)
        assert "Traceback" not in at.plain() and "xception" not in at.plain()
    assert [chat[-1] for chat in scripted.chats()] == ["user: ab"] * 3


def test_ctrl_d_leaves(scripted: ScriptedServer) -> None:
    with terminal("chat", scripted.url) as at:
        at.expect(PROMPT)
        at.type(CTRL_D)
        assert at.expect_end() == 0 and at.is_as_before()


# -- chat: errors, and what others wrote -------------------------------------------------------------------------------


def refusal(message: str, code: str) -> Script:
    return [json.dumps({"error": {"message": message, "code": code}}).encode()]


ERRORS: list[tuple[int, dict[str, str], Script, str]] = [
    (503, {"Retry-After": "7"}, refusal("9 wait already", "overloaded"), "9 wait already (busy; try again in 7"),
    (429, {}, refusal("limit", "rate_limit_exceeded"), "limit (busy; try again later)"),
    (401, {}, refusal("no", "invalid_api_key"), "the server wants an API key; --api-key or SERVEKIT_API_KEY has it"),
    (400, {}, refusal("none", "chat_template_missing"), "this model has no chat template, so it cannot chat;"),
    (400, {}, refusal("too long", "context_length_exceeded"), "too long (/new begins a new conversation)"),
    (502, {}, [b"<html>"], "answers 502 Bad Gateway"),
    (200, {}, [piece("some"), b"data: {]\n\n"], "the server sends what cannot be read"),
    (200, {}, [piece("some")], "the answer broke off: the server closed the connection"),
    (200, {}, [piece("some"), event({"error": {"message": "the worker was lost"}})], "failed: the worker was lost"),
    (200, {"Content-Encoding": "gzip"}, [b"\x1f\x8b"], "answers in gzip, which was not asked for"),
]


def test_errors_are_told_in_words_and_the_question_is_taken_back(scripted: ScriptedServer) -> None:
    with terminal("chat", scripted.url, columns=250) as at:
        at.expect(PROMPT)
        for status, headers, script, told in ERRORS:
            scripted.scripts[CHAT] = [script, [piece("yes"), DONE]]
            scripted.statuses[CHAT] = status, headers
            at.type("first\r")
            at.expect(told)
            at.expect(PROMPT)
            scripted.statuses.clear()
            at.type("second\r")
            at.expect("yes")
            assert scripted.chats()[-1] == ["user: second"], told
            at.expect(PROMPT)
            at.type("/new\r")
            at.expect("[a new conversation]")
            at.expect(PROMPT)
        leave(at)


@pytest.mark.parametrize("command", ["chat", "top"])
def test_where_nobody_answers_one_line_says_so(command: str) -> None:
    with terminal(command, "http://127.0.0.1:1", columns=200) as at:
        assert at.expect_end() == 1 and at.is_as_before()
        assert at.plain().strip() == (
            "servekit: nothing answers at http://127.0.0.1:1; `servekit serve` starts a server"
        )


def test_hostile_answers_and_names_reach_the_terminal_as_text(scripted: ScriptedServer) -> None:
    scripted.scripts["/v1/models"] = [[json.dumps({"data": [{"id": "".join(HOSTILE[:-1])}]}).encode()]]
    scripted.scripts[CHAT] = [
        [*map(piece, HOSTILE), DONE],
        [*map(piece, "".join(HOSTILE[:-1])), piece("", HOSTILE[0])],
        [event({"error": {"message": "".join(HOSTILE)}})],
    ]
    with terminal("chat", scripted.url) as at:
        for told in ("<script>alert(1)</script>xxx", "<script>alert(1)</script>", "the answer failed: ␛]52"):
            at.expect(PROMPT)
            at.type("hello\r")
            at.expect(told)
        at.expect(PROMPT)
        leave(at)
        assert at.plain().count("x" * 10_000) == 2
        assert not [harm for harm in HARMFUL if harm in at.output]


# -- top ---------------------------------------------------------------------------------------------------------------


def test_top_shows_who_runs_and_q_leaves(slow: ServerProcess) -> None:
    body = {"prompt": "hello", "n": 3, "max_tokens": 5000, "stream": True}
    with slow.client.stream("POST", "/v1/completions", json=body) as answer, terminal("top", slow.url) as at:
        lines = answer.iter_lines()  # which closes the connection when nobody has it any more
        next(lines)
        at.expect("running 3")
        at.expect("of 2,000 held")
        for _ in range(3):
            at.expect("decode  ")
            assert "█" in at.expect("/ 5,000")
        at.expect("running 3")  # and again, in another frame
        at.type("q")
        assert at.expect_end() == 0 and at.is_as_before()
        assert at.output.count(b"\x1b[?1049h") == at.output.count(b"\x1b[?1049l") == 1
        assert at.output.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))
    slow.wait_until_at_rest()


@pytest.mark.parametrize(
    ("how", "exit_code"),
    [("key", 0), (CTRL_D, 0), (signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129), ("before a frame", 0)],
)
def test_top_can_be_left_in_every_way(scripted: ScriptedServer, how: str | signal.Signals, exit_code: int) -> None:
    scripted.scripts["/ui/events"] = [[NEVER]] if how == "before a frame" else [[frame("demo"), NEVER]]
    with terminal("top", scripted.url) as at:
        if how == "before a frame":
            scripted.wait_for(num_asked=1)
        else:
            at.expect("nobody asks")
        if isinstance(how, signal.Signals):
            at.process.send_signal(how)
        else:
            at.type(CTRL_D if how == CTRL_D else CTRL_C)
        assert at.expect_end() == exit_code and at.is_as_before()
        assert at.output.count(b"\x1b[?1049h") == at.output.count(b"\x1b[?1049l")
        assert "Traceback" not in at.plain()


def test_top_tells_that_the_server_is_gone_and_goes_on_when_it_is_back(scripted: ScriptedServer) -> None:
    is_back = threading.Event()
    scripted.scripts["/ui/events"] = [[frame("before")], [is_back, frame("after"), NEVER]]
    with terminal("top", scripted.url, columns=120) as at:
        at.expect("before")
        at.expect(f"{scripted.url} has closed the connection; this is ")
        while int(at.expect(" s old").rpartition(" ")[2]) < 1:  # any age may be skipped, but time goes on
            at.expect("has closed the connection; this is ")
        is_back.set()
        at.expect("after")
        at.expect("nobody asks")
        at.type("q")
        assert at.expect_end() == 0 and at.is_as_before()


def test_top_follows_the_terminals_size(scripted: ScriptedServer) -> None:
    scripted.scripts["/ui/events"] = [[frame("demo"), NEVER]]
    with terminal("top", scripted.url, columns=30, rows=40) as at:
        at.expect("nobody asks")
        assert "q leaves" not in at.plain()
        at.resize(120, 40)
        at.expect("q leaves")
        at.type("q")
        assert at.expect_end() == 0 and at.is_as_before()


def test_what_the_encoding_lacks_is_a_question_mark(scripted: ScriptedServer) -> None:
    scripted.scripts["/ui/events"] = [[frame("démo", cells=[(0, 64)]), NEVER]]
    with terminal("top", scripted.url, PYTHONIOENCODING="latin-1") as at:
        at.expect("steps ? decode")
        at.expect("nobody asks")
        at.type("q")
        assert at.expect_end() == 0 and at.is_as_before()


def test_hostile_frames_reach_the_terminal_as_text(scripted: ScriptedServer) -> None:
    name = "".join(HOSTILE)
    scripted.scripts["/ui/events"] = [[frame(name, num_running=1), NEVER]]
    with terminal("top", scripted.url, columns=250) as at:
        at.expect("␛]52")
        at.expect("and 1 more")
        at.type("q")
        assert at.expect_end() == 0 and at.is_as_before()
        assert not [harm for harm in HARMFUL if harm in at.output]


def test_a_frame_that_is_none_ends_top_in_words(scripted: ScriptedServer) -> None:
    sequence = LiveSequence(0, "\x1b]0;x\x07", 1, 1, 1, 1, 0.0)  # type: ignore[arg-type]
    scripted.scripts["/ui/events"] = [[frame("demo", sequences=[sequence]), NEVER]]
    with terminal("top", scripted.url, columns=250) as at:
        assert at.expect_end() == 1 and at.is_as_before()
        assert "servekit: the server sends what cannot be read" in at.plain()
        assert not [harm for harm in HARMFUL if harm in at.output]


def test_top_says_if_there_is_no_live_view(scripted: ScriptedServer) -> None:
    scripted.statuses["/ui/events"] = 404, {}
    scripted.scripts["/ui/events"] = [[b"{}"]]
    with terminal("top", scripted.url, columns=200) as at:
        assert at.expect_end() == 1 and at.is_as_before()
        assert "has no live view: it was started with --no-ui" in at.plain()
