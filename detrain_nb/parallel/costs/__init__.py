"""What a model costs between the places where it can be cut, and which of its parts make which stage."""
