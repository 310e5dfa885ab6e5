"""Layers of a model in parts, side by side on several ranks: the plan, its proof, and its effect."""
