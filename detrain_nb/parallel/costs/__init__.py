"""Costs of a model between the places where it can be cut, and the choice of which units make which stage."""
