"""The part that runs in the notebook's kernel: a session with its ranks, its cells and their results."""
