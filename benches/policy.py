"""Hit ratios of the DRAM tier's eviction policy, on a real trace and on synthetic ones: see `tiers/benches/policy.rs`.

    benches/run policy [--trace FILE | --shared | --disk | --forecast]

`--shared` replays the conversations in rooms that two namespaces share, and in two pods; `--disk` in DRAM with a disk below
it; `--forecast` says how far what is foretold of other rooms is from what they find. FILE has one JSON object a line with
`hash_ids`, as those in `benches/traces/`, compressed by gzip or not; then nothing but it is replayed. The last line is JSON.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benches import harness

CONVERSATION = Path(__file__).parent / "traces" / "mooncake-conversation.jsonl.gz"
BENCH = ("cargo", "bench", "--quiet", "--package", "tiers", "--bench", "policy", "--")


def requests(trace: Path) -> Iterator[str]:
    """The block numbers of each request."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for line in lines:
            yield " ".join(str(number) for number in json.loads(line)["hash_ids"])


def main() -> None:
    """Runs the bench."""
    parser = harness.parser(__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace alone")
    parser.add_argument("--shared", action="store_true", help="rooms of two namespaces, and two pods")
    parser.add_argument("--disk", action="store_true", help="DRAM with a disk of three times its room")
    parser.add_argument("--forecast", action="store_true", help="what is foretold of other rooms")
    options = parser.parse_args()
    trace = options.trace
    with tempfile.NamedTemporaryFile("w", suffix=".trace") as plain:
        plain.writelines(f"{request}\n" for request in requests(trace or CONVERSATION))
        plain.flush()
        if options.shared:
            traces = ["shared", plain.name]
        elif options.forecast:
            traces = ["forecast", plain.name]
        elif options.disk:
            traces = ["disk", plain.name]
        else:
            traces = ["trace", plain.name] if trace else ["conversation", plain.name, "synthetic"]
        subprocess.run([*BENCH, *traces], check=True)


if __name__ == "__main__":
    main()
