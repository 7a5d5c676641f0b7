"""Access: who a client is, and which roles it has, by one TOML file.

`document` reads the file with the lines of its members, `rules` makes roles and rules of it; `keys`
are API keys, `issuers` the public keys of those who sign tokens, `tokens` verifies these, and
`certificates` matches clients' certificates. `file` is the `Access` of the server, which follows
the file; `command` is `headrace access`. `docs/access.md` describes the file.
"""
