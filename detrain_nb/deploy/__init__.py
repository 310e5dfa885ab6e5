"""Deployment of our code, the user's code and an agent to nodes; used by session, jobs and doctor."""
