"""The CPU decode step in C, and what compiles it."""
