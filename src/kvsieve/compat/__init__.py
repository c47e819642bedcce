"""Layers on which code written for other libraries runs."""
