"""What counts as a command, as completion and as a format error."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from termrl.agent.reply import (
    FenceScanner,
    FormatError,
    ParsedReply,
    _Scanner,
    final_content,
    has_closed_command,
    parse_reply,
)


def bash(script: str, fence: str = "```", info: str = "bash") -> str:
    return f"{fence}{info}\n{script}\n{fence}"


README = "cat > README.md <<'EOF'\n# Use\n\n```bash\nmake\n```\n\nDone.\nEOF\nls"

COMMANDS = {
    "plain": (bash("ls -l"), "ls -l"),
    "two lines": (bash("cd a\nls"), "cd a\nls"),
    "prose around": (f"I look.\n\n{bash('ls')}\n\nThen we see.", "ls"),
    "sh": (bash("ls", info="sh"), "ls"),
    "shell": (bash("ls", info="shell"), "ls"),
    "language in capitals": (bash("ls", info="Bash"), "ls"),
    "info string with more words": (bash("ls", info=" bash title=x"), "ls"),
    "no newline at the end": ("```bash\nls\n```", "ls"),
    "CRLF": ("```bash\r\nls\r\npwd\r\n```\r\n", "ls\npwd"),
    "tildes": (bash("ls", fence="~~~"), "ls"),
    "backticks are text in tildes": (bash("echo a\n```\necho b", fence="~~~"), "echo a\n```\necho b"),
    "longer fence holds a shorter one": (bash("echo '\n```\n'", fence="````"), "echo '\n```\n'"),
    "longer closing fence": ("```bash\nls\n`````", "ls"),
    "spaces after the closing fence": ("```bash\nls\n```  \t", "ls"),
    "indented by three": ("   ```bash\n   ls\n     pwd\n  ```", "ls\n  pwd"),
    "another language beside it": ('```json\n{"a": 1}\n```\n' + bash("ls"), "ls"),
    "README by heredoc with fences in it": (bash(README), README),
    "heredoc, unquoted": (bash("cat <<EOF > a\n```\nEOF"), "cat <<EOF > a\n```\nEOF"),
    "heredoc, double quotes": (bash('cat <<"E F" > a\n```\nE F'), 'cat <<"E F" > a\n```\nE F'),
    "heredoc, backslash": (bash("cat <<\\EOF\n```\nEOF"), "cat <<\\EOF\n```\nEOF"),
    "heredoc with stripped tabs": (bash("cat <<-EOF\n\t```\n\tEOF"), "cat <<-EOF\n\t```\n\tEOF"),
    "tabs stay without the dash": (bash("cat <<EOF\n\tEOF\n```\nEOF"), "cat <<EOF\n\tEOF\n```\nEOF"),
    "two heredocs on one line": (bash("cat <<A; cat <<'B'\n```\nA\n```\nB"), "cat <<A; cat <<'B'\n```\nA\n```\nB"),
    "heredoc in a substitution": (bash('x="$(cat <<EOF\n```\nEOF\n)"'), 'x="$(cat <<EOF\n```\nEOF\n)"'),
    "heredoc on a continued line": (bash("cat <<EOF \\\n  > a\n```\nEOF"), "cat <<EOF \\\n  > a\n```\nEOF"),
    "heredoc body joined to its delimiter": (bash("cat <<EOF\na \\\nEOF\n```\nEOF"), "cat <<EOF\na \\\nEOF\n```\nEOF"),
    "here-string": (bash("cat <<<EOF"), "cat <<<EOF"),
    "shift in arithmetic": (bash("echo $((1 << 2))\n(( x = 1 << EOF ))"), "echo $((1 << 2))\n(( x = 1 << EOF ))"),
    "<< in quotes": (bash("echo '<<EOF' \"<<EOF\""), "echo '<<EOF' \"<<EOF\""),
    "<< in a comment": (bash("ls # <<EOF it's"), "ls # <<EOF it's"),
    "<< in a string of two lines": (bash("echo 'a\ncat <<EOF\n'"), "echo 'a\ncat <<EOF\n'"),
    "quotes nested in substitutions": (bash('echo "$(echo "it\'s")" ${x:-"}"}'), 'echo "$(echo "it\'s")" ${x:-"}"}'),
    "ansi quote": (bash("echo $'it\\'s'"), "echo $'it\\'s'"),
    "apostrophe in a default": (bash('echo "${x:-it\'s}"'), 'echo "${x:-it\'s}"'),
    "says the word in the block": (bash("echo TASK_COMPLETE"), "echo TASK_COMPLETE"),
    "the word alone in the block": (bash("TASK_COMPLETE"), "TASK_COMPLETE"),
    "a plan that mentions the word": (f"I will say TASK_COMPLETE once it works.\n{bash('ls')}", "ls"),
    "a plan in brackets": (f"Then the mark (TASK_COMPLETE) follows.\n{bash('ls')}", "ls"),
    "a longer word": (f"TASK_COMPLETED\n{bash('ls')}", "ls"),
    "thinking first": (f"<think>\n{bash('rm -rf /')}\nTASK_COMPLETE\n</think>\n{bash('ls')}", "ls"),
    "thinking that the template opened": (f"hm {bash('rm x')}\n</think>\n\n{bash('ls')}", "ls"),
}


@pytest.mark.parametrize(("text", "command"), COMMANDS.values(), ids=COMMANDS.keys())
def test_exactly_one_command_runs_whole(text: str, command: str) -> None:
    assert parse_reply(text) == ParsedReply("command", command)


COMPLETE = {
    "alone": "TASK_COMPLETE",
    "with a newline": "TASK_COMPLETE\n",
    "after a sentence": "All is done. TASK_COMPLETE",
    "bold": "**TASK_COMPLETE**",
    "in an inline code span": "`TASK_COMPLETE`",
    "in one line of backticks": "```TASK_COMPLETE```",
    "CRLF": "Done.\r\nTASK_COMPLETE\r\n",
    "beside a block of another language": "```text\nall fine\n```\nTASK_COMPLETE",
}


@pytest.mark.parametrize("text", COMPLETE.values(), ids=COMPLETE.keys())
def test_the_word_outside_a_block_ends(text: str) -> None:
    assert parse_reply(text) == ParsedReply("complete", complete=True)


@pytest.mark.parametrize(
    "text",
    [
        f"{bash('ls')}\nTASK_COMPLETE",
        f"TASK_COMPLETE\n{bash('ls')}",
        f"{bash('ls')}\n\nThat was it. **TASK_COMPLETE**",
        f"{bash('ls')}\n- TASK_COMPLETE!",
        f"{bash('ls')}\nTASK_COMPLETE: the directory is there.",
    ],
)
def test_the_word_beside_a_command_runs_it_then_ends(text: str) -> None:
    assert parse_reply(text) == ParsedReply("command_complete", "ls", complete=True)


ERRORS = {
    "empty": ("", FormatError.NO_COMMAND),
    "prose": ("ls -l", FormatError.NO_COMMAND),
    "four spaces": ("    ```bash\n    ls\n    ```", FormatError.NO_COMMAND),
    "tab": ("\t```bash\n\tls\n\t```", FormatError.NO_COMMAND),
    "inline": ("```bash ls```", FormatError.NO_COMMAND),
    "two backticks": ("``bash\nls\n``", FormatError.NO_COMMAND),
    "no language": (bash("ls", info=""), FormatError.OTHER_LANGUAGE),
    "python": (bash("print()", info="python"), FormatError.OTHER_LANGUAGE),
    "bashful": (bash("ls", info="bashful"), FormatError.OTHER_LANGUAGE),
    "the word in a block of no language": (bash("TASK_COMPLETE", info=""), FormatError.OTHER_LANGUAGE),
    "a command shown within markdown": (f"````markdown\n{bash('ls')}\n````", FormatError.OTHER_LANGUAGE),
    "two": (f"{bash('ls')}\n{bash('pwd')}", FormatError.SEVERAL_COMMANDS),
    "two of two languages": (f"{bash('ls')}\n{bash('pwd', info='sh')}\nTASK_COMPLETE", FormatError.SEVERAL_COMMANDS),
    "empty block": ("```bash\n```", FormatError.EMPTY_COMMAND),
    "blank block": ("```bash\n  \n\n```\nTASK_COMPLETE", FormatError.EMPTY_COMMAND),
    "unclosed": ("```bash\nls", FormatError.UNCLOSED_FENCE),
    "unclosed with the word inside": ("```bash\nls\nTASK_COMPLETE", FormatError.UNCLOSED_FENCE),
    "closed by the wrong character": ("```bash\nls\n~~~", FormatError.UNCLOSED_FENCE),
    "closed by too short a fence": ("````bash\nls\n```", FormatError.UNCLOSED_FENCE),
    "words after the closing fence": ("```bash\nls\n``` now", FormatError.UNCLOSED_FENCE),
    "second block unclosed": (f"{bash('ls')}\n```bash\npwd", FormatError.UNCLOSED_FENCE),
    "string split by a fence": ("```bash\nrm a\necho '\n```\nb' > f\n```", FormatError.UNCLOSED_FENCE),
    "ends within a quote": ("```bash\nrm a\necho it's\n```", FormatError.UNCLOSED_QUOTE),
    "truncated heredoc": ("```bash\ncat > a <<EOF\nhello\n```\n", FormatError.UNCLOSED_HEREDOC),
    "only thinking": (f"<think>\n{bash('ls')}\n</think>\n", FormatError.NO_COMMAND),
    "thinking never closed": (f"<think>\n{bash('ls')}\nTASK_COMPLETE", FormatError.NO_COMMAND),
}


@pytest.mark.parametrize(("text", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_anything_else_is_a_named_format_error_and_runs_nothing(text: str, error: FormatError) -> None:
    parsed = parse_reply(text)
    assert (parsed.kind, parsed.error, parsed.command, parsed.complete) == ("format_error", error, None, False)


def test_an_unclosed_heredoc_names_its_delimiter() -> None:
    assert parse_reply("```bash\ncat > a <<'END OF'\nhello\n```").detail == "END OF"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{bash('ls')}\n{bash('pwd')}", ParsedReply("command", "ls")),
        (bash("ls", info=""), ParsedReply("command", "ls")),
        (bash("print()", info="python"), ParsedReply("command", "print()")),
        (f"{bash('ls')}\n```bash\npw", ParsedReply("command", "ls")),
        (bash("echo it's"), ParsedReply("command", "echo it's")),
        (f"I say TASK_COMPLETE now.\n{bash('ls')}", ParsedReply("command_complete", "ls", complete=True)),
        ("ls -l", ParsedReply("format_error", error=FormatError.NO_COMMAND)),
        ("```bash\nls", ParsedReply("format_error", error=FormatError.UNCLOSED_FENCE)),
    ],
)
def test_lenient_takes_the_first_block_of_any_language(text: str, expected: ParsedReply) -> None:
    assert parse_reply(text, lenient=True) == expected


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("```bash\nls\n```\n", True),
        ("```bash\nls\n```", False),
        ("```bash\nls\n", False),
        ("```python\nls\n```\n", False),
        ("```python\nls\n```\n```sh\nls\n```\n", True),
        ("```bash\ncat <<EOF\n```\n", False),
        ("```bash\ncat <<EOF\n```\nEOF\n```\n", True),
        ("<think>\n```bash\nls\n```\n", False),
        ("<think>\n```bash\nls\n```\n</think>\n```bash\nls\n```\n", True),
        ("TASK_COMPLETE\n", False),
    ],
)
def test_a_reply_is_cut_only_after_the_newline_of_the_closing_fence(text: str, closed: bool) -> None:
    assert has_closed_command(text) is closed


def test_nothing_closes_within_reasoning_that_the_prompt_opened() -> None:
    scanner = FenceScanner(in_reasoning=True)
    assert not scanner.feed("```bash\nls\n```\n")
    assert scanner.feed("</think>\n```bash\nls\n```\n")


PIECES = st.sampled_from(
    [
        *("```", "````", "~~~", "bash", "\n", "\n\n", "```bash\n", "\n```\n", "\r\n", "\t", " ", "ls", "cat ", "é😀"),
        *("<<EOF", "<<'E F'", "<<-EOF", "EOF\n", "E F\n", "'", '"', "$(", "((", ")", "`", "\\", "#", "${", "}", "$'"),
        *("TASK_COMPLETE", "<think>", "</think>"),
    ]
)
REPLIES = st.lists(PIECES, max_size=40).map("".join)


@settings(max_examples=400, deadline=None)
@given(REPLIES, st.lists(st.integers(1, 7), min_size=1))
@example("```bash\r\nls\r\n```\r\n", [1])
def test_scanning_piece_by_piece_stops_at_the_first_prefix_that_is_closed(text: str, sizes: list[int]) -> None:
    scanner = FenceScanner()
    at = 0
    turn = 0
    while at < len(text) and not scanner.closed:
        size = sizes[turn % len(sizes)]
        closed = scanner.feed(text[at : at + size])
        at += size
        turn += 1
        assert closed == scanner.closed == has_closed_command(text[:at])
    assert scanner.closed == has_closed_command(text)


@settings(max_examples=400, deadline=None)
@given(REPLIES, st.booleans())
def test_every_reply_gets_exactly_one_kind(text: str, lenient: bool) -> None:
    parsed = parse_reply(text, lenient=lenient)
    assert (parsed.error is not None) == (parsed.kind == "format_error")
    assert (parsed.command is not None) == parsed.kind.startswith("command")
    assert parsed.complete == parsed.kind.endswith("complete")
    assert parsed.command is None or parsed.command.strip()


@settings(max_examples=200, deadline=None)
@given(REPLIES)
def test_a_cut_reply_holds_one_command_or_a_format_error(text: str) -> None:
    for end in range(len(text) + 1):
        if has_closed_command(text[:end]):
            parsed = parse_reply(text[:end])
            assert parsed.command is not None or parsed.error is not None
            assert parsed.error is not FormatError.SEVERAL_COMMANDS
            break


SAFE_LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=30)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(SAFE_LINE, st.sampled_from(["```", "```bash", "~~~", "TASK_COMPLETE"])), max_size=12))
def test_any_file_written_by_heredoc_survives(lines: list[str]) -> None:
    script = "\n".join(["cat > f <<'END_OF_FILE'", *lines, "END_OF_FILE"])
    assert parse_reply(bash(script)).command == script


SCRIPTS = [
    "cat <<EOF\n$(echo a)\nEOF",
    "cat <<A <<B\n1\nA\n2\nB",
    "cat <<'a b'\nx\na b",
    "cat <<''\nx\n",
    'cat <<E"O"F\nx\nEOF',
    "echo $(( (1<<2) << 1 ))",
    "x=$(cat <<EOF\n)\nEOF\n)\necho $x",
    "if true; then cat <<EOF; fi\nx\nEOF",
    "(cat <<EOF)\nx\nEOF",
    "cat <(cat <<EOF\nx\nEOF\n)",
    "echo `cat <<EOF\nx\nEOF\n`",
    "echo a#b '#' \"#\" ${x#y} # 'open",
    'echo "a`echo "b c"`d"',
    'echo "${x:-$(echo "}\'")}"',
    "echo \\' \\\" \\` \\<<EOF",
    "for ((i=0;i<2;i++)); do echo $((i<<1)); done",
    "a=(1 2); echo ${a[@]} ${#a[@]} <<< 'x'",
    '[[ x =~ ^(x|y)$ ]] && echo "it\'s"',
    "awk '{ print \"<<EOF\" }' /dev/null",
    "cat <<EOF \\\n| tr a-z A-Z\nx\nEOF",
    'case x in (x) echo "it\'s";; esac',
    "sed 's/a/'\"'\"'/' <<-EOF\n\ta\n\tEOF",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_bash_takes_as_whole_is_whole_and_every_cut_that_bash_calls_open_is_not_run(script: str) -> None:
    def open_for_bash(text: str) -> bool:
        told = subprocess.run(["bash", "-n"], input=text + "\n", capture_output=True, text=True).stderr
        return "looking for matching `'" in told or 'looking for matching `"' in told or "here-document" in told

    assert not open_for_bash(script)
    assert parse_reply(bash(script)).command == script
    lines = script.split("\n")
    for n in range(1, len(lines)):
        cut = "\n".join(lines[:n])
        if open_for_bash(cut):
            assert parse_reply(bash(cut)).kind == "format_error"


def test_a_megabyte_in_small_pieces_is_scanned_in_linear_time() -> None:
    import time

    def seconds(size: int) -> float:
        scanner = FenceScanner()
        text = "```bash\n" + "echo 'some text' # and a comment\n" * (size // 32)
        start = time.perf_counter()
        for at in range(0, len(text), 3):
            scanner.feed(text[at : at + 3])
        return time.perf_counter() - start

    assert seconds(400_000) < 12 * seconds(100_000)


def test_final_content_keeps_text_without_reasoning() -> None:
    assert final_content("a <think> b </think> c") == "a <think> b </think> c"


# No line begins with a tab: CommonMark expands it where a fence was indented, a shell script needs it as it is.
FENCE_LINES = st.builds(
    lambda indent, run, info: indent + run + info,
    st.sampled_from(["", " ", "   ", "    "]),
    st.sampled_from(["``", "```", "````", "~~", "~~~", "~~~~~", "``~", ""]),
    st.sampled_from(["", " ", "\t", "bash", " sh x", "bash `x`", "text", "~", "words here"]),
).filter(lambda line: not line.lstrip(" ").startswith("\t"))


@settings(max_examples=500, deadline=None)
@given(st.lists(FENCE_LINES, max_size=10))
def test_blocks_are_those_of_a_commonmark_parser(lines: list[str]) -> None:
    tokens = MarkdownIt("commonmark").parse("".join(f"{line}\n" for line in lines))
    expected = [(token.info.split() or [""])[0].lower() for token in tokens if token.type == "fence"]
    contents = [token.content for token in tokens if token.type == "fence"]
    scanner = _Scanner(lenient=False)
    for line in lines:
        scanner.line(line)
    blocks = [*scanner.blocks, *([scanner.open] if scanner.open is not None else [])]
    assert [block.language for block in blocks] == expected
    assert ["".join(f"{line}\n" for line in block.lines) for block in blocks] == contents
