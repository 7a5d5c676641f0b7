"""The scheduler: queue, policy, batches and instances. Decisions are functions over values."""
