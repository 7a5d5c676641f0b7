"""Which requests run together, and when. Decisions are plain functions over values."""
