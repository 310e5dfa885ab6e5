"""Stages of a model, one after the other on several ranks, and the schedules that run them."""
