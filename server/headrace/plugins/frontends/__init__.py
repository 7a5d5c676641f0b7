"""Front ends: processes that serve clients for one engine, and their link to it."""
