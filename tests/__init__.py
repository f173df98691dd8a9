"""The tests, and what they share."""
