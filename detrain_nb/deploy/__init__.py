"""Our code, the user's code and an agent, brought up on nodes; used by session."""

from .bringing_up import End, attach_to_agents, bring_up_agents, give_up_agents, leave_agents
from .chosen_nodes import Nodes, check_session_name, find_nodes, nodes_of, transports_to
from .ending import end_agents

__all__ = [
    "End",
    "Nodes",
    "attach_to_agents",
    "bring_up_agents",
    "check_session_name",
    "end_agents",
    "find_nodes",
    "give_up_agents",
    "leave_agents",
    "nodes_of",
    "transports_to",
]
