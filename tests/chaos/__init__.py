"""Faults at random moments under a load of real requests, and the cost of these faults.

`campaign` runs the faults, `faults` draws them from a seed, `load` sends requests and checks answers, `figures` counts. `pair`
strikes two engines behind a router: one computes prompts, the other answers them. `python tests/chaos` is the long form of
both; tests/e2e/test_chaos.py and tests/e2e/test_pair_chaos.py run short ones.
"""
