"""Faster ways of one decode step, each checked against the eager one."""
