"""The long form: `python tests/chaos --rounds 100 --seed 1`.

Progress goes to standard error. The last line of standard output is the result, one JSON object: chaos/figures.py explains its
numbers, chaos/pair.py those of a pair. Exits 1 if a token was wrong or a request lost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import campaign, faults, pair
from testkit import model, tokenizer


def main() -> int:
    """Runs a campaign and prints its figures."""
    parser = argparse.ArgumentParser(prog="chaos", description="Faults under load, on real vLLM engines.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--damage", action="store_true", help="the negative control: damage the pool, expect wrong tokens")
    parser.add_argument("--pair", action="store_true", help="two engines behind a router, and what strikes each of all four")
    parser.add_argument("--logs", type=Path, help="keep the engines' and the sidecar's logs here")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    with tempfile.TemporaryDirectory(prefix="pillion-chaos-") as temporary:
        directory = arguments.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if arguments.pair:
            shape = model.write(Path(temporary) / "model", model.TINY)
            tokenizer.write(shape)
            two = pair.Campaign(directory, shape, arguments.seed)
            pairs = two.run_damaged() if arguments.damage else two.run(pair.plan(arguments.rounds, arguments.seed))
            print(pairs.line(), flush=True)
            return int(not pairs.passed())
        run = campaign.Campaign(directory, model.write(Path(temporary) / "model", model.TINY), arguments.seed)
        found = run.run_damaged() if arguments.damage else run.run(faults.plan(arguments.rounds, arguments.seed))
    print(found.line(), flush=True)
    return 1 if found.wrong_tokens or found.wrong_logprobs or found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
