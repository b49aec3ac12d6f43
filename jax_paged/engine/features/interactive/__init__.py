"""Interactive access to running requests, for notebooks, experiments and tree search.

KVAccess reads the keys, values and attention of a request and drops some of its KV blocks. RequestEdits forks
a request, takes back output tokens, and verifies draft tokens. StepPlans shows the next step before it runs
and lets the caller edit it. All three add methods to LLMEngine. They change requests only while no step is in
flight.
"""
