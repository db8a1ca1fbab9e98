"""Joins the roles of workers: the table of all, and the aggregated role, which is made of both others."""
