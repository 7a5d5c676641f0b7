"""The command `headrace replay`: `replaying` sends captured requests again."""
