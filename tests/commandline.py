"""The command line as the program's own parser has it: every command, with what it takes."""

import argparse
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import serversync

# Of every command, and told once.
COMMON = ("--help", "--env-file")

Synopses = dict[str, list[str]]  # "dlq show": ["ID", "[--json]"], sorted


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Each command by its words, groups of commands too; the program itself is ''."""
    return dict(_walk("", serversync.build_parser()))


def _walk(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for word, inner in subcommands(parser).items():
        yield from _walk(f"{name} {word}".strip(), inner)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def words(parser: argparse.ArgumentParser) -> set[str]:
    """What may come first: an action, or one of few names."""
    operands = (action for action in parser._actions if not action.option_strings)
    return {str(word) for action in operands for word in action.choices or ()}


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Those that --help shows, by their long names."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and action.help != argparse.SUPPRESS
    }


def synopses() -> Synopses:
    """What each command takes, but for what all of them do. One with actions may stand alone."""
    return {
        name: sorted([*_operands(parser), *_options(parser)])
        for name, parser in parsers().items()
        if not _wants_more(parser)
    }


def _wants_more(parser: argparse.ArgumentParser) -> bool:
    return any(
        isinstance(action, argparse._SubParsersAction) and action.required
        for action in parser._actions
    )


def _operands(parser: argparse.ArgumentParser) -> Iterator[str]:
    shapes: dict[Any, str] = {None: "{}", "?": "[{}]", "+": "{}…"}
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield shapes[action.nargs].format(action.metavar)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for name, action in options(parser).items():
        if name not in COMMON:
            yield f"[{name} {action.metavar}]" if action.metavar else f"[{name}]"


def read_synopses(texts: Iterable[str]) -> Synopses:
    """The same of lines such as `serversync dlq list [TOPIC] [--page N]`."""
    found: Synopses = {}
    for text in texts:
        program, *words = re.findall(r"\[[^]]*\]|\S+", text.replace("...", "…"))
        assert program == "serversync", text
        name = list(takewhile(re.compile("[a-z-]+").fullmatch, words))
        found.setdefault(" ".join(name), []).extend(words[len(name) :])  # one way to use it a line
    return {name: sorted(words) for name, words in found.items()}
