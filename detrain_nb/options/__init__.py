"""Command lines that people type in a notebook and in a shell: the shared options and their errors."""
