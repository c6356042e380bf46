"""Turns rows of measurements into tables, figures and pages; needs neither torch nor a GPU."""
