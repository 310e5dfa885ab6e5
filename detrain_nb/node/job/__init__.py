"""A job on its node: its folder of files, the runner that executes it, and the service for the notebook's requests."""
