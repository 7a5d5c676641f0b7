"""The scheduler: queue, policy, batches and instances. Decisions are functions over values.

`batcher` queues the calls of a version and gives `batch`es to instances, by the decisions of
`policy` and `queue`. `quarantine` isolates inputs that killed workers. `upstreams`, `sequences` and
`fail_over` choose a server, an instance for a sequence, and a backend.
"""
