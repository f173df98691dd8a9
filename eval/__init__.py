"""Measuring answers."""
