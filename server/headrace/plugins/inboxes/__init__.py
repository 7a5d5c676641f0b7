"""Inboxes: doors whose calls come from a broker's messages, and whose answers go back to one.

`config` reads the file that declares them, `ledger` decides what is run, delivered and committed,
`bodies` converts messages to calls and answers to messages, `pump` moves messages from a broker to
the engine, `dispatch` their outcomes to outboxes, `door` has all inboxes of a process. `broker` is
the interface to brokers; `kafka`, `nats`, `redis` and `amqp` implement it, each with its library.
"""
