"""What runs in the notebook's kernel: a session with the ranks, its cells and their results."""
