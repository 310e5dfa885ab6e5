"""What runs on a node: agent -> launcher -> one worker per rank -> one interpreter per worker."""
