"""How bytes and files reach a node."""
