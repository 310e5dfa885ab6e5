"""Stages of a model on several ranks, and the schedules that run them."""
