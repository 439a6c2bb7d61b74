"""Rows of data: their kinds, their columns and messages, and what is wrong with one."""
