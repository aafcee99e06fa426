"""Prints the full sample of /etc/serversync.env: every key of the option table, at its default."""

import sys
import textwrap
from pathlib import Path

sys.dont_write_bytecode = True
# debian/ is at the root of the tree only while the package is built.
ROOT = next(path for path in Path(__file__).resolve().parents if (path / "serversync.py").exists())
sys.path.insert(0, str(ROOT))

import serversync  # noqa: E402  the line above finds it

HEAD = """\
# Every key of serversync. /etc/serversync.env needs the required ones and those you change; lines
# that begin with # show the defaults. `serversync --help` says the same.
"""


def sample() -> str:
    parts = [HEAD]
    for name, option in serversync.OPTIONS.items():
        default, text = option.metadata["default"], option.metadata["text"]
        text = f"Required: {text}" if default is None else text
        lines = textwrap.wrap(f"{text[0].upper()}{text[1:]}.", 96)
        parts.append("".join(f"# {line}\n" for line in lines) + f"#{name}={default or ''}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(sample(), end="")
