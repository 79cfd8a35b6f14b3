"""Shells complete servekit's commands, flags, values and files. Bash is run; the others' scripts are read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from servekit.cli import SHELLS, _parser, main
from servekit.completion import completion_script


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "servekit.bash"
    file.write_text(completion_script(_parser(), "bash"))
    return file


def complete(script: Path, line: str, folder: Path) -> set[str]:
    """Return what bash proposes at the end of `line`, in the current folder `folder`."""
    program = """
    source "$1"
    read -ra COMP_WORDS <<< "$2"
    [[ $2 == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    COMP_LINE=$2
    COMP_POINT=${#2}
    function=$(complete -p servekit | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
    "$function" servekit "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", program, "bash", str(script), line],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    assert not done.stderr, done.stderr
    return {word.strip() for word in done.stdout.splitlines() if word.strip()}


def test_bash_proposes_all_commands(script: Path, tmp_path: Path) -> None:
    assert {"serve", "doctor", "chat", "batch", "completion"} <= complete(script, "servekit ", tmp_path)
    assert complete(script, "servekit ser", tmp_path) == {"serve"}


def test_bash_proposes_the_flags_of_a_command(script: Path, tmp_path: Path) -> None:
    assert complete(script, "servekit serve --kv-cache-d", tmp_path) == {"--kv-cache-dtype"}
    assert "--no-ui" in complete(script, "servekit serve --no-", tmp_path)
    assert complete(script, "servekit doctor --js", tmp_path) == {"--json"}
    assert "--port" not in complete(script, "servekit replay --", tmp_path)


def test_bash_proposes_the_values_of_a_setting(script: Path, tmp_path: Path) -> None:
    assert complete(script, "servekit serve --dtype ", tmp_path) == {"auto", "float32", "bfloat16", "float16"}
    assert complete(script, "servekit serve --scheduling-policy f", tmp_path) == {"fcfs", "fair"}
    assert complete(script, "servekit completion ", tmp_path) == set(SHELLS)


def test_bash_proposes_files_and_folders(script: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "keys.toml").touch()
    assert "keys.toml" in complete(script, "servekit serve --api-keys-file ke", tmp_path)
    assert any(word.startswith("model") for word in complete(script, "servekit serve mo", tmp_path))
    assert not complete(script, "servekit serve --batch-dir ke", tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("servekit", "quantize", "max-num-seqs"))
    assert shell == "bash" or "write a checkpoint" in printed, "bash shows no explanations"
