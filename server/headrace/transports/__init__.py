"""The doors. Each turns its protocol into requests, and responses into its protocol."""
