"""A job on its node: its folder of files, the runner that runs it, and the service that the notebook talks to."""
