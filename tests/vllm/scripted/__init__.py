"""The scripted engine: a process that `stage.Player` starts, with whichever vLLM is on its path."""
