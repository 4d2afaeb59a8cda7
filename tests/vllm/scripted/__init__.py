"""The scripted engine: a process that `stage.Player` starts, with the vLLM on its path."""
