"""The engine: models by name, their life cycle, the stages of calls, and the account."""
