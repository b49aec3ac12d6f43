"""Routing of requests to one of several engines with the same weights.

`ReplicaRouter` (router.py) chooses a replica for a request, preferring the one whose prefix cache is likely
to hold the request's prefix. `Conversations` (conversations.py) computes the prefix key that keeps the turns
of a conversation on one replica. Both are used by engine/replicas/placement.py, and the router also by the
server's integration with Ray Serve.
"""
