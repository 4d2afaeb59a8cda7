"""The policy's remarks in the words of vLLM's users: the event, and the remedy."""

from __future__ import annotations

from pillion import vllm_compat

logger = vllm_compat.init_logger("vllm.pillion")

NOT_LOADED = {
    "recomputed": "pillion: %d blocks could not be loaded and are computed again",
    "ended": "pillion: %d blocks could not be loaded, which ends their requests: set kv_load_failure_policy to recompute",
}


def say_remark(name: str, first: int, second: int | str, loss: str) -> None:
    """Logs a remark with its numbers. `loss`: the fate of a request with a failed load."""
    if name == "stalled":
        logger.error(
            "pillion: vLLM reported no output of the last %d steps to this connector, so nothing is kept until it does: "
            "let any wrapper of the model runner or executor pass on kv_connector_worker_meta",
            first,
        )
    elif name == "passed_over":
        logger.warning(
            "pillion: vLLM did not take the output of %d steps before step %d, because they raised, were skipped or were "
            "refused. Nothing that they computed is kept. vLLM may still list their blocks: reset its prefix cache",
            first,
            second,
        )
    elif name == "unproven":
        logger.warning(
            "pillion: vLLM's prefix cache lists %d blocks of request %s that no accepted step has filled. vLLM computes "
            "with them, so its answer may be wrong, and nothing of it is kept. A failed step leaves such blocks, and so "
            "does a preemption under --scheduling-policy priority: reset vLLM's prefix cache, and use --scheduling-policy "
            "fcfs. This line is logged once; vllm:pillion_unproven_blocks_total counts the blocks",
            first,
            second,
        )
    elif name == "changed":
        logger.warning(
            "pillion: the weights of the ranks have changed without a visible call, so blocks from before are not "
            "kept. Reset vLLM's prefix cache whenever you change weights"
        )
    elif text := NOT_LOADED.get(loss):
        logger.warning(text, first)
