"""Hit ratios of the DRAM tier's eviction policy, on three traces and on generated ones: see `tiers/benches/policy.rs`.

    benches/run policy [--trace FILE] [--shared | --disk | --fetch-back | --forecast | --states | --constants]

`--shared` replays a trace in rooms shared by two namespaces, and in two pods; `--disk` replays all traces in DRAM with a disk
below it; `--fetch-back` replays them in time, with reads of that disk on demand, and ahead by an oracle;
`--forecast` says how far hit ratios foretold for other rooms are from those measured there. `--states` replays the agents'
trace for a model with states beside full attention: see `sidecar/benches/states/main.rs`. `--constants` compares other
constants of the policy (`benches/constants.py`). FILE has one JSON object a line with `hash_ids`, as those in
`benches/traces/`, compressed by gzip or not; then nothing but it is replayed. The last line is JSON.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benches import constants, harness, traces

STATES = ("cargo", "bench", "--quiet", "--package", "sidecar", "--bench", "states", "--")
# The longest prompt: the model has 262,144 tokens with its answer.
STATES_TOKENS = 262_144 - 32_768
BENCH = ("cargo", "bench", "--quiet", "--package", "tiers", "--bench", "policy", "--")


HINTED = "_hinted"
FETCH_BACK = "fetch_back_"
DISK = "disk_"


def requests(trace: Path, *, hinted: bool, timed: bool) -> Iterator[str]:
    """A line for each request: its milliseconds if `timed`, the way it ended, 1 for its session's known last, its blocks."""
    ways: dict[str, int] = {}
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for line in lines:
            request = json.loads(line)
            # The bench needs no names of ends: each name gets a number, and 0 is for none.
            way = ways.setdefault(request["stop"], len(ways) + 1) if "stop" in request else 0
            last = int(hinted and request.get("last", False))
            time = (request["timestamp"],) if timed else ()
            yield " ".join(str(number) for number in (*time, way, last, *request["hash_ids"]))


def plain(directory: Path, name: str, trace: Path) -> tuple[str, str]:
    """Arguments of the bench: the kind of replay, and the file with a trace's requests."""
    file = directory / name
    lines = requests(trace, hinted=name.endswith(HINTED), timed=name.startswith(FETCH_BACK))
    file.write_text("".join(f"{line}\n" for line in lines))
    return name, str(file)


def with_answers(directory: Path, trace: Path) -> str:
    """The file for the bench of states. A line: the way of the answer's end, the prompt's tokens, all tokens, block numbers."""
    ways: dict[str, int] = {}
    file = directory / "states"
    with file.open("w") as lines:
        for blocks, prompt, total, stop in traces.with_answers(trace, STATES_TOKENS):
            way = ways.setdefault(stop, len(ways) + 1) if stop else 0
            print(way, prompt, total, *blocks, file=lines)
    return str(file)


def main() -> None:
    """Runs the bench."""
    parser = harness.parser(__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace alone")
    parser.add_argument("--shared", action="store_true", help="rooms of two namespaces, and two pods")
    parser.add_argument("--disk", action="store_true", help="DRAM with a disk of three times its room")
    parser.add_argument("--fetch-back", action="store_true", help="the same in time, beside an oracle that reads ahead")
    parser.add_argument("--forecast", action="store_true", help="what is foretold of other rooms")
    parser.add_argument("--states", action="store_true", help="a model with states beside full attention")
    parser.add_argument("--constants", action="store_true", help="other constants of the policy, judged on held-out traces")
    options = parser.parse_args()
    kinds = [kind for kind in ("shared", "forecast") if getattr(options, kind)]
    with tempfile.TemporaryDirectory() as directory:
        if options.states:
            name = "trace" if options.trace else "agents"
            file = with_answers(Path(directory), options.trace or traces.FILES[name])
            subprocess.run([*STATES, name, file], check=True)
            return
        if options.constants:
            files = traces.FILES.items()
            constants.compare(BENCH, {name: plain(Path(directory), name, trace) for name, trace in files})
            return
        if kinds:
            replayed = dict.fromkeys(kinds, options.trace or traces.FILES["conversation"])
        elif options.fetch_back or options.disk:
            played = {"trace": options.trace} if options.trace else traces.FILES
            kind = FETCH_BACK if options.fetch_back else DISK
            replayed = {f"{kind}{name}": trace for name, trace in played.items()}
        elif options.trace:
            replayed = {"trace": options.trace, "trace_hinted": options.trace}
        else:
            replayed = traces.FILES | {f"agents{HINTED}": traces.FILES["agents"]}
        arguments = [word for name, trace in replayed.items() for word in plain(Path(directory), name, trace)]
        generated = ["disk_turns"] if options.disk else ["generated"]
        if kinds or options.fetch_back or options.trace:
            generated = []
        subprocess.run([*BENCH, *arguments, *generated], check=True)


if __name__ == "__main__":
    main()
