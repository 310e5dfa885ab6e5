"""Our code, the user's code and an agent, brought up on nodes; used by session, jobs and doctor."""
