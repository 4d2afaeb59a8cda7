"""Requests of real services: README.md has their sources."""

from pathlib import Path

FOLDER = Path(__file__).parent
FILES = {
    "conversation": FOLDER / "mooncake-conversation.jsonl.gz",
    "synthetic": FOLDER / "mooncake-synthetic.jsonl.gz",
    "agents": FOLDER / "claude-code-agents.jsonl.gz",
}
