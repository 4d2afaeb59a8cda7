"""The pod with the shortest expected time for a prompt, by a score of each sidecar: for a router in Python.

    python examples/score_pods.py --token-file FILE HOST:PORT... < tokens

prints the sidecar of that pod, and nothing if no pod has any of the prompt: then route by another rule, such as load.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

# The time of a router for its choice.
DEADLINE_S = 0.1
# As many as a router asks at once. A request beyond its deadline ends in its thread.
POOL = ThreadPoolExecutor(64)


def read_score(address, body, token, deadline_s):
    """A pod's score; None without an answer in time, and if the sidecar refuses, as beyond its budget."""
    connection = HTTPConnection(address, timeout=deadline_s)
    try:
        connection.request("POST", "/score", body, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return json.load(answer) if answer.status == HTTPStatus.OK else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def best_address(addresses, tokens, token, deadline_s=DEADLINE_S):
    """The address of the best pod, or None. Every pod is asked at once."""
    body = json.dumps({"tokens": tokens})
    asked = {POOL.submit(read_score, address, body, token, deadline_s): address for address in addresses}
    done, _ = wait(asked, deadline_s)
    scores = {asked[task]: task.result() for task in done if task.result()}
    found = {address: score for address, score in scores.items() if score["found"]}
    if not found:
        return None
    if all(score["expected_ms"] is not None for score in scores.values()):
        return min(scores, key=lambda address: scores[address]["expected_ms"])
    return max(found, key=lambda address: found[address]["found"])


def main():
    """Reads the tokens from standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S)
    parser.add_argument("addresses", nargs="+", metavar="HOST:PORT")
    options = parser.parse_args()
    tokens = [int(word) for word in sys.stdin.read().split()]
    best = best_address(options.addresses, tokens, options.token_file.read_text().strip(), options.deadline_s)
    if best:
        print(best)


if __name__ == "__main__":
    main()
